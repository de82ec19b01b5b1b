from __future__ import annotations

import json
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import pytest

from pybk.errors import CorruptError, UnsupportedFormatError
from pybk.storage.format.index_rows import (
    decode_chain_row,
    encode_chain_row,
    encode_share,
    encode_value,
    ledger_key,
    page_key,
    share_key,
)
from pybk.storage.index import index as index_module
from pybk.storage.index.index import Index, IndexUpdate
from tests.golden.make_index import FILES, ledger_row, locations_of, made_index
from tests.paths import GOLDEN
from tests.sampling import every, sample
from tests.storage.memory_environment import MapEnvironment

GOLDEN_INDEX = GOLDEN / "index.json"


def answers(index: Index) -> dict[str, Callable[[], Any]]:
    """Every question that can be put to the index that ``made_index`` makes."""

    def pages(ledger_id: int) -> list[bytes]:
        return [runs.tobytes() for runs in index.pages(ledger_id)]

    def shares(file_id: int) -> list[tuple[int, int]]:
        return list(index.file_ledgers(file_id))

    def page(ledger_id: int, entry_id: int) -> bytes:
        return index.page(ledger_id, entry_id).tobytes()

    questions: dict[str, Callable[[], Any]] = {
        "mark": index.mark,
        "totals": index.totals,
        "ledgers": lambda: list(index.ledgers()),
        "files": index.files,
        "live": index.checked_uses,
    }
    for ledger_id in (0, 1, 3, 4, 7, 8):
        questions[f"ledger {ledger_id}"] = partial(index.ledger, ledger_id)
    for ledger_id in (1, 4, 7):
        questions[f"pages {ledger_id}"] = partial(pages, ledger_id)
    for ledger_id, entry_id in ((1, 0), (1, 5), (4, 2)):
        questions[f"page {ledger_id} {entry_id}"] = partial(page, ledger_id, entry_id)
    for row in FILES:
        questions[f"file {row.file_id}"] = partial(shares, row.file_id)
    return questions


def sound_answers() -> tuple[dict[bytes, bytes], dict[str, Any]]:
    environment = MapEnvironment()
    made_index(environment)
    return environment.rows, {name: ask() for name, ask in answers(Index(environment)).items()}


def wrong_answers(rows: dict[bytes, bytes], expected: dict[str, Any], asked: Container[str] | None = None) -> list[str]:
    """Names of the questions that a damaged index answers, and answers wrongly."""
    wrong = []
    for name, ask in answers(Index(MapEnvironment(rows))).items():
        try:
            if (asked is None or name in asked) and ask() != expected[name]:
                wrong.append(name)
        except (CorruptError, UnsupportedFormatError):
            continue
    return wrong


def test_golden() -> None:
    golden = {bytes.fromhex(key): bytes.fromhex(value) for key, value in json.loads(GOLDEN_INDEX.read_text()).items()}
    rows, expected = sound_answers()
    assert rows == golden
    assert not wrong_answers(golden, expected)
    assert {name: ask() for name, ask in answers(Index(MapEnvironment(golden))).items()} == expected


@pytest.mark.sampled
def test_every_bit_of_every_value() -> None:
    rows, expected = sound_answers()
    # Up to the first look at a value, damage cannot change what is asked for: only who looks at it needs asking.
    readers: dict[bytes, set[str]] = {key: set() for key in rows}
    environment = MapEnvironment(rows)
    for name, ask in answers(Index(environment)).items():
        environment.reads.clear()
        ask()
        for key in environment.reads:
            readers.setdefault(key, set()).add(name)
    for key, value in rows.items():
        assert readers[key]
        for bit in sample(str(key), range(0, 8 * len(value), every(5)), 3):
            flipped = bytearray(value)
            flipped[bit >> 3] ^= 1 << (bit & 7)
            damaged = {**rows, key: bytes(flipped)}
            assert not wrong_answers(damaged, expected, readers[key]), (key, bit)
            if bit % 7 == 0:
                assert list(Index(MapEnvironment(damaged)).check()), (key, bit)


@pytest.mark.sampled
def test_every_key_lost_or_damaged_or_with_foreign_value() -> None:
    rows, expected = sound_answers()
    for key, value in rows.items():
        lost = {other: rows[other] for other in rows if other != key}
        cases = [lost, *({**rows, key: rows[other]} for other in rows if other != key)]
        for bit in sample(str(key), range(0, 8 * len(key), every(3)), 3):
            flipped = bytearray(key)
            flipped[bit >> 3] ^= 1 << (bit & 7)
            cases.append({**lost, bytes(flipped): value})
        for damaged in cases:
            assert not wrong_answers(damaged, expected), key
            assert list(Index(MapEnvironment(damaged)).check()), key


def test_every_pair_of_keys_lost() -> None:
    rows, expected = sound_answers()
    for one in rows:
        for other in rows:
            left = {key: rows[key] for key in rows if key not in (one, other)}
            assert not wrong_answers(left, expected), (one, other)
            assert list(Index(MapEnvironment(left)).check()), (one, other)


def test_no_question_is_answered_without_the_row_it_rests_on() -> None:
    rows, _ = sound_answers()
    rests = {
        "mark": b"M",
        "files": b"F",
        "live": b"X",
        "ledgers": ledger_key(4),
        "ledger 4": ledger_key(4),
        "ledger 3": ledger_key(4),
        "pages 1": page_key(1, 0),
        "page 1 5": page_key(1, 0),
        "file 2": share_key(2, 4),
    }
    for name, prefix in rests.items():
        left = {key: value for key, value in rows.items() if not key.startswith(prefix)}
        with pytest.raises(CorruptError, match="rebuild-index"):
            answers(Index(MapEnvironment(left)))[name]()


