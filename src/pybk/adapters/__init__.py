"""Other projects' storage interfaces on write-ahead logs; each needs the extra of its name."""
