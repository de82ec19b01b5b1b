"""What goes wrong, and at which operation."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Protocol

from pybk.errors import PybkError

ErrorName = Literal["EIO", "ENOSPC", "short"]
Hit = Literal["EIO", "ENOSPC", "short", "crash"]

WRITING: Final = frozenset(
    (
        "create",
        "write",
        "write_durable",
        "write_zeros",
        "sync",
        "reserve",
        "punch",
        "truncate",
        "rename",
        "unlink",
        "make_directory",
        "sync_directory",
        "commit",
    )
)
READING: Final = frozenset(("open", "read", "view", "read_direct"))


class SimCrash(BaseException):
    """The machine stopped in the middle of an operation; nothing works on this file system any more."""


class _Machine(Protocol):
    dead: bool


class stopping:  # noqa: N801  # used as ``contextlib.suppress`` is
    """Take what a block raises because its machine, a ``SimFileSystem``, stops in it.

    The stop may strike in another thread, which works for the call: the call has the error of the store then.
    """

    def __init__(self, machine: _Machine) -> None:
        self._machine = machine

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return isinstance(error, SimCrash) or (isinstance(error, PybkError) and self._machine.dead)


@dataclass
class _Fault:
    before: int
    hit: Hit
    names: frozenset[str]
    forever: bool


@dataclass
class Faults:
    """Errors and the crash that are still to come."""

    _faults: list[_Fault] = field(default_factory=list)

    def plan(self, before: int, hit: Hit, only: str | Iterable[str] | None, *, forever: bool) -> None:
        """Hit the operation that has ``before`` others of the same names before it."""
        names = WRITING if only is None else frozenset((only,) if isinstance(only, str) else only)
        if before < 0 or not names <= WRITING | READING:
            raise ValueError(f"no operation {before} of {sorted(names)}")
        self._faults.append(_Fault(before, hit, names, forever))

    def clear(self) -> None:
        """Let everything succeed from now on."""
        self._faults.clear()

    def next(self, name: str) -> Hit | None:
        """Return what this operation is hit by."""
        hits: list[Hit] = []
        for fault in [fault for fault in self._faults if name in fault.names]:
            if fault.before:
                fault.before -= 1
                continue
            hits.append(fault.hit)
            if not fault.forever:
                self._faults.remove(fault)
        return "crash" if "crash" in hits else hits[0] if hits else None


def error_of(hit: Hit, path: str) -> OSError:
    """Return the exception that the operating system's implementation would raise."""
    if hit == "ENOSPC":
        return OSError(errno.ENOSPC, "simulated: no space left on device", path)
    if hit == "short":
        return OSError(errno.ENOSPC, "simulated: short write, then no space left on device", path)
    return OSError(errno.EIO, "simulated: input/output error", path)
