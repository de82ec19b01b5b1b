"""The queue of a ledger's appends in a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pybk.client.append_queue import AppendBatch, AppendQueue
from pybk.threads.group_commit import Completion


def queue_of_no_ledger(waited: list[Completion]) -> AppendQueue:
    """Return an append queue whose caller is the leader, and which notes what is waited for."""

    def finish(completion: Completion) -> None:
        completion.done = True

    group: Any = SimpleNamespace(finish=finish, wait=waited.append, when_done=None)
    ledger: Any = SimpleNamespace(confirm=lambda _: None, error=None, deferred=False)
    return AppendQueue(ledger, group, lambda: None, lambda call: call(), 1 << 20)


def batch_of(entries: int) -> AppendBatch:
    """Return a batch of so many entries, the last of which is entry 0."""
    batch = AppendBatch()
    staged: Any = SimpleNamespace(sizes=[1] * entries, length_at_end=0, freeze=lambda: None)
    batch.entries, batch.last = staged, 0
    return batch


def test_a_flush_waits_for_what_is_sent_although_an_append_that_failed_left_an_empty_batch() -> None:
    """Else a ledger would be closed before entries that are under way, which its log could not append again."""
    waited: list[Completion] = []
    queue = queue_of_no_ledger(waited)
    queue.sent.append(batch_of(1))
    queue.formed.append(batch_of(0))
    queue.flush()
    assert queue.take() == []
    assert [mark.done for mark in waited] == [False]
    queue.acknowledged(0)
    assert [mark.done for mark in waited] == [True]
    queue.formed.append(batch_of(0))
    queue.flush()
    assert queue.take() == []
    assert [mark.done for mark in waited] == [True, True], "nothing else is under way"
