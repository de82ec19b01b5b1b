"""Storage tiers: how entries that leave the log are kept, one module a tier."""
