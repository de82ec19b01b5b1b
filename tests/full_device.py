"""A small file system of its own, and a process that takes all its space."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_FILLER = """
import os, sys, time
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
at, full = 0, False
while True:
    for step in (16 << 20, 1 << 20, 4096):
        try:
            while True:
                os.posix_fallocate(fd, at, step)
                at += step
        except OSError:
            pass
    if not full:
        full = True
        print("full", flush=True)
    time.sleep(0.002)
"""


@contextmanager
def small_device(path: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system of this size in memory; the test is skipped where that is not allowed."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "pybk-test", str(path)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def filled(device: Path) -> Iterator[None]:
    """Let another process take all space, and what becomes free, meanwhile."""
    command = [sys.executable, "-c", _FILLER, str(device / "other")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as filler:
        try:
            assert filler.stdout is not None
            assert filler.stdout.readline() == "full\n"
            yield
        finally:
            filler.kill()
    (device / "other").unlink()
