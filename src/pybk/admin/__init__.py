"""Looking after stores: the command line and the demonstration."""
