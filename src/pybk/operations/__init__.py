"""Operating a store or a cluster: status, drains, repair and metadata."""
