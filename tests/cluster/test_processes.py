"""Processes of tests end when they are asked to, and with the test that started them, also when it fails."""

from __future__ import annotations

import gc
import signal
from contextlib import suppress
from pathlib import Path

from tests.cluster.processes import Child
from tests.storage.real_store import end_started, python


def test_a_child_of_a_test_that_fails_is_killed_and_its_pipes_are_closed(tmp_path: Path) -> None:
    with suppress(RuntimeError), Child([], None, tmp_path / "log", module="json.tool") as child:
        raise RuntimeError("the test fails")
    assert not child.alive
    del child
    gc.collect()  # a pipe that is open is an error, of this test


def test_a_program_that_a_test_leaves_is_killed_and_its_pipes_are_closed() -> None:
    process = python("import sys; sys.stdin.read()")
    end_started()
    assert process.returncode == -signal.SIGKILL
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        assert pipe.closed


def test_a_child_ends_with_an_interrupt_also_where_the_tests_run_in_the_background(tmp_path: Path) -> None:
    unbuffered = {"PYTHONUNBUFFERED": "1"}
    with Child(["--json-lines"], None, tmp_path / "log", module="json.tool", variables=unbuffered) as child:
        child.order("1")
        child.wait_for(lambda: child.lines)  # an interrupt in the middle of its start would be another error
        child.signal(signal.SIGINT)
        assert child.join() == -signal.SIGINT
