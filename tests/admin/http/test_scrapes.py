"""Metrics of an interface without the package that exports them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pybk.admin.http.problems import ProblemError
from pybk.admin.http.scrapes import Scrapes
from tests.storage.real_store import open_quick


def test_without_the_extra_a_scrape_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with open_quick(tmp_path / "store") as manager, pytest.raises(ProblemError, match=r"pip install 'pybk\[metrics\]'"):
        Scrapes(manager).answer()
