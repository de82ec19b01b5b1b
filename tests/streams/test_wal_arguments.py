"""Arguments of a write-ahead log that cannot be: each error names the value, and says what is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pybk import LedgerManager, UsageError, WriteAheadLog


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
        ("segment_age_s", None),
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
    "lsn": lambda wal: wal.read(True),
    "truncate": lambda wal: wal.truncate_before(1.0),  # type: ignore[arg-type]
    "keep": lambda wal: wal.checkpoint(keep="2"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_a_call_is_refused(manager: LedgerManager, call: str) -> None:
    with WriteAheadLog.open(manager, insecure=True) as wal:
        with pytest.raises(UsageError):
            CALLS[call](wal)
        assert wal.last_lsn == 0
