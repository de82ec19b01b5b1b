"""Two commits of pybk side by side."""
