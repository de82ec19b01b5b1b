"""Bookies that run next to executors, one for each, and the discovery of them by tasks."""
