"""Contests of a cluster: three bookie processes and a client on one machine, beside the bare loop beneath it."""
