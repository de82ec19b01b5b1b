"""One bookie's disks: the log, the index over it, and the tiers that entries live in."""
