"""Display of progress: a bar on a terminal, a few lines in a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from tqdm import tqdm

_LINES: Final = 4


class Meter(Protocol):
    """Counts progress."""

    def update(self, amount: int) -> object:
        """Add an amount of finished work."""


class _Lines:
    """Prints progress as lines, at most ``_LINES`` of them."""

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._said = 0

    def update(self, amount: int) -> None:
        """Add an amount of finished work."""
        self._done += amount
        share = min(self._done, self._total) * _LINES // self._total
        if share > self._said:
            self._said = share
            print(f"  {self._what}: {share * 100 // _LINES} %", file=sys.stderr, flush=True)


@contextmanager
def meter(what: str, total: int, unit: str) -> Iterator[Meter]:
    """Yield a meter that shows progress from 0 to ``total``: as a bar on a terminal, as a few lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(what, max(total, 1))
        return
    with tqdm(total=total, desc=f"  {what}", unit=unit, unit_scale=True, leave=False) as bar:
        yield bar
