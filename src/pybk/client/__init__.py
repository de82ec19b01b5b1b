"""The client of a cluster: drives the protocol's machines over links to bookies and a metadata store."""
