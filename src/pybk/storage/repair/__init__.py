"""Verifying a store record by record, and rebuilding its index."""
