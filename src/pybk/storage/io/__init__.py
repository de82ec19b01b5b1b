"""The seams to the operating system and to LMDB: every file operation and every transaction goes through here."""
