"""Logs, write-ahead logs, subscriptions and blobs, built on ledgers."""
