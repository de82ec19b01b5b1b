from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybk.errors import CorruptError, NoSuchEntryError, NoSuchLedgerError, UsageError
from pybk.storage.format.index_rows import CHAIN_TAIL, FileRow, LedgerRow, Totals
from pybk.storage.format.log_file import RECORD_HEADER_BYTES, RunLocations
from pybk.storage.index import index as index_module
from pybk.storage.index.index import Index, differing_entries, untiled
from pybk.storage.io.lmdb_environment import Environment, LmdbEnvironment
from tests.golden.make_index import FILES, MARK, ledger_row, locations_of, made_index
from tests.storage.memory_environment import MapEnvironment


def lmdb_at(path: Path) -> Environment:
    path.mkdir(exist_ok=True)
    return LmdbEnvironment(str(path))


def fresh() -> tuple[Index, MapEnvironment]:
    environment = MapEnvironment()
    index = Index(environment)
    with index.update() as update:
        for row in FILES:
            update.put_file(row)
        update.put_mark(MARK)
    return index, environment


def stored(environment: Environment) -> list[tuple[bytes, bytes]]:
    with environment.read() as transaction:
        return list(transaction.items(b"\0", b"\xff"))


def same_runs(one: RunLocations, other: RunLocations) -> bool:
    return one.tobytes() == other.tobytes()


def entry_ids(runs: RunLocations) -> list[int]:
    return [i for first, count, stride, *_ in runs.tolist() for i in range(first, first + count * stride, stride)]


# ---- what it says ------------------------------------------------------------------------------------------------


def live_bytes(index: Index) -> dict[int, int]:
    return {file_id: use.live_bytes for file_id, use in index.checked_uses().items()}


def test_an_index_without_rows_is_empty() -> None:
    index = Index(MapEnvironment())
    assert index.mark() is None
    assert index.totals() == Totals(0, 0, 0)
    assert index.files() == {}
    assert live_bytes(index) == {}
    assert list(index.check()) == []
    with pytest.raises(CorruptError, match="rebuild-index"):
        index.ledger(3)
    with pytest.raises(CorruptError, match="rebuild-index"):
        list(index.ledgers())


def test_first_update_must_put_the_mark() -> None:
    environment = MapEnvironment()
    with pytest.raises(UsageError, match="mark"), Index(environment).update() as update:
        update.put_file(FILES[0])
    assert environment.rows == {}


def test_round_trip_through_lmdb(tmp_path: Path) -> None:
    environment = lmdb_at(tmp_path / "index")
    made_index(environment)
    made = stored(environment)
    environment.close()
    environment = lmdb_at(tmp_path / "index")
    index = Index(environment)
    assert stored(environment) == made
    assert list(index.check()) == []
    assert index.mark() == MARK
    assert index.files() == {row.file_id: row for row in FILES}
    assert index.ledger(4) == ledger_row(4, 2)
    assert [row.metadata.ledger_id for row in index.ledgers()] == [1, 4, 7]
    assert [row.metadata.ledger_id for row in index.ledgers(after=3)] == [4, 7]
    assert same_runs(index.page(1, 5), locations_of((0, 4, 2, 0), (4, 2, 2, 1024), (6, 1, 3, 0)))
    assert dict(index.file_ledgers(2)) == {1: 2 * RECORD_HEADER_BYTES + 600, 4: RECORD_HEADER_BYTES + 300}
    assert live_bytes(index) == {2: 3 * RECORD_HEADER_BYTES + 900, 3: RECORD_HEADER_BYTES + 100, 9: 0}
    environment.close()


def test_ledger_ids_outside_the_chain() -> None:
    index, _ = fresh()
    assert index.ledger(-1) is None
    assert index.ledger(CHAIN_TAIL) is None
    assert index.ledger(1 << 80) is None
    with index.update() as update:
        for ledger_id in (0, CHAIN_TAIL - 1):
            update.put_ledger(ledger_row(ledger_id, -1))
        with pytest.raises(UsageError):
            update.put_ledger(ledger_row(CHAIN_TAIL, -1))
    assert [row.metadata.ledger_id for row in index.ledgers()] == [0, CHAIN_TAIL - 1]
    assert list(index.check()) == []


