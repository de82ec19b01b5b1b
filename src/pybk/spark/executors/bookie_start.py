"""The start of executors' bookies, in tasks and from the driver.

Theory of operation: the first task that needs a bookie starts it (``ensure_bookie``). Any number of tasks of an
executor may try at once. The one that takes the lock of the executor's lock file starts the supervisor, which inherits
the locked descriptor and starts the bookie (``bookie_supervisor.py``); the others wait. Both processes hold the lock
until they end, so a held lock means that a bookie is starting, serving, or about to be started again, and a crash
cannot leave it behind. Once the bookie serves, it writes its state file, which the waiting tasks read. A state file
without a held lock was left by processes that were killed; the next task that starts a bookie removes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

from pybk import manager as handles
from pybk.credentials import CLUSTER_SECRET
from pybk.deferral import LateModule
from pybk.errors import NotEnoughBookiesError, PybkError, UsageError
from pybk.spark.executors.bookie_settings import BookieSettings
from pybk.spark.executors.executor import (
    DOWN,
    LOOK_SECONDS,
    Executor,
    ExecutorBookie,
    executor_bookie,
    forget,
    is_locked,
    read_state,
    take_lock,
)
from pybk.spark.executors.task_placement import ask_executors, executor_locations, hold_executors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.spark.executors import configuration
else:  # every worker imports this module, and drivers alone need the options
    configuration = LateModule("pybk.spark.executors.configuration")

SETTINGS: Final = "PYBK_BOOKIES"
"""The environment variable of executors with the settings of their bookies, as JSON without secrets."""

_EXECUTOR: Final = "spark.executorEnv."
_START_SECONDS: Final = 60.0
_WATCH_SECONDS: Final = 1.0


def ensure_bookie(settings: BookieSettings, executor: Executor | None = None) -> ExecutorBookie:
    """Return the bookie of an executor in a cluster; start it if it does not serve. May be repeated.

    Args:
        settings: The settings of the bookie.
        executor: The executor, on this host; None for that of this task.

    Returns:
        The bookie; it serves until the executor ends.

    Raises:
        IllegalOperationError: ``executor`` is None, and this process does not run a task.
        UsageError: The executor's bookie serves from another directory.
        PybkError: The bookie could not be started; the message contains its output.

    Cost: 0.1 ms if the bookie serves, else about half a second.
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
            raise _late(settings, (read_state(executor.file(settings.metadata, "json")) or {}).get(DOWN, ""))
        else:
            time.sleep(LOOK_SECONDS)


