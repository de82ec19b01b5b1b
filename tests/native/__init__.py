"""The native core next to pure Python: the same results, and no byte read or written beyond its place."""
