"""Logs, and their properties, as members of an atomic group (``pybk.manager.atomic_group``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from pybk.manager.atomic_group import GroupMember, GroupPart
from pybk.manager.ledger_manager import backend_of
from pybk.storage.named_records import NamedChange
from pybk.streams.appender import Batch
from pybk.streams.ledger_steps import LedgerSteps
from pybk.streams.list_writer import ListWriter

I = TypeVar("I")  # noqa: E741  # an item
R = TypeVar("R")


class LogMember(GroupMember, Generic[I]):
    """The records that a group appends to one log.

    Args:
        writer: The writer of the log.
        check: Makes a record of the arguments of ``AtomicGroup.append``.
        batch: Makes a batch of records, whose result has one element for each.
    """

    call = "append"

    def __init__(
        self, writer: ListWriter, check: Callable[..., I], batch: Callable[[list[I]], Batch[Sequence[Any]]]
    ) -> None:
        super().__init__(writer.steps.record_name, backend_of(writer.steps.manager))
        self._writer = writer
        self._check = check
        self._batch = batch
        self._items: list[I] = []

    def add(self, *arguments: Any, **options: Any) -> None:
        """Add a record."""
        self._items.append(self._check(*arguments, **options))

    def hold(self, stage: Callable[[GroupPart], R | None]) -> R | None:
        """Stage the records as a part of the group."""
        found = self._writer.hold(self._batch(self._items), stage)
        if found is None:
            return None
        staged, self.results = found
        return staged

    def prepare(self) -> None:
        """Repair the log, if an append was refused or interrupted."""
        self._writer.repair()

    def commit_alone(self) -> None:
        """Append the records as one transaction of the log."""
        self.results = self._writer.result_of(self._writer.append_batch(self._batch(self._items), kick=False))

    def committed(self) -> None:
        """Roll the log, if that is due now."""
        self._writer.watch_segment()


class PropertiesMember(GroupMember):
    """The changes that a group makes to the properties of one log.

    Args:
        steps: The steps of the log.
        check: Checks the arguments of ``AtomicGroup.set_properties``.
    """

    call = "set_properties"
    alone = "call Log.set_properties"

    def __init__(self, steps: LedgerSteps, check: Callable[..., Mapping[str, str | None]]) -> None:
        super().__init__(f"{steps.record_name}#properties", backend_of(steps.manager))  # after the log itself
        self._steps = steps
        self._check = check
        self._changes: dict[str, str | None] = {}

    def add(self, *arguments: Any, **options: Any) -> None:
        """Add changes; later ones replace earlier ones."""
        self._changes.update(self._check(*arguments, **options))

    def hold(self, stage: Callable[[GroupPart], R | None]) -> R | None:
        """Stage the changes as a part of the group."""
        found = self._steps.existing()
        changed = found.record.with_properties(self._changes)
        return stage(GroupPart(change=NamedChange(self._steps.record_name, found.version, changed.encode())))
