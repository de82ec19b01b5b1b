"""Figures of ledgers in Spark, compared with Parquet."""