def test_pages_beyond_the_ledger() -> None:
    index = Index(made_environment())
    with pytest.raises(NoSuchLedgerError):
        index.page(5, 0)
    with pytest.raises(NoSuchLedgerError):
        list(index.pages(5))
    with pytest.raises(NoSuchEntryError):
        index.page(1, 7)
    with pytest.raises(NoSuchEntryError):
        index.page(7, 0)
    assert list(index.pages(7)) == []


def made_environment() -> MapEnvironment:
    environment = MapEnvironment()
    made_index(environment)
    return environment


def test_an_update_that_raises_changes_nothing() -> None:
    environment = made_environment()
    before = dict(environment.rows)

    def change() -> None:
        with Index(environment).update() as update:
            update.put_ledger(ledger_row(2, -1))
            update.drop_ledger(1)
            raise KeyError

    with pytest.raises(KeyError):
        change()
    assert environment.rows == before


# ---- ledgers -----------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=12), max_size=6))
def test_chain_against_a_set(sessions: list[list[tuple[int, bool]]]) -> None:
    index, _ = fresh()
    there: dict[int, LedgerRow] = {}
    version = 0
    for session in sessions:
        with index.update() as update:
            for ledger_id, insert in session:
                version += 1
                if insert:
                    row = ledger_row(ledger_id, -1, version=version)
                    update.put_ledger(row)
                    there[ledger_id] = row
                else:
                    assert update.drop_ledger(ledger_id) == {}
                    there.pop(ledger_id, None)
        assert list(index.check()) == []
        assert [index.ledger(i) for i in range(13)] == [there.get(i) for i in range(13)]
        assert list(index.ledgers()) == [there[i] for i in sorted(there)]
        for after in (0, 5, 12):
            assert list(index.ledgers(after)) == [there[i] for i in sorted(there) if i > after]


def test_new_ledgers_cost_one_write_each() -> None:
    index, environment = fresh()
    environment.puts = 0
    with index.update() as update:
        for ledger_id in range(1000):
            update.put_ledger(ledger_row(ledger_id, -1))
    assert environment.puts <= 1005


def test_ledgers_are_read_in_slices_that_bear_changes_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "LEDGERS_AT_A_TIME", 3)
    index, _ = fresh()
    with index.update() as update:
        for ledger_id in range(0, 20, 2):
            update.put_ledger(ledger_row(ledger_id, -1))
    found = []
    for row in index.ledgers():
        found.append(row.metadata.ledger_id)
        if found[-1] == 4:
            with index.update() as update:
                update.drop_ledger(4)
                update.drop_ledger(6)
                update.put_ledger(ledger_row(7, -1))
    assert found == [0, 2, 4, 7, 8, 10, 12, 14, 16, 18]


# ---- runs --------------------------------------------------------------------------------------------------------


def test_append_fills_the_last_page_and_costs_the_same_for_long_ledgers() -> None:
    index, environment = fresh()
    last = -1

    def append(count: int) -> int:
        nonlocal last
        runs = locations_of(*((last + 1 + number, 1, 2, 64 * number) for number in range(count)))
        before = environment.puts + len(environment.reads)
        with index.update() as update:
            update.append_locations(1, runs)
            last += count
            update.put_ledger(ledger_row(1, last))
        return environment.puts + len(environment.reads) - before

    append(1000)
    append(30)
    assert [len(page) for page in index.pages(1)] == [1024, 6]
    cost = append(3)
    append(5000)
    assert append(3) == cost
    assert [len(page) for page in index.pages(1)] == [1024] * 5 + [916]
    assert entry_ids(np.concatenate(list(index.pages(1)))) == list(range(last + 1))
    assert list(index.check()) == []


def test_append_refuses_gaps_overlaps_and_nonsense() -> None:
    index = Index(made_environment())
    for run in [(8, 1, 2, 0), (6, 1, 2, 0), (0, 1, 2, 0), (7, 0, 2, 0)]:
        with pytest.raises(CorruptError), index.update() as update:
            update.append_locations(1, locations_of(run))
    for runs in [locations_of((7, 1, 2, 0), (9, 1, 2, 0)), locations_of((7, 2, 2, 0), (8, 1, 2, 0))]:
        with pytest.raises(CorruptError), index.update() as update:
            update.append_locations(1, runs)
    with index.update() as update:
        update.append_locations(1, locations_of())
    assert list(index.check()) == []


