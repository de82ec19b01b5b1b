"""A node of the cluster act: a process with a bookie and a client, which recovers ledgers on request."""

from __future__ import annotations

import time

from demo.child import orders, report, task
from pybk.manager.ledger_manager import LedgerManager


def main() -> None:
    """Join the cluster, and open with recovery each ledger that the parent orders."""
    todo = task()
    with LedgerManager.open(
        todo["path"],
        listen="tcp://127.0.0.1:*",
        metadata=todo["metadata"],
        cluster_secret=bytes.fromhex(todo["secret"]),
        bookie_id=todo["name"],
    ) as manager:
        report("serving")
        for order in orders():
            begin = time.perf_counter()
            with manager.open_ledger(order["ledger"], secret=bytes.fromhex(order["ledger_secret"])) as reader:
                report({"last": reader.last_add_confirmed, "seconds": time.perf_counter() - begin})


if __name__ == "__main__":
    main()
