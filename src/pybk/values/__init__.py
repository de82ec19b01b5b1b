"""Values that callers give, or that cannot change."""
