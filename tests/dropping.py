"""Waiting for the warning about what was dropped without a close."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tests.waiting import wait_until


@contextmanager
def drop_is_warned_of(pattern: str = "dropped without close") -> Iterator[None]:
    """Run a block that drops something, and wait for its warning.

    A thread in the background may hold what is dropped for another moment, and a collection of garbage does nothing
    while another thread collects.

    Args:
        pattern: What is searched for in the warning.
    """

    def warned() -> bool:
        return gc.collect() >= 0 and any(re.search(pattern, str(each.message)) for each in told)

    with warnings.catch_warnings(record=True, action="always") as told:
        yield
        wait_until(warned, "the warning about what was dropped")
    assert all(each.category is ResourceWarning for each in told), [str(each.message) for each in told]
