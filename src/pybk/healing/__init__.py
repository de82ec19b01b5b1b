"""Self-healing: what a cluster does by itself when bookies are lost, leave or hold damaged entries."""
