"""Threads and event loops, and how one of them waits for another."""
