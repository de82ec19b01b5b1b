"""The writer process of the embedded act, which is killed half-way."""

from __future__ import annotations

import os
import sys

from demo.child import orders, report, task
from demo.source import Source
from demo.writing import KINDS, write_lines
from pybk.manager.ledger_manager import LedgerManager


def main() -> None:
    """Write the whole input, then wait until the parent closes the pipe or kills this process."""
    todo = task()
    with LedgerManager.open(todo["store"]) as manager:
        source = Source(tuple(todo["files"]), todo["bytes"])
        write_lines(manager, source, bytes.fromhex(todo["secret"]), [0] * len(KINDS), report)
        os.close(sys.stdout.fileno())
        list(orders())


if __name__ == "__main__":
    main()
