"""One running bookie: its startup, its replicas, and the server that answers requests."""
