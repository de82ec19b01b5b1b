"""The options of commands and services: one table, and the parsers and readers that are made from it."""
