"""The log: group commit, log files that are preallocated, replay and recovery after a stop."""
