"""The ways of the how-to to bring pybk to executors on several hosts: installed, ``--py-files``, ``--archives``."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.spark.clusters import CONF, environment, need_spark, standalone
from tests.spark.test_clusters import StoreOrUrl
from tests.waiting import PROCESS_S

HOSTS = ("127.0.0.1", "127.0.0.2")
PACKAGES = ("pybk", "pyspark_pybk")

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A master with two workers, each on an address of its own."""
    with standalone(tmp_path_factory.mktemp("standalone"), cores=1, hosts=HOSTS, path="") as url:
        yield url


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A virtual environment with all packages but pybk."""
    home = tmp_path / "environment"
    venv.create(home, symlinks=True)
    (packages_of(home) / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    said = subprocess.run(
        [home / "bin" / "python", "-I", "-c", "import pyspark, zmq, pybk"], capture_output=True, text=True
    )
    assert "No module named 'pybk'" in said.stderr
    return home


def packages_of(home: Path) -> Path:
    (found,) = (home / "lib").glob("python*/site-packages")
    return found


def install(home: Path) -> None:
    """Install pybk in an environment, as its wheel does."""
    for name in PACKAGES:
        shutil.copytree(ROOT / "src" / name, packages_of(home) / name, ignore=shutil.ignore_patterns("__pycache__"))


def zip_packages(path: Path) -> None:
    """Make a file for ``--py-files``."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in PACKAGES:
            for file in sorted((ROOT / "src" / name).rglob("*.py")):
                archive.write(file, file.relative_to(ROOT / "src"))


def submit(master: str, directory: Path, python: str, *options: str, path: str = "", register: bool = False) -> Any:
    """Submit the program from a directory; return what it answered, or raise AssertionError with what Spark said."""
    place = StoreOrUrl(directory / "place")
    settings = [part for name, value in CONF.items() for part in ("--conf", f"{name}={value}")]
    command = [str(need_spark() / "bin" / "spark-submit"), "--master", master, *settings, *options]
    variables = {"PYSPARK_PYTHON": python, "PYTHONPATH": path}
    return run([*command, *program(place, len(HOSTS), register)], directory, variables)


def program(place: StoreOrUrl, executors: int, register: bool = False) -> list[str]:
    """Return the program and its arguments."""
    path = ROOT / "tests" / "spark" / "deployed.py"
    more = ["register"] if register else []
    return [str(path), place.url, str(place.bookies), str(place.secret), str(executors), *more]


def run(command: list[str], directory: Path, variables: dict[str, str]) -> Any:
    """Run a command; return what the program answered, or raise AssertionError with what Spark said."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=directory,
        env={**environment(directory), **variables},
        text=True,
        timeout=PROCESS_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(answer: Any, root: str | None) -> None:
    """Check an answer: two bookies, every row, and modules under a directory; None for that of each executor."""
    assert answer["bookies"] == ["0", "1"]
    assert answer["rows"] == sum(range(1000))
    assert len(answer["places"]) == 2, "both executors had tasks"
    for directory, file in answer["places"]:
        assert file.startswith(f"{directory if root is None else root}{os.sep}")


def test_it_is_installed_on_each_host(master: str, tmp_path: Path, bare: Path) -> None:
    install(bare)
    check(submit(master, tmp_path, str(bare / "bin" / "python")), str(bare))


@pytest.mark.parametrize("register", [False, True])
def test_it_comes_by_py_files(master: str, tmp_path: Path, bare: Path, register: bool) -> None:
    zip_packages(tmp_path / "pybk.zip")
    path = "" if register else "pybk.zip"
    python = str(bare / "bin" / "python")
    check(submit(master, tmp_path, python, "--py-files", "pybk.zip", path=path, register=register), None)


def test_py_files_alone_are_not_looked_up(master: str, tmp_path: Path, bare: Path) -> None:
    zip_packages(tmp_path / "pybk.zip")
    with pytest.raises(AssertionError, match="DATA_SOURCE_NOT_FOUND"):
        submit(master, tmp_path, str(bare / "bin" / "python"), "--py-files", "pybk.zip")


def test_it_comes_in_an_archive_with_its_python(master: str, tmp_path: Path, bare: Path) -> None:
    install(bare)
    with tarfile.open(tmp_path / "environment.tar.gz", "w:gz") as archive:
        archive.add(bare, ".")
    python = "./environment/bin/python"  # in the directory of the driver, and in those of the executors
    check(submit(master, tmp_path, python, "--archives", "environment.tar.gz#environment"), None)


def test_sessions_of_spark_connect_start_bookies_write_and_read(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason='no grpcio; pip install "pyspark[connect]" to test Spark Connect')
    place = StoreOrUrl(tmp_path / "place")
    answer = run([sys.executable, *program(place, 1)], tmp_path, {"SPARK_REMOTE": "local[2]"})
    assert answer["bookies"] == ["driver"]
    assert answer["rows"] == sum(range(1000))
