"""Figures of a cluster that repairs itself: the loss of a bookie, planning for many ledgers, and rest."""
