"""Tests of the adapters: other projects' own test cases, and what those do not cover."""
