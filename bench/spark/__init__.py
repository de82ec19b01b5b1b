"""Figures of ledgers in Spark, beside Parquet."""
