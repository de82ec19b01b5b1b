"""The real machines of the replication protocol in a world of virtual time and seeded faults."""
