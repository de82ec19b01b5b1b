"""Figures of logs on ledgers, beside ledgers themselves, sqlite3 and the bare disk."""
