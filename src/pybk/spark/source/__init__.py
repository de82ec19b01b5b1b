"""Reading ledgers with Spark: planning on the driver, reading in tasks, offsets of streams."""
