"""Bookies and clients on ZeroMQ: bounded frames, sessions that are authenticated, CURVE. See ``docs/wire.md``."""
