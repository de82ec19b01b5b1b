"""One bookie for each executor: its settings, and how it is started.

Theory of operation: a bookie is started by the first task that needs it (``ensure_bookie``). Any number of tasks of an
executor may try at once. The one that gets the executor's lock file starts the process, which inherits the locked
descriptor; the others wait. The process holds the lock until it ends, so the lock says that a bookie is starting or
serving, and cannot be left over by a crash. Once it serves, it writes its state file, which the waiting tasks read.
A state file without a lock is of a bookie that was killed, and the next starter removes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from pybk.credentials import CLUSTER_SECRET, Secret
from pybk.errors import NotEnoughBookiesError, PybkError, UsageError
from pybk.spark.executors.executor import Executor, ExecutorBookie, executor_bookie, local_bookie, read_state, take_lock
from pybk.spark.executors.placement import ask_executors, executor_locations, hold_executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SETTINGS: Final = "PYBK_BOOKIES"
"""Environment variable of executors: the settings of their bookies, as JSON; no secret is in it."""

_EXECUTOR: Final = "spark.executorEnv."
_START_SECONDS: Final = 60.0
_LINGER_SECONDS_MAX: Final = 86_400.0
_LOOK_SECONDS: Final = 0.1
_WATCH_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieSettings:
    """What the bookies of executors are to be; no secret is in it.

    Attributes:
        metadata: The URL of the cluster's metadata.
        directory: The directory on each host that has the bookies' directories in it.
        secret_file: A file on each host with the cluster's secret; None for the environment's.
        rack: Where they stand.
        linger_s: How long they serve on after their executors' end, seconds.
    """

    metadata: str
    directory: str
    secret_file: str | None = None
    rack: str = ""
    linger_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.metadata.startswith(("lmdb://", "zk://")):
            raise UsageError(f"metadata is {self.metadata!r:.200}; it takes lmdb:///path or zk://host:port/path")
        for name, path in (("directory", self.directory), ("cluster_secret_file", self.secret_file)):
            if path is not None and not os.path.isabs(path):
                raise UsageError(f"{name} is {path!r:.200}; it takes an absolute path, as executors run elsewhere")
        object.__setattr__(self, "directory", os.path.normpath(self.directory))
        if not 0.0 <= self.linger_s <= _LINGER_SECONDS_MAX:
            raise UsageError(f"linger_s is {self.linger_s!r}; it takes 0 to {_LINGER_SECONDS_MAX} seconds")

    @classmethod
    def of(cls, text: str) -> Self:
        """Return the settings that a text gives; raises UsageError if it gives none."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise UsageError(f"settings of bookies are {text!r:.200}: {error}") from error

    def __str__(self) -> str:
        """Write them as a text."""
        return json.dumps(asdict(self))

    @property
    def secret(self) -> Secret:
        """The cluster's secret: in the file, or else in this process's environment."""
        return Secret(file=self.secret_file, variable=CLUSTER_SECRET)


def ensure_bookie(settings: BookieSettings, executor: Executor | None = None) -> ExecutorBookie:
    """Return the bookie of an executor in a cluster, and start it if it does not serve; safe to call repeatedly.

    Args:
        settings: What it is to be.
        executor: The executor, on this host; None for that of this task.

    Returns:
        The bookie; it serves until the executor's end.

    Raises:
        IllegalOperationError: This is no task.
        UsageError: One with another directory serves already.
        PybkError: It could not be started; the text says what it said.

    Cost: 0.1 ms if it serves, else about half a second.
    """
    executor = executor or Executor.of_task()
    until = time.monotonic() + _START_SECONDS
    while True:
        found = executor_bookie(executor, settings.metadata, _START_SECONDS)
        if found is not None:
            if os.path.dirname(found.directory) != settings.directory:
                raise UsageError(f"{found.bookie} of this executor has {found.directory}, not {settings.directory}")
            return found
        lock = take_lock(executor.file(settings.metadata, "lock"))
        if lock is not None:
            try:
                _launch(settings, executor, lock)
            finally:
                os.close(lock)
        elif time.monotonic() > until:
            raise PybkError(f"a bookie in {settings.directory} does not serve after {_START_SECONDS} seconds")


