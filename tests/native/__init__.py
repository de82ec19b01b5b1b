"""The native core beside pure Python: the same results for everything, and no byte read or written beyond its place."""
