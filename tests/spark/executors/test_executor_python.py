"""Executors whose Python does not fit, in a real Spark: one line says what does not fit, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from pybk.errors import IllegalOperationError
from pybk.spark.executors.executor_python import one_line_for_other_pythons
from tests.spark.clusters import CONF, Driver, driver
from tests.spark.test_clusters import StoreOrUrl
from tests.waiting import wait_until

THIS = "{}.{}".format(*sys.version_info)

NEWER = """
import sys
from collections import namedtuple
Version = namedtuple("Version", "major minor micro releaselevel serial")
sys.version_info = Version(sys.version_info.major, 99, 0, "final", 0)
"""
WITHOUT_PYBK = """
import sys
class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "pybk":
            raise ModuleNotFoundError("No module named 'pybk'", name="pybk")
sys.meta_path.insert(0, Without())
"""


def python_that(directory: Path, customization: str) -> str:
    """Return the path of a Python like this one, but for what runs at its start."""
    (directory / "custom").mkdir()
    (directory / "custom" / "sitecustomize.py").write_text(customization)
    path = directory / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{directory}/custom:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return str(path)


@contextmanager
def session_on(directory: Path, python: str, bookies: dict[str, Any] | None) -> Iterator[Driver]:
    """Have a session whose tasks run in another Python."""
    with driver(directory, PYSPARK_PYTHON=python) as found:
        found.ask("begin", master="local[1]", conf={**CONF, "spark.ui.enabled": "false"}, bookies=bookies)
        yield found


def errors_in(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.lstrip().startswith("pybk.errors.")]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize(
    ("customization", "said"),
    [
        (NEWER, f"executors run Python 3.99 and this driver Python {THIS}: set PYSPARK_PYTHON to "),
        (WITHOUT_PYBK, "the Python of an executor has no module pybk: install pybk "),
    ],
)
def test_the_start_of_bookies_says_which_python_does_not_fit(
    tmp_path: Path, customization: str, said: str, configured: bool
) -> None:
    place = StoreOrUrl(tmp_path)
    settings = place.settings
    with session_on(tmp_path, python_that(tmp_path, customization), settings if configured else None) as session:
        with pytest.raises(AssertionError) as error:
            session.ask("bookies", executors=1, **settings)
        session.ask("end")
    [line] = errors_in(str(error.value))
    assert line.startswith(f"pybk.errors.IllegalOperationError: {said}")
    assert "JavaError" not in str(error.value), "the JVM's lines are left to Spark's log"
    wait_until(lambda: not place.running())  # a daemon with a newer Python starts one


def test_other_errors_of_spark_stay() -> None:
    with pytest.raises(RuntimeError, match="Job aborted"), one_line_for_other_pythons():
        raise RuntimeError("Job aborted")
    with pytest.raises(IllegalOperationError, match="no module numpy"), one_line_for_other_pythons():
        raise RuntimeError("Job aborted: ...\nModuleNotFoundError: No module named 'numpy'\n\n\tat org.apache...")