def test_strides_make_gaps_and_nothing_else_does() -> None:
    def strided(first: int, count: int, stride: int) -> tuple[int, int, int, int, int, int, int]:
        return first, count, stride, 0, 2, 10, 0

    assert untiled(locations_of(strided(0, 3, 2), strided(6, 1, 2)), (-1, 1)) is None
    assert untiled(locations_of(strided(1, 3, 2)), (-1, 1)) is None
    assert untiled(locations_of(strided(0, 3, 1), strided(4, 1, 1)), (-1, 1)) is not None
    assert untiled(locations_of(strided(0, 3, 2), strided(4, 1, 2)), (-1, 1)) is not None
    assert untiled(locations_of(strided(1, 3, 1)), (-1, 1)) is not None
    assert differing_entries(locations_of(strided(0, 3, 2)), locations_of(strided(0, 2, 2), strided(4, 1, 1))) is None
    assert differing_entries(locations_of(strided(0, 3, 2)), locations_of(strided(0, 3, 1))) is not None
    assert (
        differing_entries(locations_of(strided(0, 3, 2)), locations_of(strided(0, 2, 2), strided(6, 1, 2))) is not None
    )


def regroup(data: st.DataObject, ids: list[int], file_id: int) -> list[tuple[int, ...]]:
    """Make runs of random length for ascending entry ids, as long as they follow each other."""
    runs: list[tuple[int, ...]] = []
    while ids:
        count = data.draw(st.integers(1, 6))
        while ids[:count] != list(range(ids[0], ids[0] + count)):
            count -= 1
        runs.append((ids[0], count, 1, ids[0] * 8, file_id, 50 * count, 0))
        ids = ids[count:]
    return runs


@given(st.data())
def test_runs_against_a_list(data: st.DataObject) -> None:
    draw = data.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "PAGE_LOCATIONS_MAX", 4)
        patch.setattr(index_module, "PAGES_AT_A_TIME", 2)
        index, environment = fresh()
        model: list[tuple[int, ...]] = []
        end = 0
        for _ in range(draw(st.integers(1, 6))):
            with index.update() as update:
                for _ in range(draw(st.integers(1, 2))):
                    more = draw(st.integers(0, 15))
                    runs = regroup(data, list(range(end, end + more)), draw(st.sampled_from([2, 3])))
                    update.append_locations(5, locations_of(*runs))
                    model += runs
                    end += more
                    chosen = [run for run in model if draw(st.booleans())]
                    ids = [i for run in chosen for i in range(run[0], run[0] + run[1])]
                    new = regroup(data, ids, draw(st.sampled_from([2, 3, 9])))
                    update.replace_locations(5, locations_of(*chosen), locations_of(*new))
                    model = sorted([run for run in model if run not in chosen] + new)
                update.put_ledger(ledger_row(5, end - 1))
            pages = list(index.pages(5))
            assert [run for page in pages for run in page.tolist()] == model
            assert all(0 < len(page) <= 4 for page in pages)
            assert list(index.check()) == []
            for entry_id in range(end):
                page = index.page(5, entry_id)
                assert entry_id in entry_ids(page)
        with index.update() as update:
            freed = update.drop_ledger(5)
        sizes: dict[int, int] = {}
        for run in model:
            sizes[run[4]] = sizes.get(run[4], 0) + RECORD_HEADER_BYTES + run[5]
        assert freed == sizes
        assert [key for key in environment.rows if key[:1] in b"PX"] == []
        assert live_bytes(index) == {2: 0, 3: 0, 9: 0}
        assert list(index.check()) == []


