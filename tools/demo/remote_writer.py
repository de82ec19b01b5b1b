"""A writer process of the cluster act: it writes the input over and over, until it is killed or fenced."""

from __future__ import annotations

from demo.child import report, task
from demo.source import Source
from demo.writing import write_chunk
from pybk.errors import LedgerFencedError
from pybk.manager.ledger_manager import LedgerManager


def main() -> None:
    """Write, and report each chunk that is acknowledged."""
    todo = task()
    source = Source(tuple(todo["files"]), todo["bytes"])
    with LedgerManager.connect(todo["metadata"], cluster_secret=bytes.fromhex(todo["secret"])) as manager:
        writer = manager.create_ledger(
            secret=bytes.fromhex(todo["ledger_secret"]), ensemble_size=3, write_quorum=3, ack_quorum=2
        )
        report({"ledger": writer.ledger_id})
        try:
            for chunk in source.repeated():
                report({"progress": write_chunk(writer, 0, chunk, force=False)})
        except LedgerFencedError as error:
            report({"fenced": str(error)})


if __name__ == "__main__":
    main()
