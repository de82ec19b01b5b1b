"""The fixtures for pytest, in a run of pytest over the tests of a program that uses pybk."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from pybk.errors import UsageError
from pybk.testing import TestCluster, open_store
from tests.paths import ROOT
from tests.storage.real_store import python_path
from tests.waiting import PROCESS_S

MORE = """

def test_each_test_has_a_store_of_its_own(pybk_store, tmp_path):
    assert list(pybk_store.ledgers()) == []
    assert pybk_store.location == str(tmp_path / "pybk-store")


def test_each_test_has_a_cluster_of_its_own(pybk_cluster, tmp_path):
    client = pybk_cluster.connect()
    assert list(client.ledgers()) == []
    assert str(tmp_path) in pybk_cluster.url
    assert sorted(pybk_cluster.bookies) == ["b1", "b2", "b3"]
"""


def test_pytest_runs_the_tests_in_the_document(tmp_path: Path) -> None:
    [example] = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "testing.md").read_text(), re.DOTALL)
    (tmp_path / "test_program.py").write_text(example + MORE)
    installed = any(each.value == "pybk.pytest_plugin" for each in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "pybk.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", *plugin, "test_program.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(), "PYTEST_ADDOPTS": ""},
        timeout=PROCESS_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_pytest_finds_the_plugin_by_an_entry_point_and_is_no_dependency() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert setup["options.entry_points"]["pytest11"].split() == ["pybk", "=", "pybk.pytest_plugin"]
    assert "pytest" not in setup["options"]["install_requires"]


def test_the_plugin_imports_nothing_heavy() -> None:
    program = (
        "import sys, pybk.pytest_plugin; print(sorted({'numpy', 'lmdb', 'zmq', 'cryptography'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": python_path()},
        timeout=PROCESS_S,
    )
    assert done.stdout == "[]\n"


def test_a_cluster_names_what_it_cannot_do(tmp_path: Path) -> None:
    with TestCluster(tmp_path / "cluster", bookies=1) as cluster:
        with pytest.raises(UsageError, match="runs already"):
            cluster.start("b1")
        cluster.stop("b1")
        with pytest.raises(UsageError, match="no bookie 'b1' runs"):
            cluster.stop("b1")
    with pytest.raises(UsageError, match="0 bookies"):
        TestCluster(tmp_path / "none", bookies=0)


def test_a_store_stays_when_it_is_opened_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager, manager.create_ledger(password=b"p") as writer:
        writer.append(b"entry")
    with open_store(tmp_path) as manager:
        assert [each.ledger_id for each in manager.ledgers()] == [writer.ledger_id]
