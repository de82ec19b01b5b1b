"""Contests of the recorders of the library ``eventsourcing``: on a write-ahead log, and the library's own on SQLite."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

from eventsourcing.persistence import ApplicationRecorder, InfrastructureFactory, StoredEvent

from bench.contest import THREADS, Contest, Contestant, Run, Scale, in_threads, rate
from bench.payloads import PASSWORD, PAYLOAD

AGGREGATE_EVENTS: Final = 8
"""Events of each aggregate in what is read."""
PAGE: Final = 100
"""Notifications that a follower asks for at once."""
BATCH: Final = 100
FILLED: Final = 8
"""Events of a transaction in what is read."""

Work = Callable[[ApplicationRecorder, float], float]


def settings(kind: str, directory: Path) -> dict[str, str]:
    """Return the environment of an application that keeps its events in a directory."""
    if kind == "pybk":
        return {
            "PERSISTENCE_MODULE": "pybk.adapters.eventsourcing",
            "PYBK_STORE": str(directory / "store"),
            "PYBK_PASSWORD": PASSWORD.decode(),
        }
    # SQLite syncs each transaction by default, in the mode that the library chooses (WAL), too.
    return {"PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": str(directory / "events.db")}


@contextmanager
def working(kind: str, work: Work, events: bool, directory: Path, scale: Scale) -> Iterator[Run]:
    """Work on the recorder of one application, which is empty or has as many events as the scale says."""
    factory = InfrastructureFactory.construct(settings(kind, directory))
    try:
        recorder = factory.application_recorder()
        if events:
            fill(recorder, scale.entries)
        yield partial(work, recorder)
    finally:
        factory.close()


@contextmanager
def restarting(kind: str, directory: Path, scale: Scale) -> Iterator[Run]:
    """Open an application's recorder with its events, ask for the last one, and close it."""

    def open_and_close() -> int:
        factory = InfrastructureFactory.construct(settings(kind, directory))
        assert factory.application_recorder().max_notification_id() == scale.entries
        factory.close()
        return 1

    factory = InfrastructureFactory.construct(settings(kind, directory))
    fill(factory.application_recorder(), scale.entries)
    factory.close()
    yield partial(rate, open_and_close)


def events_of(originator: UUID, first: int, number: int) -> list[StoredEvent]:
    """Return consecutive events of an aggregate."""
    return [StoredEvent(originator, first + each, "bench:Aggregate.Changed", PAYLOAD) for each in range(number)]


def fill(recorder: ApplicationRecorder, events: int) -> None:
    """Insert events of aggregates that all change in turns, so that those of each are far apart."""
    aggregates = events // AGGREGATE_EVENTS
    for number in range(0, events, FILLED):
        batch = range(number, min(number + FILLED, events))
        recorder.insert_events([event for each in batch for event in turn(each, aggregates)])


def turn(number: int, aggregates: int) -> list[StoredEvent]:
    """Return the event of one turn."""
    return events_of(UUID(int=number % aggregates), number // aggregates, 1)


def save_in_turn(recorder: ApplicationRecorder, seconds: float) -> float:
    """Insert events of an aggregate one by one."""
    originator, versions = uuid4(), count()

    def save() -> int:
        recorder.insert_events(events_of(originator, next(versions), 1))
        return 1

    return rate(save, seconds)


def save_in_threads(recorder: ApplicationRecorder, seconds: float) -> float:
    """Insert events of many aggregates one by one, from several threads."""
    return in_threads(lambda: recorder.insert_events(events_of(uuid4(), 1, 1)), THREADS, seconds)


def save_batches(recorder: ApplicationRecorder, seconds: float) -> float:
    """Insert many events of an aggregate at once."""

    def save() -> int:
        recorder.insert_events(events_of(uuid4(), 1, BATCH))
        return BATCH

    return rate(save, seconds)


def follow(recorder: ApplicationRecorder, seconds: float) -> float:
    """Read all notifications in pages, again and again."""

    def read() -> int:
        last = 0
        while page := recorder.select_notifications(last, PAGE, inclusive_of_start=False):
            last = page[-1].id
        return last

    return rate(read, seconds)


def read_aggregates(recorder: ApplicationRecorder, seconds: float) -> float:
    """Read all events of aggregates at random."""
    last = recorder.max_notification_id()
    assert last is not None
    source, aggregates = random.Random(1), last // AGGREGATE_EVENTS

    def read() -> int:
        recorder.select_events(UUID(int=source.randrange(aggregates)))
        return 1

    return rate(read, seconds)


def contest(name: str, title: str, work: Work, *, events: bool) -> Contest:
    """Return a contest of both recorders."""
    kinds = ("pybk", "sqlite3")
    return Contest(name, title, "/s", [Contestant(kind, partial(working, kind, work, events)) for kind in kinds])


CONTESTS: Final = (
    contest("es-save", "one thread saves events of 1 KiB, each durable", save_in_turn, events=False),
    contest("es-threads", f"{THREADS} threads save events, each durable", save_in_threads, events=False),
    contest("es-batches", f"one thread saves {BATCH} events at once; events", save_batches, events=False),
    contest("es-follow", f"notifications in pages of {PAGE}", follow, events=True),
    contest("es-read", f"aggregates with {AGGREGATE_EVENTS} events that are far apart", read_aggregates, events=True),
    Contest(
        "es-restart",
        "open a recorder with its events, and close it",
        "/s",
        [Contestant(kind, partial(restarting, kind)) for kind in ("pybk", "sqlite3")],
    ),
)
