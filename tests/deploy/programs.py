"""Prometheus's own programs, where there are any."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.paths import ROOT


def program(name: str) -> Path:
    """Return a program of Prometheus's; without one the test is skipped, with what to do about it."""
    done = subprocess.run([ROOT / "tools" / "prometheus", "find"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(
            f"there is no {name} here; `tools/prometheus home` fetches it from Debian's archive, or says why not"
        )
    return Path(done.stdout.strip()) / name
