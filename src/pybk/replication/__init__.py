"""The replication protocol: pure state machines that return what to send, to write and to report, and do no I/O."""
