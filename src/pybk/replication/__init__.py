"""The replication protocol: pure machines that say what to send, to write and to tell, and touch nothing themselves."""
