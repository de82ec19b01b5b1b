"""Code that is broken on purpose, whose histories must be rejected."""

from __future__ import annotations

from tests.simulator.mutating import Mutant, Piece

LMDB = "pybk.metadata.lmdb_store:LmdbMetadataStore."
ZOOKEEPER = "pybk.metadata.zookeeper_store:ZooKeeperMetadataStore."
RECOVERY = "recovery:RecoveryMachine."

MUTANTS = {
    mutant.name: mutant
    for mutant in (
        Mutant(
            "lmdb-cas",
            "compare-and-set compares the version",
            (
                Piece(
                    LMDB + "put",
                    "self._expected(transaction, key, name, version)",
                    "rows.get_value(transaction, name) or self._expected(transaction, key, name, version)",
                ),
            ),
        ),
        Mutant(
            "zookeeper-cas",
            "compare-and-set compares the version",
            (
                Piece(
                    ZOOKEEPER + "put",
                    "self._outcome(self.client.set_async(path, value, _data_version(version)), deadline)",
                    "self._outcome(self.client.set_async(path, value, -1), deadline)",
                ),
            ),
        ),
        Mutant(
            "no-fence",
            "a recovery fences the bookies, and the writer's next entry is refused",
            (
                Piece(
                    RECOVERY + "_fence",
                    "ReadLac(self._metadata.ledger_id, fence=True)",
                    "ReadLac(self._metadata.ledger_id)",
                ),
                Piece(RECOVERY + "_read", "fence=True", "fence=False"),
                Piece(
                    RECOVERY + "_ask_length",
                    "fence = fragment is self._metadata.fragments[-1]",
                    "fence = False",
                ),
            ),
        ),
        Mutant(
            "no-reading",
            "a recovery reads the entries after the last add confirmed",
            (Piece(RECOVERY + "_begin_reading", "self._end_at: int | None = None", "self._end_at = self._lac"),),
        ),
    )
}
"""By name."""
