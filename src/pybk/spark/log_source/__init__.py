"""Logs and write-ahead logs as a source of Spark, in the form of its Kafka source."""
