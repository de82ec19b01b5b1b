"""The ledger manager of an application, and the writers and readers that it opens."""
