"""The demonstration: it runs on any input, and it would notice a loss."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from demo.reading import LostEntryError, lines_of, read_back
from demo.source import LINE_BYTES_MAX, Source
from demo.writing import KINDS, Progress, write_lines
from pybk import LedgerManager, UsageError
from tests.paths import ROOT
from tests.waiting import PROCESS_S

SECRET = b"32 bytes that stand for a secret"


def demo(tmp_path: Path, source: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the demonstration; its store is gone when it ends."""
    place = tmp_path / "place"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "demo", str(source), "--directory", str(place)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tools")},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    assert list(place.iterdir()) == []
    return done


@pytest.mark.sampled(one_in=6, group="documents")
def test_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deeper").mkdir(parents=True)
    (folder / "text").write_bytes(b"".join(b"line %d\n" % number for number in range(500)) + b"\n\nno end")
    (folder / "deeper" / "binary").write_bytes(bytes(range(256)) * 8)
    text = demo(tmp_path, folder).stdout
    assert "with SIGKILL after it had acknowledged" in text
    assert "acknowledged entries are back byte for byte" in text
    assert "All 512 lines, moved to each tier in turn and read again byte for byte" in text
    text, _, second = text.partition("== 2.")
    assert "raised LedgerFencedError" in second
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert {row[1] for row in rows} == {kind.ledger_type for kind in KINDS}
    assert all(row[3] == row[5] for row in rows)  # each in the tier that its hint asks for
    assert sum(int(row[6].replace(",", "")) for row in rows) == 512
    assert {line.split()[0] for line in text.splitlines() if line.endswith("verified")} == {"NVME", "SSD", "HDD"}


@pytest.mark.long
def test_a_file_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"x")
    text = demo(tmp_path, tmp_path / "one").stdout
    assert "All 1 acknowledged entries are back" in text
    assert "raised LedgerFencedError" in text


def test_nothing_to_write(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    error = demo(tmp_path, tmp_path / "empty", expect=1).stderr
    assert error.startswith("demo: ")
    assert error.count("\n") == 1


def test_lines_are_dealt_whole_and_in_order(tmp_path: Path) -> None:
    content = b"".join(b"%d\n" % number for number in range(500)) + b"y" * (LINE_BYTES_MAX + 5)
    (tmp_path / "a").write_bytes(content)
    source = Source.of(str(tmp_path))
    assert b"".join(source.lines()) == content
    lines = list(source.lines())
    assert len(lines) == 502
    dealt = [list(lines_of(source, kind, 0)) for kind in range(len(KINDS))]
    assert sorted(chain.from_iterable(dealt)) == sorted(lines)
    assert list(lines_of(source, 1, 7)) == dealt[1][7:]
    assert Source.of(None).file_bytes > 1 << 20
    with pytest.raises(UsageError, match="nowhere"):
        Source.of(str(tmp_path / "nowhere"))


def test_a_wrong_or_missing_entry_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"".join(b"%d\n" % number for number in range(1000)))
    source = Source.of(str(tmp_path / "input"))
    reports: list[Progress] = []
    with LedgerManager.open(tmp_path / "store") as manager:
        skip = [5, 0, 0, 0]
        ledgers = write_lines(manager, source, SECRET, skip, reports.append)
        assert sum(report.entries for report in reports) == 995
        for kind, ledger_id in enumerate(ledgers):
            with manager.open_ledger(ledger_id, secret=SECRET) as reader:
                lines = list(lines_of(source, kind, skip[kind]))
                read = read_back(reader, iter(lines))
                assert (read.entries, read.payload_bytes) == (len(lines), sum(map(len, lines)))
                assert read.entries == sum(report.entries for report in reports if report.kind == kind)
                for wrong in (lines[1:], lines[:-1], [*lines[:9], b"", *lines[10:]]):
                    with pytest.raises(LostEntryError, match=f"ledger {ledger_id} entry"):
                        read_back(reader, iter(wrong))


def test_reports_never_run_ahead_of_what_is_confirmed(tmp_path: Path) -> None:
    """A ledger that defers its syncs is reported as acknowledged only up to what was forced."""
    (tmp_path / "input").write_bytes(b"x\n" * 2000)
    with LedgerManager.open(tmp_path / "store") as manager:
        confirmed: dict[int, list[int]] = {kind: [] for kind in range(len(KINDS))}
        written = [0] * len(KINDS)

        def report(progress: Progress) -> None:
            written[progress.kind] += progress.entries
            confirmed[progress.kind].append(progress.confirmed)
            assert progress.confirmed < written[progress.kind]

        write_lines(manager, Source.of(str(tmp_path / "input")), SECRET, [0] * len(KINDS), report)
    deferred = [kind for kind, what in enumerate(KINDS) if what.write_flags]
    assert [confirmed[kind][0] for kind in deferred] == [-1] * len(deferred)
    assert [confirmed[kind][-1] for kind in range(len(KINDS))] == [count - 1 for count in written]
