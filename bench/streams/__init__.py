"""Figures of logs and blobs on ledgers, compared with ledgers themselves, with sqlite3 and with the bare disk."""