def _launch(settings: BookieSettings, executor: Executor, lock: int) -> None:
    """Start the supervisor of a bookie, which inherits the lock, and wait until the bookie serves."""
    forget(executor.file(settings.metadata, "json"))  # left by a bookie that was killed
    try:
        started = subprocess.run(
            [sys.executable, "-P", "-m", "pybk.spark.executors.bookie_supervisor", str(settings), *map(str, executor)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
            pass_fds=(lock,),
            start_new_session=True,  # Spark sends signals to the process group of its workers
            timeout=_START_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _late(settings, "") from None
    if read_state(executor.file(settings.metadata, "json")) is None:
        said = started.stderr.decode(errors="replace").strip()
        raise PybkError(f"a bookie in {settings.directory} did not start: {said[-2000:]}")


def _late(settings: BookieSettings, reason: str) -> PybkError:
    said = f": {reason}" if reason else ""
    return PybkError(
        f"a bookie in {settings.directory} does not serve after {_START_SECONDS:g} seconds{said}; on that host, "
        f"{settings.directory}/slot-*.log are the logs of bookies"
    )


# ---- in the driver -----------------------------------------------------------------------------------------------


def configure(
    builder: SparkSession.Builder,
    *,
    metadata: str,
    directory: str,
    cluster_secret_file: str | None = None,
    rack: str | None = None,
    linger_s: float | None = None,
    options: Mapping[str, str] | None = None,
) -> SparkSession.Builder:
    """Configure a session: each executor starts a bookie at its first Python task, and filters are pushed down.

    The JVM and Python workers are also configured to use Unix sockets, which makes reading faster.

    Args:
        builder: The builder of the session, which is not created yet.
        metadata: The URL of the cluster's metadata: ``zk://host:port,host:port/path``, or ``lmdb:///path`` if all
            executors are on one host. The cluster is created if it does not exist.
        directory: An absolute path on a local disk of each host; each bookie has a directory in it.
        cluster_secret_file: The absolute path, on each host, of a file with the cluster's secret. With None, the
            executors' environment variable ``PYBK_CLUSTER_SECRET`` or ``PYBK_CLUSTER_SECRET_FILE`` gives the secret;
            if neither is set, there is none.
        rack: The location of the bookies, for placement: ``zone``, ``zone/rack`` or ``zone/rack/host``; None for none.
        linger_s: Seconds for which a bookie continues to serve reads after its executor has ended; its entries can be
            re-replicated meanwhile. It ends earlier if another executor of the host takes its directory. None for 0.
        options: Further options, such as ``{"tier.ssd": "/mnt/ssd", "store.free_bytes_low": "1GiB"}``: the names
            after ``spark.pybk.bookie.`` in ``docs/howto/spark.md``. The arguments above count before them.

    Returns:
        The builder. The secret itself is never a setting, because Spark puts settings in the command line of its JVM.

    Raises:
        UsageError: An argument is not valid.
    """
    settings = configuration.settings_in(
        {},
        options,
        metadata=metadata,
        directory=directory,
        secret_file=cluster_secret_file,
        rack=rack,
        linger_s=linger_s,
    )
    values = {
        "spark.python.daemon.module": "pybk.spark.executors.daemon",
        "spark.python.unix.domain.socket.enabled": "true",  # makes reads about a quarter faster
        "spark.sql.python.filterPushdown.enabled": "true",
        **configuration.configuration_of(settings),
        f"{_EXECUTOR}{SETTINGS}": str(settings),  # executors do not see the other settings
    }
    if settings.secret_file is not None:
        values[f"{_EXECUTOR}{CLUSTER_SECRET}_FILE"] = settings.secret_file
    for name, value in values.items():
        builder = builder.config(name, value)
    return builder


def start_bookies(
    spark: SparkSession,
    *,
    metadata: str | None = None,
    directory: str | None = None,
    cluster_secret_file: str | None = None,
    rack: str | None = None,
    linger_s: float | None = None,
    options: Mapping[str, str] | None = None,
    executors: int = 1,
    hold_slot: bool = False,
    timeout_s: float = 60.0,
) -> list[ExecutorBookie]:
    """Start a bookie for each running executor, and return the bookies. May be repeated.

    The bookies are processes of their own and do not occupy task slots. One that is killed comes back with its
    directory. Each ends when its executor ends; the bookie of a later executor on the host takes over its directory,
    and with it its name and its entries.

    Args:
        spark: The session.
        metadata: As for ``configure``; None, here and for the next five, for ``spark.pybk.bookie.*`` in the
            configuration of the session, which ``configure`` sets, too.
        directory: As for ``configure``.
        cluster_secret_file: As for ``configure``.
        rack: As for ``configure``.
        linger_s: As for ``configure``.
        options: As for ``configure``; they count before those in the configuration.
        executors: The minimum number of executors to wait for.
        hold_slot: Whether to run a task on each executor while its bookie serves, because dynamic allocation would
            remove executors that only run a bookie. The task occupies one of the executor's task slots; cancel the job
            group ``pybk-bookies`` to free the slots.
        timeout_s: Seconds to wait for executors and bookies.

    Returns:
        The bookies, by executor.

    Raises:
        UsageError: An argument or an option is not valid.
        NotEnoughBookiesError: There were too few executors in time.
        PybkError: A bookie did not start, or the secret is not the cluster's.

    A Spark task starts each bookie, so the call waits until each executor has a free task slot. Spark Connect does not
    list executors; with it, executors without a free slot are left out.
    """
    settings = configuration.settings_in(
        spark.conf.getAll,
        options,
        metadata=metadata,
        directory=directory,
        secret_file=cluster_secret_file,
        rack=rack,
        linger_s=linger_s,
    )
    until = time.monotonic() + timeout_s
    while True:
        there = executor_locations(spark)
        found = _started(ask_executors(spark, there, partial(ensure_from_json, str(settings))))
        wanted = max(executors, len(there or ()))
        if len(found) >= wanted:
            if hold_slot:
                hold_executors(spark, there, partial(_watch, settings.metadata))
            return found
        if time.monotonic() > until:
            raise NotEnoughBookiesError(
                f"{len(found)} executors have a bookie after {timeout_s} seconds, not {wanted}: check whether the "
                "cluster has more, request fewer, or wait until executors have a free task slot"
            )
        time.sleep(LOOK_SECONDS)


def ensure_from_json(settings: str) -> str:
    """Start the bookie of this task's executor unless it serves; return its description as JSON."""
    try:
        wanted = BookieSettings.of(settings)
        bookie = ensure_bookie(wanted)
        _check_secret(wanted)
        return json.dumps({"bookie": asdict(bookie)})
    except (PybkError, OSError) as error:
        return json.dumps({"error": f"{type(error).__name__}: {error}"})


def _check_secret(settings: BookieSettings) -> None:
    """Raise PybkError if the cluster has another secret; a bookie that already serves did not check this one."""
    handles.connect.open_cluster(settings.metadata, settings.secret, create=False)[0].close()


def _watch(metadata: str) -> None:
    """Return once the bookie of this task's executor has ended, and is not started again."""
    lock = Executor.of_task().file(metadata, "lock")
    while is_locked(lock):
        time.sleep(_WATCH_SECONDS)


def _started(answers: Iterable[str]) -> list[ExecutorBookie]:
    """Return the bookies that tasks reported, without duplicates; raises PybkError if a task reported an error."""
    found = {}
    for answer in map(json.loads, answers):
        if "error" in answer:
            raise PybkError(f"an executor has no bookie: {answer['error']}")
        bookie = ExecutorBookie(**answer["bookie"])
        found[bookie.executor] = bookie
    return [found[name] for name in sorted(found)]