def _launch(settings: BookieSettings, executor: Executor, lock: int) -> None:
    """Start the process of a bookie, and wait until it serves; it has the lock from then on."""
    with suppress(FileNotFoundError):
        os.unlink(executor.file(settings.metadata, "json"))  # of one that was killed
    try:
        started = subprocess.run(
            [sys.executable, "-m", "pybk.spark.executors.bookie_process", str(settings), *map(str, executor)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            pass_fds=(lock,),
            start_new_session=True,  # Spark hangs up the group of its workers
            timeout=_START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise PybkError(f"a bookie in {settings.directory} does not serve after {_START_SECONDS} seconds") from None
    if read_state(executor.file(settings.metadata, "json")) is None:
        said = started.stderr.decode(errors="replace").strip()
        raise PybkError(f"a bookie in {settings.directory} did not start: {said[-2000:]}")


# ---- in the driver -----------------------------------------------------------------------------------------------


def configure(
    builder: SparkSession.Builder,
    *,
    metadata: str,
    directory: str,
    cluster_secret_file: str | None = None,
    rack: str = "",
    linger_s: float = 0.0,
) -> SparkSession.Builder:
    """Have each executor of a session start a bookie at its first Python task, and filters pushed down to ledgers.

    Python and the JVM also talk over Unix sockets then, which makes reading quicker.

    Args:
        builder: The session's, before it is created.
        metadata: The URL of the cluster's metadata: ``zk://host:port,host:port/path``, or ``lmdb:///path`` if all
            executors are on one host. The cluster is made if there is none.
        directory: An absolute path on each host, on its own disk; each bookie has a directory in it.
        cluster_secret_file: An absolute path on each host of a file with the cluster's secret; None for what the
            executors' environment has as ``PYBK_CLUSTER_SECRET`` or ``PYBK_CLUSTER_SECRET_FILE``, or no secret.
        rack: Where the bookies stand, such as ``/room/rack``.
        linger_s: How long a bookie whose executor has ended serves on, seconds, read-only, so that others can copy what
            it has; if another executor of the host takes its directory, it ends then.

    Returns:
        The builder. The secret itself is not set here, as Spark would put it in the command line of its JVM.
    """
    settings = BookieSettings(
        metadata=metadata, directory=directory, secret_file=cluster_secret_file, rack=rack, linger_s=linger_s
    )
    values = {
        "spark.python.daemon.module": "pybk.spark.executors.daemon",
        "spark.python.unix.domain.socket.enabled": "true",  # reads gain a quarter
        "spark.sql.python.filterPushdown.enabled": "true",
        f"{_EXECUTOR}{SETTINGS}": str(settings),
    }
    if cluster_secret_file is not None:
        values[f"{_EXECUTOR}{CLUSTER_SECRET}_FILE"] = cluster_secret_file
    for name, value in values.items():
        builder = builder.config(name, value)
    return builder


def start_bookies(
    spark: SparkSession,
    *,
    metadata: str | None = None,
    directory: str | None = None,
    cluster_secret_file: str | None = None,
    rack: str = "",
    linger_s: float = 0.0,
    executors: int = 1,
    hold_slot: bool = False,
    timeout_s: float = 60.0,
) -> list[ExecutorBookie]:
    """Start a bookie for each executor that is running, and return them; safe to call repeatedly.

    The bookies are processes of their own and hold no task slot. Each ends when its executor does; a bookie of a later
    executor on the host takes its directory over, and with it its name and its entries.

    Args:
        spark: The session.
        metadata: As for ``configure``; None for what was given there.
        directory: As for ``configure``.
        cluster_secret_file: As for ``configure``.
        rack: As for ``configure``.
        linger_s: As for ``configure``.
        executors: How many executors to wait for at least.
        hold_slot: Have a task run on each executor for as long as its bookie serves, so that dynamic allocation does
            not take executors that are idle but for their bookies. Each takes one of the executor's task slots; cancel
            the job group ``pybk-bookies`` to have them back.
        timeout_s: How long to wait for them and their bookies, seconds.

    Returns:
        The bookies, by executor.

    Raises:
        UsageError: Something given cannot be.
        NotEnoughBookiesError: There were too few executors in time.
        PybkError: A bookie did not start, or the secret is not the cluster's.

    A task of Spark's starts each of them, so that an executor is waited for until it has a free task slot. With Spark
    Connect, where executors cannot be listed, those that have none are left out.
    """
    if metadata is None or directory is None:
        configured = spark.conf.get(f"{_EXECUTOR}{SETTINGS}", None)
        if configured is None:
            raise UsageError("give metadata and directory, or both to configure() before the session is created")
        settings = BookieSettings.of(configured)
    else:
        settings = BookieSettings(
            metadata=metadata, directory=directory, secret_file=cluster_secret_file, rack=rack, linger_s=linger_s
        )
    until = time.monotonic() + timeout_s
    while True:
        there = executor_locations(spark)
        found = _started(ask_executors(spark, there, partial(_ensure, str(settings))))
        wanted = max(executors, len(there or ()))
        if len(found) >= wanted:
            if hold_slot:
                hold_executors(spark, there, partial(_watch, settings.metadata))
            return found
        if time.monotonic() > until:
            raise NotEnoughBookiesError(
                f"{len(found)} executors have a bookie after {timeout_s} seconds, not {wanted}: see whether the "
                "cluster has more, or ask for fewer, or wait until executors have a free task slot"
            )
        time.sleep(_LOOK_SECONDS)


def _ensure(settings: str) -> str:
    """Start the bookie of a task's executor unless it runs; return its description as JSON."""
    try:
        wanted = BookieSettings.of(settings)
        bookie = ensure_bookie(wanted)
        _check_secret(wanted)
        return json.dumps({"bookie": asdict(bookie)})
    except (PybkError, OSError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _check_secret(settings: BookieSettings) -> None:
    """Raise PybkError if the secret is not the cluster's: a bookie that served before was given another."""
    from pybk.connect import open_cluster  # here, as every worker imports this module and few ask for it

    open_cluster(settings.metadata, settings.secret.read(), create=False)[0].close()


def _watch(metadata: str) -> None:
    """Return when the bookie of this task's executor serves no more."""
    while local_bookie(metadata) is not None:
        time.sleep(_WATCH_SECONDS)


def _started(answers: Iterable[str]) -> list[ExecutorBookie]:
    """Return the bookies that tasks found, each once; raises PybkError if one of them found none."""
    found = {}
    for answer in map(json.loads, answers):
        if "error" in answer:
            raise PybkError(f"an executor has no bookie: {answer['error']}")
        bookie = ExecutorBookie(**answer["bookie"])
        found[bookie.executor] = bookie
    return [found[name] for name in sorted(found)]
