"""Ledgers on several bookies, one of which fails: ``python cluster.py DIRECTORY``.

Here all bookies are in one process, so that the example is one file. In production each is embedded in a process of its
own, or run by ``pybk bookie``; several hosts share a ZooKeeper, ``zk://host:2181/ledgers``, instead of LMDB.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path

from pybk import LedgerManager, PybkError


def run(directory: Path) -> None:
    """Write to three of four bookies, lose one, write on, and read everything back."""
    directory.mkdir(parents=True, exist_ok=True)
    metadata = f"lmdb://{directory.resolve()}/metadata"
    cluster_secret = secrets.token_bytes(32)  # all of a cluster share it; `pybk secret new FILE` keeps one in a file
    with ExitStack() as stack:
        nodes = {
            name: stack.enter_context(
                LedgerManager.open(
                    directory / name,
                    listen="tcp://127.0.0.1:*",
                    metadata=metadata,
                    cluster_secret=cluster_secret,
                    bookie_id=name,
                )
            )
            for name in ("a", "b", "c", "d")
        }
        client = stack.enter_context(LedgerManager.connect(metadata, cluster_secret=cluster_secret))
        secret = secrets.token_bytes(32)  # the ledger's, which is not needed after this run
        writer = client.create_ledger(secret=secret, ensemble_size=3, write_quorum=3, ack_quorum=2)
        writer.append(b"sent to three bookies, and synced by two of them before this returns")
        gone = client.ledger_metadata(writer.ledger_id).fragments[0].ensemble[0].bookie_id
        nodes[gone].close()
        for number in range(1, 201):
            writer.append(b"entry %d; soon another bookie takes the place of the one that went" % number)
        writer.close()
        for fragment in client.ledger_metadata(writer.ledger_id).fragments:
            print(f"from entry {fragment.first_entry_id}:", ", ".join(bookie.bookie_id for bookie in fragment.ensemble))
        with client.open_ledger(writer.ledger_id, secret=secret) as reader:
            print(sum(1 for _ in reader.read(0, reader.last_add_confirmed)), "entries read")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty directory, made if it is not there")
    arguments = parser.parse_args()
    try:
        run(arguments.directory)
    except PybkError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
