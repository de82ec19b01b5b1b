"""The demonstration's second act: it shows what it says on any input, and it would notice a loss."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import chain, islice
from pathlib import Path

import pytest

from demo import cluster
from demo.child import Child
from demo.cluster import Cluster, WriterReport, check_kept, check_replicas
from demo.reading import LostEntryError
from demo.replicas import BookieDirectory
from demo.source import Source
from pybk import LedgerManager
from pybk.errors import DigestMismatchError, PybkError
from pybk.ledger.ledger_metadata import LedgerMetadata

LINES = [b"line %d\n" % number for number in range(900)]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "input").write_bytes(b"".join(LINES))
    return Source.of(str(tmp_path / "input"))


@pytest.mark.long
def test_the_act_prints_the_replacement_of_a_killed_bookie(
    source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "place").mkdir()
    cluster.run(str(tmp_path / "place"), source)
    text = capsys.readouterr().out
    changed = re.search(
        r"Killed (\S+) with SIGKILL: the ensemble changed from (.*) to (.*), and writing continued", text
    )
    assert changed is not None
    before, after = (set(names.split(", ")) for names in changed.groups()[1:])
    assert before - after == {changed[1]}
    assert len(after) == 3
    assert text.count("fenced, recovered and closed it") == 2
    assert "raised LedgerFencedError" in text
    rows = [line for line in text.splitlines() if re.match(r" +\d+ +[\d,]+ to ", line)]
    assert len(rows) == 9  # two fragments of the first ledger, one of the second, three bookies each
    assert sum(row.endswith("killed") for row in rows) == 1
    assert sum("each entry verified" in row for row in rows) == 8
    assert re.search(r"^Every entry is, byte for byte, on (every surviving replica|two surviving)", text, re.MULTILINE)


def test_a_ledger_that_lost_acknowledged_entries_is_noticed() -> None:
    check_kept(WriterReport(1, confirmed=9), 9)
    with pytest.raises(LostEntryError, match="ends with entry 8"):
        check_kept(WriterReport(1, confirmed=9), 8)


class Small(Cluster):
    """A cluster of three bookies in this process that have ended, and a ledger on them."""

    def __init__(self, directory: Path, source: Source, stack: ExitStack) -> None:
        self.source = source
        self.url = f"lmdb://{directory}/metadata"
        self.secret = b"s" * 32
        self.ledger_secret = b"l" * 32
        names = ("a", "b", "c")
        managers = [
            stack.enter_context(
                LedgerManager.open(
                    directory / name,
                    listen="tcp://127.0.0.1:*",
                    metadata=self.url,
                    cluster_secret=self.secret,
                    bookie_id=name,
                )
            )
            for name in names
        ]
        with managers[0].create_ledger(secret=self.ledger_secret) as writer:
            writer.append_many(LINES)
        self.ledger: LedgerMetadata = managers[0].ledger_metadata(writer.ledger_id)
        stack.close()
        self.directories = {}
        for name in names:
            self.directories[name] = BookieDirectory(name, str(directory / name))
            stack.enter_context(closing(self.directories[name]))


@pytest.fixture
def small(tmp_path: Path, source: Source) -> Iterator[Small]:
    with ExitStack() as stack:
        yield Small(tmp_path, source, stack)


def test_replicas_are_each_read_by_themselves(small: Small) -> None:
    rows, lacking = check_replicas(small, small.ledger, small.directories)
    assert lacking == 0
    assert [row[2] for row in rows] == [bookie.bookie_id for bookie in small.ledger.fragments[0].ensemble]
    assert {tuple(row[3:]) for row in rows} == {("900", f"{sum(map(len, LINES)):,}", "each entry verified")}


def test_missing_entries_are_noticed(small: Small) -> None:
    small.directories["b"].replicas.delete(small.ledger.ledger_id)
    rows, lacking = check_replicas(small, small.ledger, small.directories)
    assert lacking == 900
    assert [row[5] for row in rows if row[2] == "b"] == ["each entry verified; 900 are on the others only"]
    small.directories["a"].replicas.delete(small.ledger.ledger_id)
    with pytest.raises(LostEntryError, match="1 bookies hold ledger"):
        check_replicas(small, small.ledger, small.directories)


def test_wrong_entries_are_noticed(small: Small, tmp_path: Path) -> None:
    (tmp_path / "input").write_bytes(b"".join([*LINES[:700], b"else!\n", *LINES[701:]]))
    with pytest.raises(LostEntryError, match="entry 700 of"):
        check_replicas(small, small.ledger, small.directories)
    small.ledger_secret = b"x" * 32
    with pytest.raises(DigestMismatchError):
        check_replicas(small, small.ledger, small.directories)


def test_lines_come_over_and_over(source: Source) -> None:
    assert list(islice(chain.from_iterable(source.repeated()), 2000)) == [*LINES, *LINES, *LINES[:200]]


def test_a_child_that_ends_early_is_noticed(tmp_path: Path) -> None:
    with Child("demo.node", {"path": str(tmp_path)}) as child, pytest.raises(PybkError, match="exit code 1"):
        child.answer()


def test_a_child_imports_nothing_of_the_directory_in_which_the_demonstration_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this is no module of Python')")
    monkeypatch.chdir(tmp_path)
    with Child("json.tool", {}) as child:
        assert child.end() == 0
    assert capfd.readouterr().err == ""
