"""The options of commands and services: one table, and what is made from it."""
