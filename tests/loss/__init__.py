"""Runs are recorded below Python, and cut: whatever a disk may forget is forgotten, and the store is opened.

``recorder.c`` is loaded into a process of a workload and records its writes, changes of names and syncs; ``disk`` makes
from a record what a loss of power may leave; ``campaign`` cuts, and leaves out syncs to see that it is noticed.
"""
