"""The log of a bookie's process: a JSON object per line, with stable names of events."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from pybk.admin import service_log
from pybk.errors import UsageError
from pybk.log_events import EVENTS, NOT_LIMITED, log_event
from tests.paths import ROOT

logger = logging.getLogger("pybk.of.a.test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Gives the root its handlers back, which are pytest's."""
    root, ours = logging.getLogger(), logging.getLogger("pybk")
    handlers, level, own = list(root.handlers), root.level, ours.level
    root.handlers.clear()
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        ours.setLevel(own)


def test_each_line_is_an_object_with_the_fields_of_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    service_log.begin("json", "info")
    fields = {"bookie": "a", "took_ms": 5, "level": "not this"}
    logger.info("bookie %s\nis registered", "a", extra=log_event("bookie.registered", **fields))
    logger.debug("not written")
    try:
        raise UsageError("wrong")
    except UsageError:
        logger.exception("something failed")
    logging.getLogger("kazoo.client").info("not written")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(first.pop("ts")).utcoffset() is not None
    assert first == {
        "level": "info",
        "event": "bookie.registered",
        "message": "bookie a\nis registered",
        "bookie": "a",
        "took_ms": 5,
    }
    assert (second["event"], second["level"], second["code"]) == ("pybk.of.a.test", "error", "usage")
    assert "UsageError: wrong" in second["stack"]


def test_text_ends_with_the_event_and_the_level_changes(capsys: pytest.CaptureFixture[str]) -> None:
    service_log.begin("text", "warning")
    logger.info("not written")
    service_log.set_level("debug")
    logger.debug("written", extra=log_event("bookie.started"))
    assert re.fullmatch(r"[-0-9]+ [:,0-9]+ DEBUG written \[bookie\.started\]\n", capsys.readouterr().err)


def test_a_name_in_a_message_begins_no_line_and_reaches_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    service_log.begin("text", "info")
    logger.info("ledger type %s", "a\n2026-01-01 00:00:00,000 ERROR forged\x1b[2J\x85")
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith(r" INFO ledger type a\n2026-01-01 00:00:00,000 ERROR forged\x1b[2J\x85")
    try:
        raise UsageError("wrong")
    except UsageError:
        logger.exception("something failed")
    assert len(capsys.readouterr().err.splitlines()) > 2, "a stack has its lines"


def test_lines_of_one_kind_are_limited(capsys: pytest.CaptureFixture[str]) -> None:
    service_log.begin("text", "debug")
    for number in range(30):
        logger.info("ledger %d", number)
        logger.debug("detail %d", number)
        logger.info("change %d", number, extra=NOT_LIMITED)
    lines = capsys.readouterr().err.splitlines()
    assert sum("ledger" in line for line in lines) == service_log.LINES_MAX
    assert sum("detail" in line for line in lines) == sum("change" in line for line in lines) == 30


def test_events_are_those_of_the_code_and_of_the_documents() -> None:
    used: set[str] = set()
    for path in sorted((ROOT / "src").rglob("*.py")):
        used |= set(re.findall(r'log_event\(\s*"([^"]+)"', path.read_text(encoding="utf-8")))
    assert used == EVENTS.keys()
    document = Path(ROOT / "docs" / "admin" / "production.md").read_text(encoding="utf-8")
    table = "".join(f"| `{name}` | {meaning} |\n" for name, meaning in EVENTS.items())
    assert table in document, f"put this into docs/admin/production.md:\n{table}"
