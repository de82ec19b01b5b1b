"""Bookies and clients on ZeroMQ: bounded frames, authenticated sessions, CURVE. See ``docs/reference/wire.md``."""
