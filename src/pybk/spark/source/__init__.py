"""The Spark source: planning on the driver, reading in tasks, offsets of streams."""
