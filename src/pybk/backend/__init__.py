"""The interface of the manager and its handles to a local store or to a cluster of bookies."""
