"""What it costs to watch a cluster over HTTP: run ``python -m bench.operations``."""
