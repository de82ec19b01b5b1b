"""Mutants of the library's syntax trees, drawn from a seed, and the tests and simulator runs that must notice them."""
