"""Bookies that run on the hosts of executors, one for each, and how a task finds the nearest."""
