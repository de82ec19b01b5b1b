"""Writing logs from Spark: tasks write detached segments, which each log adopts by one compare-and-set."""
