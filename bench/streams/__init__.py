"""Figures of logs on ledgers, compared with ledgers themselves and with sqlite3."""
