"""Directories of tests lie in memory, those of some files on the disk, and all where the environment says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.directories import DISK, MEMORY, OF_DISKS, ONE_IN, memory_does, on_the_disk
from tests.sampling import EVERYTHING, VARIABLE, chosen
from tests.storage.real_store import python_path
from tests.waiting import PROCESS_S

SEED = "0123456789ab"
FILES = [f"test_{number}.py" for number in range(12)]
TEST = """
import os, tempfile
from pathlib import Path

def test_it(tmp_path, tmp_path_factory):
    made = tmp_path_factory.mktemp("made")
    found = (tmp_path, made, tempfile.gettempdir(), os.environ.get("TMPDIR", tempfile.gettempdir()))
    Path("seen", Path(__file__).name).write_text("\\n".join(map(str, found)))
"""
ASKED_LATE = """
def test_first(): pass

def test_second(kept): assert kept.is_dir()
"""
OF_THE_SESSION = """
import pytest
from tests.conftest import _directories, directory_of_the_run, pytest_configure

@pytest.fixture(scope="session")
def kept(directory_of_the_run):
    made = directory_of_the_run / "kept"
    made.mkdir()
    return made
"""


def run(directory: Path, seed: str, *files: str, **variables: str) -> None:
    """Run tests in a directory as this project does."""
    (directory / "pytest.ini").write_text("[pytest]\ntmp_path_retention_policy = failed\n", encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name not in ("TMPDIR", DISK)}
    added = {"PYTHONPATH": python_path(), "PYTEST_ADDOPTS": "", VARIABLE: seed, **variables}
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        check=True,
        cwd=directory,
        env={**kept, **added},
        timeout=PROCESS_S,
    )


def drawn_of(seed: str) -> set[str]:
    """Return the files whose directories a seed has on the disk."""
    return {name for name in FILES if chosen(seed, f"disk {name}", range(ONE_IN), ONE_IN) == [0]}


def seen(directory: Path, seed: str, **variables: str) -> dict[str, list[Path]]:
    """Run tests as this project does; return the directories that the test of each file was given."""
    (directory / "seen").mkdir(exist_ok=True)
    for name in FILES:
        (directory / name).write_text(TEST, encoding="utf-8")
    (directory / "conftest.py").write_text(
        "from tests.conftest import _directories, pytest_configure\n", encoding="utf-8"
    )
    run(directory, seed, **variables)
    return {name: [Path(line) for line in (directory / "seen" / name).read_text().splitlines()] for name in FILES}


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_those_of_the_files_that_a_seed_draws_are_on_the_disk(tmp_path: Path) -> None:
    if not memory_does():
        pytest.skip(f"{MEMORY} has too little space, or runs no programs")
    drawn = drawn_of(SEED)
    assert 0 < len(drawn) < len(FILES)
    found = seen(tmp_path, SEED)
    for name, paths in found.items():
        in_memory = [each.is_relative_to(MEMORY) for each in paths]
        assert in_memory == [name not in drawn] * len(paths), (name, paths)
    assert not [each for paths in found.values() for each in paths[:2] if each.exists()], "tests passed"


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_a_directory_of_the_session_outlives_that_of_the_file_whose_test_asked_for_it(tmp_path: Path) -> None:
    if not memory_does():
        pytest.skip(f"{MEMORY} has too little space, or runs no programs")
    drawn = next(name for name in FILES if name in drawn_of(SEED))
    other = next(name for name in FILES if name not in drawn_of(SEED))
    for name in (drawn, other):
        (tmp_path / name).write_text(ASKED_LATE, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(OF_THE_SESSION, encoding="utf-8")
    run(tmp_path, SEED, drawn, other)


def test_those_of_the_storage_are_on_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISK, "/tmp")
    files = [f"{OF_DISKS}test_{number}.py" for number in range(20)]
    assert all(on_the_disk(file) for file in files)
    monkeypatch.delenv(DISK)
    assert not any(on_the_disk(file) for file in files), "all are where the environment says"


@pytest.mark.sampled(one_in=3, group="runs of pytest")
@pytest.mark.parametrize("seed", [SEED, EVERYTHING])
def test_all_are_where_the_environment_says(seed: str, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    variables = {"TMPDIR": str(tmp_path / "here")} if seed != EVERYTHING else {}
    for paths in seen(tmp_path, seed, **variables).values():
        assert all(each.is_relative_to(tmp_path / "here" if variables else "/") for each in paths)
        assert variables or not any(each.is_relative_to(MEMORY) for each in paths)
