"""The tests: a folder for each of `src/pybk`, and helpers that more than one of them uses."""
