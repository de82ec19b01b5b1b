"""Clusters of real processes on one host, for development and for trying faults: ``pybk dev``."""
