"""The metadata of a cluster, in LMDB or ZooKeeper: ledgers, bookies, locks, …; ``docs/reference/metadata.md``."""
