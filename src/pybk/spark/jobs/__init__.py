"""Jobs over ledgers, each spread over the executors of a Spark session. See ``docs/howto/spark.md``."""
