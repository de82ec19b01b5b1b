"""The background thread of a client's baton survives whatever comes at the same moment."""

from __future__ import annotations

import threading
from typing import Any

from pybk.client.baton import Baton
from tests.cluster.processes import eventually


class Quiet:
    """Work of which there is none, but for what is idle."""

    def __init__(self) -> None:
        self.looked = 0

    def turn(self) -> None:
        raise AssertionError("nobody waits for anything")

    def busy(self) -> bool:
        return False

    def idle(self) -> bool:
        self.looked += 1
        return self.looked % 50 != 0

    def interrupt(self) -> None:
        return

    def recover(self) -> None:
        return


class KickedMeanwhile:
    """A lock on which somebody else comes in just after it was taken in time."""

    def __init__(self, lock: Any, baton: Baton) -> None:
        self._lock = lock
        self._baton = baton
        self.met = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = bool(self._lock.acquire(blocking, timeout))
        if taken and timeout >= 0:
            self.met += 1
            self._baton.kick()
        return taken

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return bool(self._lock.locked())


def test_a_kick_in_the_moment_of_another_does_not_end_the_background_thread() -> None:
    work = Quiet()
    baton = Baton(work, "test-baton")
    kick = baton._kick = KickedMeanwhile(baton._kick, baton)  # type: ignore[assignment]  # stands in for a lock
    baton.kick()

    def met() -> bool:
        baton.kick()
        return kick.met > 3

    eventually(met)
    looked = work.looked

    def looks_again() -> bool:
        baton.kick()
        return work.looked > looked

    eventually(looks_again)
    assert "test-baton" in {thread.name for thread in threading.enumerate()}
    baton.stop()
