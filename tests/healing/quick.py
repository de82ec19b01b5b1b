"""What tests of clusters that repair themselves set, so that nobody waits for seconds."""

from __future__ import annotations

import pytest

from pybk.healing import auditor_driver, repair_worker, scrub, situation


def repair_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have auditors and workers look often, trust a young session, and end drains at once."""
    monkeypatch.setattr(auditor_driver, "REQUESTS_SECONDS", 0.0)
    monkeypatch.setattr(auditor_driver, "TICK_S", 0.1)
    monkeypatch.setattr(repair_worker, "IDLE_S", 0.2)
    monkeypatch.setattr(situation, "SESSION_NS_MIN", 0)


def scrub_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have bookies begin their checks at once, and look often whether more are due."""
    monkeypatch.setattr(scrub, "FIRST_S", 0.0)
    monkeypatch.setattr(scrub, "REST_S", 0.1)
    monkeypatch.setattr(scrub, "QUIET_S", 0.1)
