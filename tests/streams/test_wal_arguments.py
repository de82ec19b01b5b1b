"""Arguments of a write-ahead log that cannot be: each error names the value, and says what is taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk import LedgerManager, Secret, UnauthorizedError, UsageError, WriteAheadLog


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[LedgerManager]:
    with LedgerManager.open(tmp_path) as manager:
        yield manager


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wait", "5"),
        ("wait", float("nan")),
        ("wait", 1e300),
        ("steal", "no"),
        ("create", 1),
        ("insecure", "yes"),
        ("segment_bytes", "1M"),
        ("segment_bytes", 0),
        ("segment_bytes", 1.5),
        ("segment_age_s", "1h"),
        ("segment_age_s", 0),
        ("segment_age_s", float("nan")),
        ("quorums", 3),
        ("quorums", (3, 2)),
        ("quorums", ("3", 2, 2)),
        ("storage_hints", 5),
        ("storage_hints", "SSD"),
        ("digest_type", "sha"),
        ("password", "text"),
    ],
)
def test_an_option_of_open_is_refused_before_anything_is_made(manager: LedgerManager, name: str, value: Any) -> None:
    shown = "" if name == "password" else repr(value)
    with pytest.raises(UsageError) as caught:
        WriteAheadLog.open(manager, **{"password": b"x", name: value} if name != "insecure" else {"insecure": value})
    assert shown in str(caught.value) or name == "quorums"
    assert WriteAheadLog.names(manager) == []


CALLS: dict[str, Callable[[WriteAheadLog], object]] = {
    "append_many(None)": lambda wal: wal.append_many(None),  # type: ignore[arg-type]
    "append_many(bytes)": lambda wal: wal.append_many(b"abc"),  # type: ignore[arg-type]
    "append_many(text)": lambda wal: wal.append_many(["a"]),  # type: ignore[list-item]
    "time_ns=True": lambda wal: wal.append(b"", time_ns=True),
    "time_ns=text": lambda wal: wal.append(b"", time_ns="now"),  # type: ignore[arg-type]
    "time_ns=2**63": lambda wal: wal.append(b"", time_ns=1 << 63),
    "from_lsn": lambda wal: list(wal.replay("1")),  # type: ignore[arg-type]
    "timeout": lambda wal: list(wal.follow(timeout="1")),  # type: ignore[arg-type]
    "timeout=1e300": lambda wal: list(wal.follow(timeout=1e300)),
    "generation": lambda wal: list(wal.follow(generation="0", timeout=0)),  # type: ignore[arg-type]
    "generation=-1": lambda wal: list(wal.follow(generation=-1, timeout=0)),
    "generation=5": lambda wal: list(wal.follow(1, generation=5, timeout=0)),
    "lsn": lambda wal: wal.read(True),
    "lsns": lambda wal: list(wal.read_many(5)),  # type: ignore[arg-type]
    "truncate": lambda wal: wal.truncate_before(1.0),  # type: ignore[arg-type]
    "keep": lambda wal: wal.checkpoint(keep="2"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_a_call_is_refused(manager: LedgerManager, call: str) -> None:
    with WriteAheadLog.open(manager, insecure=True) as wal:
        with pytest.raises(UsageError):
            CALLS[call](wal)
        assert wal.last_lsn() == 0


def test_log_sequence_numbers_begin_with_1(manager: LedgerManager) -> None:
    with WriteAheadLog.open(manager, insecure=True) as wal:
        wal.append(b"a")
        calls: list[Callable[[], object]] = [
            lambda: wal.read(0),
            lambda: list(wal.replay(0)),
            lambda: list(wal.read_many([0, 1])),
            lambda: list(wal.follow(0, timeout=0)),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="begin with 1"):
                call()


@pytest.mark.parametrize("variable", ["PYBK_PASSWORD", "PYBK_PASSWORD_FILE"])
def test_a_password_for_a_log_that_has_none_is_named(
    manager: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with WriteAheadLog.open(manager, insecure=True) as wal:
        wal.append(b"a")
    (tmp_path / "password").write_text("secret\n", encoding="ascii")
    monkeypatch.setenv(variable, str(tmp_path / "password"))
    for mode in ("r", "w"):
        with pytest.raises(UnauthorizedError, match="log 'wal' has no password, and one was given: unset PYBK_"):
            WriteAheadLog.open(manager, mode=mode, insecure=True)
        with WriteAheadLog.open(manager, mode=mode, insecure=True, password=b""):
            pass
    with WriteAheadLog.open(manager, "guarded") as wal:
        wal.append(b"a")
    with pytest.raises(UnauthorizedError, match="the password is not that of log 'guarded'"):
        WriteAheadLog.open(manager, "guarded", password=b"another")


def test_the_source_of_a_password_that_is_missing_is_named(
    manager: LedgerManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.write_bytes(b"\n")
    monkeypatch.setenv("FILED_FILE", str(empty))
    for secret, source in (
        (Secret(variable="NOPE"), "variable NOPE holds no password"),
        (Secret(file=str(empty)), f"the file {empty} holds no password"),
        (Secret(variable="FILED"), f"the file {empty}, which FILED_FILE names, holds no password"),
        (Secret(), "there is no password"),
        (Secret(b""), "there is no password"),
        (None, "there is no password"),
    ):
        with pytest.raises(UsageError, match=re.escape(source)):
            WriteAheadLog.open(manager, password=secret)
    monkeypatch.setenv("PYBK_PASSWORD", "")
    with pytest.raises(UsageError, match="PYBK_PASSWORD holds no password"):
        WriteAheadLog.open(manager)
    with WriteAheadLog.open(manager, password=Secret(variable="NOPE"), insecure=True):
        pass


def test_the_file_of_a_password_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("from the file\n", encoding="ascii")
    monkeypatch.setenv("PYBK_PASSWORD", "from the variable")
    monkeypatch.setenv("PYBK_PASSWORD_FILE", str(tmp_path / "password"))
    assert Secret(variable="PYBK_PASSWORD").read() == b"from the file"
    monkeypatch.delenv("PYBK_PASSWORD_FILE")
    assert Secret(variable="PYBK_PASSWORD").read() == b"from the variable"
