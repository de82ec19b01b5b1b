"""What a cluster shares: ledgers' metadata, bookies, locks, on LMDB or ZooKeeper: ``docs/reference/metadata.md``."""