def test_replacing_singles_by_blocks_leaves_few_pages() -> None:
    index, _ = fresh()
    count = 5 * 1024
    old = locations_of(*((i, 1, 2, 64 * i) for i in range(count)))
    new = locations_of(*((i, 128, 9, 64 * i) for i in range(0, count, 128)))
    with index.update() as update:
        update.put_ledger(ledger_row(1, count - 1))
        update.append_locations(1, old)
    for low in range(0, count, 1024):
        with index.update() as update:
            update.replace_locations(1, old[low : low + 1024], new[low // 128 : low // 128 + 8])
    assert same_runs(np.concatenate(list(index.pages(1))), new)
    assert len(list(index.pages(1))) == 1
    assert list(index.check()) == []


def test_replace_refuses_other_entries_and_runs_that_are_not_there() -> None:
    index = Index(made_environment())
    old = locations_of((0, 4, 2, 0), (4, 2, 2, 1024))
    for new in [
        locations_of((0, 5, 9, 0)),
        locations_of((0, 7, 9, 0)),
        locations_of((1, 6, 9, 0)),
        locations_of(),
        locations_of((0, 6, 9, 0), (5, 1, 9, 0)),
    ]:
        with pytest.raises(UsageError), index.update() as update:
            update.replace_locations(1, old, new)
    for gone in [
        locations_of((0, 4, 3, 0)),
        locations_of((1, 3, 2, 0)),
        locations_of((0, 3, 2, 0)),
        locations_of((7, 1, 2, 0)),
    ]:
        with pytest.raises(CorruptError), index.update() as update:
            update.replace_locations(1, gone, locations_of((int(gone["first"][0]), int(gone["count"][0]), 9, 0)))
    with index.update() as update:
        update.replace_locations(1, locations_of(), locations_of())
    assert list(index.check()) == []


def test_pages_read_during_a_move_miss_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "PAGE_LOCATIONS_MAX", 4)
    monkeypatch.setattr(index_module, "PAGES_AT_A_TIME", 1)
    index, _ = fresh()
    old = locations_of(*((i, 1, 2, 64 * i) for i in range(16)))
    with index.update() as update:
        update.put_ledger(ledger_row(1, 15))
        update.append_locations(1, old)
    found: list[int] = []
    for page in index.pages(1):
        if not found:
            with index.update() as update:
                update.replace_locations(1, old[2:14], locations_of((2, 5, 9, 0), (7, 7, 9, 0)))
        found += entry_ids(page)
    assert sorted(set(found)) == list(range(16))


# ---- files -------------------------------------------------------------------------------------------------------


def test_files() -> None:
    index = Index(made_environment())
    with pytest.raises(UsageError, match="still holds"), index.update() as update:
        update.drop_file(2)
    with index.update() as update:
        update.replace_locations(1, locations_of((0, 4, 2, 0)), locations_of((0, 4, 9, 0)))
        with pytest.raises(UsageError, match="still holds"):
            update.drop_file(9)
        update.replace_locations(1, locations_of((0, 4, 9, 0)), locations_of((0, 4, 2, 0)))
    with pytest.raises(CorruptError, match="no row"), index.update() as update:
        update.append_locations(1, locations_of((7, 1, 77, 0)))
    with index.update() as update:
        assert update.drop_file(9)
        assert not update.drop_file(9)
        assert not update.drop_file(1234)
        update.put_file(FILES[0]._replace(bytes=5))
        update.replace_locations(1, locations_of((6, 1, 3, 0)), locations_of((6, 1, 77, 0)))
        assert update.drop_file(3)
        update.put_file(FileRow(77, "cold", "hdd", 1, 10))
    assert list(index.check()) == []
    assert index.files() == {2: FILES[0]._replace(bytes=5), 77: FileRow(77, "cold", "hdd", 1, 10)}
    assert live_bytes(index)[77] == RECORD_HEADER_BYTES + 100
    assert list(index.file_ledgers(3)) == []


def test_totals_count() -> None:
    index = Index(made_environment())
    metadata_bytes = sum(len(row.metadata.encode()) for row in index.ledgers())
    assert index.totals() == Totals(3, metadata_bytes, 3)
    with index.update() as update:
        update.drop_ledger(4)
        update.put_ledger(ledger_row(1, 6, version=123456))
        update.put_ledger(ledger_row(9, -1))
    assert index.totals() == Totals(3, sum(len(row.metadata.encode()) for row in index.ledgers()), 3)
    assert list(index.check()) == []
