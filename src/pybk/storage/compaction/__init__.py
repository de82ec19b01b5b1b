"""Moving entries: checkpoints, tier moves and compaction."""
