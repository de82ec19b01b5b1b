"""The logs of a write, as tasks and the driver open them: which exist, and which another process has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from pybk.errors import LogLockedError, LogSealedError, NoSuchLogError
from pybk.spark.executors.executor import LOOK_SECONDS
from pybk.spark.options import nearest_names
from pybk.streams.ledger_steps import names_of
from pybk.streams.list_record import ListKind
from pybk.streams.log import Log

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.spark.log_sink.log_sink_options import LogSinkOptions

RELEASE_SECONDS: Final = 15.0
"""The seconds in which the log of a process that died is released, and that of another query's commit."""


def open_log(options: LogSinkOptions, manager: LedgerManager, name: str) -> Log:
    """Open a log, whose writer is not disturbed; it is created if the options say so.

    Args:
        options: The options of the write.
        manager: The cluster's ledgers.
        name: The log.

    Raises:
        NoSuchLogError: It does not exist; the error has the nearest names.
        UnauthorizedError: The password or secret is not the log's.
        UsageError: The name is not valid.
        PybkError: As the metadata store.
    """
    given, asked = options.given.read(), options.asked
    try:
        return Log.open(
            manager,
            name,
            password=given.password,  # not None, for which a password in the environment would be taken
            secret=given.secret,
            insecure=options.insecure,
            create=options.create,
            digest_type=asked.digest_type,
            storage_hints=asked.storage_hints,
            quorums=asked.quorums,
        )
    except NoSuchLogError as error:
        names = names_of(manager, ListKind.LOG)
        if name in names:
            raise  # it is being deleted
        raise NoSuchLogError(
            f"there is no log {name!r} in {options.where}; {nearest_names(name, names)}; option createTopics=true "
            "creates logs that do not exist"
        ) from error


def refuse_sealed(log: Log) -> None:
    """Check that a log has not ended, because it could not adopt what tasks write.

    Raises:
        LogSealedError: It was sealed.
    """
    if log.is_sealed():
        raise LogSealedError(f"log {log.name!r} was sealed, and takes no more records: name another log")


def refuse_live_writer(log: Log, seconds: float = RELEASE_SECONDS) -> None:
    """Check that no other process has a log, because the log could not adopt what tasks write.

    Args:
        log: The log.
        seconds: How long another process may have it yet: a commit has it for a moment.

    Raises:
        LogLockedError: Another process has it; the error names the process.
    """
    until = time.monotonic() + seconds
    while (holder := log.locked_by()) is not None:
        if time.monotonic() >= until:
            raise LogLockedError(
                f"log {log.name!r} has a live writer ({holder}), and takes no records from Spark meanwhile: close it "
                "there, or have it write to another log"
            )
        time.sleep(LOOK_SECONDS)
