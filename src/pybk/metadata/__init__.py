"""What a cluster shares: ledgers' metadata, bookies, locks, on LMDB or ZooKeeper; see ``docs/reference/metadata.md``."""
