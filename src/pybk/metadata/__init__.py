"""What a cluster shares: ledgers' metadata, bookies, locks, on LMDB or ZooKeeper. Formats: ``docs/metadata.md``."""
