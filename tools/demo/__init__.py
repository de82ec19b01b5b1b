"""The demonstration: real data, a killed writer, a recovery that loses nothing."""
