"""One running bookie: what it keeps, and who it answers."""
