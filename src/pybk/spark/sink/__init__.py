"""Writing ledgers from Spark: tasks write ledgers, a manifest names them, one compare-and-set commits."""
