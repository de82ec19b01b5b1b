"""A workload of a blob store at random, and the model of what the names have to stand for then."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from pybk import BlobStore, LedgerManager
from pybk.errors import StorageRefusedError

NAMES = ("a", "b", "c/d", "c/e")
KEEP = 2
CHUNK = 64

State = dict[str, tuple[bytes, ...]]
"""The versions of each name, the newest last."""


def opened(manager: LedgerManager) -> BlobStore:
    return BlobStore.open(manager, insecure=True, keep=KEEP)


class Model:
    """What the names stand for; while a change is under way, also what they may stand for if it stops anywhere."""

    def __init__(self) -> None:
        self.allowed: list[State] = [{}]

    @property
    def state(self) -> State:
        return self.allowed[-1]

    def begin(self, *later: State) -> None:
        """Begin a change, given the states to which it leads, the last one being that at its end."""
        self.allowed = [self.state, *later]

    def end(self) -> None:
        """Take note of the end of the change."""
        self.allowed = [self.state]

    def take(self, blobs: BlobStore) -> None:
        """Compare a store with the model; what was under way is taken from the store."""
        found = {each.name: tuple(contents(blobs, each.name)) for each in blobs.list()}
        assert found in self.allowed
        self.allowed = [found]

    def check(self, blobs: BlobStore, manager: LedgerManager) -> None:
        """Compare a store with the model, sweep it, and look for what is left over."""
        self.take(blobs)
        blobs.sweep()
        self.take(blobs)
        referred = {version.ledger_id for each in blobs.list() for version in blobs.versions(each.name)}
        assert set(manager.list_ledgers()) == referred, "a ledger is left over"


def contents(blobs: BlobStore, name: str) -> list[bytes]:
    """Return the versions of a name, the newest last."""
    versions = reversed(blobs.versions(name))
    return [blobs.get(name, each.version) for each in versions]


def put(state: State, name: str, data: bytes) -> State:
    return state | {name: (*state.get(name, ()), data)[-KEEP:]}


def without(state: State, name: str) -> State:
    return {each: versions for each, versions in state.items() if each != name}


def work(blobs: BlobStore, random: Random, model: Model) -> Iterator[None]:
    """Put, give up, copy, rename, delete and sweep at random, for ever; yields after each step."""
    while True:
        try:
            step(blobs, random, model)
            model.end()
        except StorageRefusedError:
            model.take(blobs)  # refused at its beginning, or between two states
            raise
        yield


def step(blobs: BlobStore, random: Random, model: Model) -> None:
    """Make one change at random."""
    state, chance, name = model.state, random.random(), random.choice(NAMES)
    data = random.randbytes(random.choice((0, 10, CHUNK, 3 * CHUNK + 1)))
    if chance < 0.4 or not state:
        model.begin(put(state, name, data))
        blobs.put(name, data, chunk=CHUNK)
        return
    old = random.choice(sorted(state))
    if chance < 0.5:
        upload = blobs.create_blob(name, chunk=CHUNK)
        upload.write(data)
        upload.abort()
    elif chance < 0.65:
        model.begin(put(state, name, state[old][-1]) if name != old else state)
        blobs.copy(old, name)
    elif chance < 0.8:
        copied = put(state, name, state[old][-1])
        model.begin(*((copied, without(copied, old)) if name != old else ()))
        blobs.rename(old, name)
    elif chance < 0.95:
        model.begin(without(state, old))
        blobs.delete(old)
    else:
        blobs.sweep()