def test_newer_format_is_named() -> None:
    rows, _ = sound_answers()
    rows[b"M"] = b"\x02\x00" + rows[b"M"][2:]
    with pytest.raises(UnsupportedFormatError, match="format 2"):
        Index(MapEnvironment(rows)).mark()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"store_id": 1}', b"\xff", b'{"store_id":"00","next_lsn":-1}'])
def test_sound_values_with_wrong_content(body: bytes) -> None:
    rows, _ = sound_answers()
    for key in rows:
        questions = answers(Index(MapEnvironment({**rows, key: encode_value(key, body)})))
        with pytest.raises(CorruptError):
            [ask() for ask in questions.values()]


def test_updates_refuse_a_broken_chain_and_lost_pages_and_shares() -> None:
    rows, _ = sound_answers()

    def without(key: bytes) -> Index:
        assert key in rows
        return Index(MapEnvironment({other: rows[other] for other in rows if other != key}))

    more = locations_of((7, 1, 2, 8192))
    changes: list[tuple[bytes, Callable[[IndexUpdate], object]]] = [
        (ledger_key(4), lambda update: update.put_ledger(ledger_row(3, -1))),
        (ledger_key(4), lambda update: update.put_ledger(ledger_row(4, -1))),
        (ledger_key(4), lambda update: update.put_ledger(ledger_row(5, -1))),
        (ledger_key(4), lambda update: update.drop_ledger(4)),
        (ledger_key(4), lambda update: update.drop_ledger(1)),
        (page_key(1, 0), lambda update: update.append_locations(1, more)),
        (page_key(1, 0), lambda update: update.drop_ledger(1)),
        (share_key(2, 1), lambda update: update.drop_ledger(1)),
        (
            page_key(1, 0),
            lambda update: update.replace_locations(1, locations_of((4, 2, 2, 1024)), locations_of((4, 2, 3, 0))),
        ),
        (b"M", lambda update: None),
    ]
    for lost, change in changes:
        with pytest.raises(CorruptError, match="rebuild-index"), without(lost).update() as update:
            change(update)


# ---- check -------------------------------------------------------------------------------------------------------


def test_lost_page_between_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "PAGE_LOCATIONS_MAX", 2)
    environment = MapEnvironment()
    made_index(environment)
    runs = locations_of(*((i, 1, 2, 64 * i) for i in range(6)))
    with Index(environment).update() as update:
        update.put_ledger(ledger_row(8, 5))
        update.append_locations(8, runs)
    for first in (0, 2, 4):
        lost = dict(environment.rows)
        del lost[page_key(8, first)]
        index = Index(MapEnvironment(lost))
        assert list(index.check())
        with pytest.raises(CorruptError):
            list(index.pages(8))
        with pytest.raises(CorruptError):
            index.page(8, first + 1)
        with pytest.raises(CorruptError), index.update() as update:
            update.drop_ledger(8)
        with pytest.raises(CorruptError), index.update() as update:
            update.replace_locations(8, runs, locations_of((0, 6, 9, 0)))


def test_sound_links_that_contradict_each_other() -> None:
    rows, _ = sound_answers()
    links = {ledger_id: decode_chain_row(ledger_key(ledger_id), rows[ledger_key(ledger_id)]) for ledger_id in (1, 4, 7)}
    for ledger_id, wrong, questions in [
        (4, links[4]._replace(previous=0), ("ledgers", "ledger 3")),
        (1, links[1]._replace(next=7), ("ledgers", "ledger 3")),
        (1, links[1]._replace(next=3), ("ledgers", "ledger 3")),
        (7, links[7]._replace(next=8), ("ledgers", "ledger 8")),
    ]:
        key = ledger_key(ledger_id)
        index = Index(MapEnvironment({**rows, key: encode_chain_row(key, wrong)}))
        assert list(index.check())
        for name in questions:
            with pytest.raises(CorruptError):
                answers(index)[name]()


@pytest.mark.parametrize("share", [1, 1 << 20])
def test_sound_shares_that_contradict_the_pages(share: int) -> None:
    rows, _ = sound_answers()
    key = share_key(2, 4)
    index = Index(MapEnvironment({**rows, key: encode_share(key, share)}))
    assert list(index.check())
    with pytest.raises(CorruptError), index.update() as update:
        update.drop_ledger(4)
    with pytest.raises(CorruptError):
        index.checked_uses()


def test_a_share_never_falls_below_zero() -> None:
    rows, _ = sound_answers()
    key = share_key(2, 4)
    index = Index(MapEnvironment({**rows, key: encode_share(key, 1)}))
    with pytest.raises(CorruptError, match="are to leave it"), index.update() as update:
        update.replace_locations(4, locations_of((0, 3, 2, 2048)), locations_of((0, 3, 9, 0)))


def test_check_names_what_sound_values_contradict() -> None:
    rows, _ = sound_answers()

    def said(key: bytes, body: bytes) -> str:
        return "\n".join(Index(MapEnvironment({**rows, key: encode_value(key, body)})).check())

    page = rows[page_key(1, 0)][16:]
    assert "from entry 0 on begins with entry 4" in said(page_key(1, 0), page[32:])
    assert "end with entry 5, not with 6" in said(page_key(1, 0), page[:64])
    assert "entry 6 follows entry 3" in said(page_key(1, 0), page[:32] + page[64:])
    assert "but no row" in said(page_key(2, 0), page)
    assert "but its pages name" in said(share_key(2, 1), (1).to_bytes(8, "little"))
    assert "none of the index's" in said(b"Z", b"")
    assert "file 000000000000004d has no row" in said(page_key(1, 0), locations_of((0, 7, 77, 0)).tobytes())
