"""Histories of real processes, and whether each could have come from one process that does one thing at a time."""
