"""Contests of a cluster: three bookie processes and a client on one machine, compared with the bare loop under it."""
