"""Other projects' storage interfaces on write-ahead logs and blobs; each needs an extra."""
