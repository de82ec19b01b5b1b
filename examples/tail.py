"""Follow a ledger from a second process, while another one writes it: ``python tail.py STORE [LEDGER]``.

Opens the store read-only: it takes no lock, recovers nothing and writes nothing. Ends when the
ledger is closed and all of it is printed.
"""

from __future__ import annotations

import argparse
import sys

from pybk import LedgerManager, PybkError
from pybk.credentials import Secret


def newest_ledger(manager: LedgerManager) -> int:
    """Return the id of the ledger that was created last."""
    ledgers = list(manager.list_ledgers())
    if not ledgers:
        raise SystemExit("the store has no ledgers yet")
    return max(ledgers, key=lambda ledger_id: manager.ledger_metadata(ledger_id).creation_sequence)


def tail(store: str, ledger_id: int | None, secret: Secret, first: int) -> None:
    """Print a ledger's payloads, a line each, until it is closed."""
    with LedgerManager.open(store, read_only=True) as manager:
        if ledger_id is None:
            ledger_id = newest_ledger(manager)
        with manager.open_ledger(ledger_id, secret=secret, recover=False) as reader:
            for entry in reader.follow(first):
                sys.stdout.buffer.write(entry.payload.rstrip(b"\n") + b"\n")
                sys.stdout.buffer.flush()


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Print a ledger's entries as they are confirmed.")
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("ledger", nargs="?", type=int, help="ledger id; the newest ledger when left out")
    parser.add_argument("--first", type=int, default=0, help="first entry id to print")
    parser.add_argument("--secret-file", help="file with the ledger's secret; else it is in PYBK_SECRET")
    arguments = parser.parse_args()
    try:
        secret = Secret(file=arguments.secret_file, variable="PYBK_SECRET")
        tail(arguments.store, arguments.ledger, secret, arguments.first)
    except PybkError as error:
        print(f"tail: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
