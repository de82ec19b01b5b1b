"""A ledger and its entries: their bytes, and the keys, digests and seals that prove them."""
