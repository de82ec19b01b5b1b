"""The bytes of every file, in the order of ``docs/reference/format.md``."""
