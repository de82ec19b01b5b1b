"""A KeyboardInterrupt at any line of the repair of a lost segment: nothing is lost or doubled, the writer continues."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from pybk.errors import NotEnoughBookiesError
from pybk.streams.log import Log
from tests.cluster.inside import inside
from tests.internals import hold_resumption, patient_logs, wait_for_loss
from tests.interrupting import interrupted_at
from tests.sampling import places
from tests.waiting import WAIT_S

PASSWORD = b"p"
FILES = ("pybk/streams/", "pybk/client/append_queue")


@pytest.mark.sampled(one_in=8, group="processes")
@pytest.mark.timeout(0)
def test_an_interrupt_at_any_line_of_a_repair_leaves_a_log_that_continues(tmp_path: Path) -> None:
    """The main thread repairs, as an append there does, while futures wait for what was lost."""
    with (
        inside(tmp_path, count=1) as cluster,
        cluster.connect(bookie_patience_seconds=0.2) as client,
        patient_logs(),
    ):
        for line in places("repair", 53, 3):
            log = Log.open(client, f"log/{line}", password=PASSWORD, quorums=(1, 1, 1))
            writer = log.writer()
            given = [(writer.append(b"before"), b"before")]
            with hold_resumption(writer):
                cluster.bookies[0].close()
                futures = [writer.append_async(b"%d" % number) for number in range(5)]
                wait_for_loss(writer)
                cluster.bookies[0] = cluster.open_bookie(0)
                fired = interrupted_at(line, FILES, partial(writer.append, b"here"), ignored=(NotEnoughBookiesError,))
            given += [(future.result(WAIT_S), b"%d" % at) for at, future in enumerate(futures)]
            last = writer.append(b"after")
            with log.reader() as reader:
                found = [(record.position, record.data) for record in reader]
            assert found[: len(given)] == given, f"line event {line}"
            assert found[-1] == (last, b"after"), f"line event {line}"
            assert [position.seq for position, _ in found] == list(range(len(found))), f"line event {line}"
            assert [data for _, data in found].count(b"here") <= 1, f"line event {line}"
            writer.close()
            if not fired:
                break
        assert line > 50, "nothing was traced"
