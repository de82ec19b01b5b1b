"""Tests of logs, write-ahead logs and what else is built on ledgers."""
