"""The administration of stores and clusters: commands, the interface over HTTP and its page, local clusters."""
