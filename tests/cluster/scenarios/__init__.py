"""Scenarios of failures and of administration, by number, each with real processes; ``__main__`` runs them."""
