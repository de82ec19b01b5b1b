"""The index over the ledgers of a store, kept together with the catalog from which it can be rebuilt."""
