"""Moving entries: checkpoints, tier moves, compaction, and when each of them runs."""
