"""What holds for all tests: limits of production at the start of each but for scrypt, directories, sample, workers."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import logging
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from pybk.ledger import keys
from pybk.metadata import lmdb_store
from pybk.storage import preallocation
from pybk.storage.format import catalog
from tests import directories
from tests.sampling import EVERYTHING, SEED, VARIABLE, all_are_tried, drawn
from tests.storage.real_store import end_started

# Hundreds of processes are started, and each would compile all that it imports. Each worker would compile all tests
# once more, which takes it twice as long as to import them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A run in the background of a shell ignores SIGINT, and so would the processes that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Each process that imports numpy would start threads of OpenBLAS, which nothing here uses.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Hypothesis counts an example that takes 200 ms as a failure, and slow generation, too: a busy machine is both. Each
# commit draws other examples.
settings.register_profile(
    "pybk",
    deadline=None,
    max_examples=100 if all_are_tried() else 25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("pybk")

keys.SCRYPT_COST = 2  # type: ignore[misc]  # of new stores, those of modules' fixtures, too: no test depends on it

# Seconds without a sign of life after which this process loses its leases: a busy machine may let it wait for longer
# than the five of production, and another bookie of a test would lead, or one would not be registered.
setattr(lmdb_store, "LMDB_LEASE_TIME_S", 60.0)  # noqa: B010  # mypy takes it for another module's

_LIMITS = [
    (module, name, getattr(module, name))
    for module, name in ((preallocation, "FIRST_FILE_BYTES"), (catalog, "REWRITE_BYTES_MIN"), (keys, "SCRYPT_COST"))
]


@pytest.fixture(scope="session", autouse=True)
def directory_of_the_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that stays until the run ends, for fixtures of the session; made before any directories of a file."""
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module", autouse=True)
def _directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have the directories of a file's tests lie on the disk, if they do: those of a file with a failure stay there."""
    if not directories.on_the_disk(_file_of(request.node.nodeid)):
        yield
        return
    failed = request.session.testsfailed
    with directories.of_the_disk() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tmp_path_factory, "_basetemp", path)
        yield
    if request.session.testsfailed == failed:
        shutil.rmtree(path, ignore_errors=True)


_FREED_BYTES = 64 << 20
"""The growth in a file from which on memory is given back."""


def resident() -> int:
    """Return the bytes of memory that this process takes."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Give the system what a file's tests have freed: the allocator of C keeps it, and the next file would add its own.

    Simulated disks of hundreds of stores are some gigabytes for all workers.
    """
    before = resident()
    yield
    if resident() - before > _FREED_BYTES and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        gc.collect()
        trim(0)


@pytest.fixture(autouse=True)
def _limits_of_production() -> Iterator[None]:
    for module, name, value in _LIMITS:
        setattr(module, name, value)
    yield
    for module, name, value in _LIMITS:
        setattr(module, name, value)


@pytest.fixture(autouse=True)
def _default_executors_are_the_applications(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of pybk must not use the default executor of an event loop: it has few threads."""
    run = asyncio.BaseEventLoop.run_in_executor

    def checked(loop: asyncio.BaseEventLoop, executor: Any, *arguments: Any) -> Any:
        for frame, _ in traceback.walk_stack(None) if executor is None else ():
            assert not str(frame.f_globals.get("__name__")).startswith("pybk."), f"{frame.f_code} uses it"
        return run(loop, executor, *arguments)

    monkeypatch.setattr(asyncio.BaseEventLoop, "run_in_executor", checked)


@pytest.fixture(autouse=True)
def _log_of_pytest() -> Iterator[None]:
    """A command that a test calls begins a log of its own, which would outlive the standard error that it writes to."""
    root, ours = logging.getLogger(), logging.getLogger("pybk")
    handlers, level, own = list(root.handlers), root.level, ours.level
    yield
    for each in [each for each in root.handlers if each not in handlers]:
        root.removeHandler(each)
    root.setLevel(level)
    ours.setLevel(own)


@pytest.fixture(autouse=True)
def _programs_end_with_their_test() -> Iterator[None]:
    """A test that fails leaves its processes, whose pipes the collector would find in another test."""
    yield
    end_started()


# Files that take longest, in this order: begun last, one of them would keep one worker busy while the other is done.
_LONG_FIRST = (
    "tests/spark/source/test_streams.py",
    "tests/admin/dev/test_dev.py",
    "tests/admin/page/test_page.py",
    "tests/spark/test_clusters.py",
    "tests/spark/test_sql.py",
    "tests/docs/test_operators_pages.py",
    "tests/docs/test_tutorial.py",
    "tests/test_readme.py",
    "tests/cluster/test_faults.py",
    "tests/cluster/test_levels.py",
    "tests/streams/test_segment_merge.py",
    "tests/streams/test_wal.py",
    "tests/simulator/test_healing.py",
    "tests/test_call_threads.py",
    "tests/test_sampling.py",
    "tests/test_tidy.py",
    "tests/streams/test_interrupts.py",
    "tests/storage/test_mutants.py",
)

# Where tests use the session of the fixture ``spark``: one worker runs them all, so that one session begins.
_OF_ONE_SPARK = (
    "tests/spark/jobs/",
    "tests/spark/log_sink/test_log_sink.py",
    "tests/spark/log_source/",
    "tests/spark/sink/",
    "tests/spark/source/",
    "tests/spark/test_errors.py",
    "tests/spark/test_howto.py",
    "tests/spark/test_query_backlog.py",
    "tests/spark/test_starting.py",
)


def _file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose where directories lie, and have Hypothesis draw by the seed of the sample, before its plugin reads it."""
    directories.choose(config)
    if config.option.hypothesis_seed is None and SEED != EVERYTHING:
        config.option.hypothesis_seed = str(int(hashlib.sha256(SEED.encode()).hexdigest()[:12], 16))


def pytest_report_header() -> list[str]:
    sample = f"sample: {VARIABLE}={SEED} (the same again: `{VARIABLE}={SEED} make test`; all cases: `make test-long`)"
    return [sample, directories.described()]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this commit does not try; put the files that take longest first, those of one Spark together."""
    kept = drawn(items, SEED, [str(each) for each in config.invocation_params.args])
    left_out = set(items) - set(kept)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = kept
    ranks = {name: rank for rank, name in enumerate(_LONG_FIRST)}
    spark = ranks["tests/spark/source/test_streams.py"]

    def rank_of(item: pytest.Item) -> int:
        file = _file_of(item.nodeid)
        return spark if file.startswith(_OF_ONE_SPARK) else ranks.get(file, len(ranks))

    items.sort(key=rank_of)


def pytest_collection() -> None:
    """Collect no garbage while modules are imported and tests are found: nearly all of them stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have no collection of garbage look at modules and tests, which stay: tests that collect would take seconds."""
    gc.enable()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give a worker one file after another, in the order of the collection; see ``_OF_ONE_SPARK`` for the exception."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            file = _file_of(nodeid)
            return "spark" if file.startswith(_OF_ONE_SPARK) else file

    config.option.loadscopereorder = False
    return ByFile(config, log)
