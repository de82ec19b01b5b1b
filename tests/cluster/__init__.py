"""A cluster as it is used: real processes, real sockets, real files."""
