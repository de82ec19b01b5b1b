"""Each command that an error of a store names as a remedy is run as it is printed, on the damage that it is named for.

After that the store opens, and everything is there that was not damaged.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from pybk.admin.cli import main
from pybk.errors import CorruptError, IllegalOperationError, PybkError
from pybk.feature_level import FeatureLevel
from pybk.flags import StorageHint
from pybk.storage.format.index_rows import CHAIN_TAIL, encode_value, entries_key, ledger_key
from pybk.storage.index.index import Index, IndexUpdate, find_page
from pybk.storage.io.lmdb_environment import LmdbEnvironment, WriteTransaction
from pybk.storage.repair.verify import verify_store
from tests.internals import store_of
from tests.remedies import COMMAND, remedies
from tests.sampling import every
from tests.sealing import open_at
from tests.storage.repair.test_rebuild import (
    Contents,
    check_known_or_lost,
    cut_to,
    files_of,
    fill,
    filled_with,
    index_of,
    open_ledger,
    open_store,
)
from tests.storage.repair.test_verify import damage_index, flip, lose_record, tail_log

# ---- the damage --------------------------------------------------------------------------------------------------


class Damage(NamedTuple):
    """How a store is damaged, and which errors name a command then.

    Attributes:
        harm: Damages the store in a directory.
        named: The places in the sources of these errors.
        lost: Ledgers that have lost entries.
        first: What else the errors say, to be done before the commands.
        restored: Files that are restored from a backup, as the errors say.
        later: Damages the store, too, but while it is open for reading.
        cut: Whether commits are lost, so that ledgers may have entries that are not known.
    """

    harm: Callable[[Path], object]
    named: tuple[str, ...]
    lost: frozenset[int] = frozenset()
    first: Callable[[Path], object] = lambda path: None
    restored: tuple[str, ...] = ()
    later: Callable[[Path], object] = lambda path: None
    cut: bool = False


def change_rows(change: Callable[[WriteTransaction], object]) -> Callable[[Path], None]:
    """Return a harm that changes rows of the index."""

    def harm(path: Path) -> None:
        environment = LmdbEnvironment(str(index_of(path)))
        with environment.write() as transaction:
            change(transaction)
        environment.close()

    return harm


def lose_rows(transaction: WriteTransaction) -> None:
    for key in [bytes(key) for key, _ in transaction.items(b"", b"\xff")]:
        transaction.delete(key)


def change_index(change: Callable[[Index, IndexUpdate], object]) -> Callable[[Path], None]:
    """Return a harm that changes the index such that it stays sound, but for what was changed."""

    def harm(path: Path) -> None:
        environment = LmdbEnvironment(str(index_of(path)))
        index = Index(environment)
        with index.update() as update:
            change(index, update)
        environment.close()

    return harm


def change_length(index: Index, update: IndexUpdate) -> None:
    row = index.ledger(1)
    assert row is not None
    update.put_ledger(row._replace(length=row.length + 1))


def change_mark(index: Index, update: IndexUpdate) -> None:
    mark = index.mark()
    assert mark is not None
    update.put_mark(mark._replace(next_ledger_id=mark.next_ledger_id + 1))


def lose_a_run(transaction: WriteTransaction) -> None:
    found = find_page(transaction, 4, CHAIN_TAIL)
    assert found is not None
    key, page = found
    transaction.put(key, encode_value(key, page[:1].tobytes() + page[2:].tobytes()))


def put_back_the_index(path: Path) -> None:
    """Put an index back that is older than a move, and lose what was moved."""
    shutil.copytree(index_of(path), path.parent / "older")
    before = set(path.glob("hdd/*.cold"))
    with open_store(path) as manager:
        manager.move_ledger(3, StorageHint.HDD)
        manager.checkpoint()
    shutil.copytree(path.parent / "older", index_of(path), dirs_exist_ok=True)
    for file in set(path.glob("hdd/*.cold")) - before:
        file.unlink()


def swap_records(path: Path) -> None:
    environment = LmdbEnvironment(str(path / "ssd" / "entries"))
    with environment.write() as transaction:
        other = transaction.get(entries_key(3, 0))
        assert other is not None
        transaction.put(entries_key(4, 0), bytes(other))
    environment.close()


def lose_segments(path: Path) -> None:
    for file in path.glob("hdd/*.cold"):
        file.unlink()


def lose_tier_and_make_it(path: Path) -> None:
    shutil.rmtree(path / "hdd")
    (path / "hdd").mkdir()


CATALOG = "storage/repair/verify.py:_Check._differences"
PERMISSIONS = "storage/io/permissions.py:excess_warning"
LEVEL = "storage/named_records.py:check_level"
SEAM = "storage/repair/verify.py:_Check._check_ledger"
"""A gap between pages of the index, or before the tail; whatever reads them refuses it first, with the same remedy."""

IN_HDD = frozenset({1, 2, 5})
DAMAGE: dict[str, Damage] = {
    "lost index": Damage(
        lambda path: shutil.rmtree(index_of(path)),
        (
            "storage/directories.py:check_index_present",
            "storage/readonly.py:open_environment_read_only",
        ),
    ),
    "index of garbage": Damage(
        lambda path: filled_with(b"x" * 9999)(index_of(path)), ("storage/io/lmdb_environment.py:_REMEDY",)
    ),
    "cut index": Damage(lambda path: cut_to(4096)(index_of(path)), ("storage/io/lmdb_environment.py:_REMEDY",)),
    "empty index": Damage(change_rows(lose_rows), ("storage/directories.py:checked_mark",)),
    "row of the index": Damage(
        change_rows(lambda transaction: transaction.put(ledger_key(1), b"damaged")),
        ("storage/format/index_rows.py:REMEDY",),
    ),
    "ledger that the index lacks": Damage(
        change_index(lambda index, update: update.drop_ledger(0)), ("storage/log/recovery.py:_known",)
    ),
    "length in the index": Damage(change_index(change_length), ("storage/repair/verify.py:_Check._check_end",)),
    "mark of the index": Damage(change_index(change_mark), (CATALOG,)),
    "run that the index lacks": Damage(change_rows(lose_a_run), ("storage/format/index_rows.py:REMEDY",)),
    "older index, and lost files": Damage(
        put_back_the_index, ("storage/store.py:_make_index_again",), frozenset({1, 2, 3, 5})
    ),
    "lost page of the index": Damage(damage_index, ("storage/repair/verify.py:_Check._check_index",)),
    "cut log file": Damage(
        lambda path: os.truncate(files_of(path, "log")[0], 50_000),
        ("storage/store_opening.py:refuse_older",),
        frozenset({0}),
    ),
    "lost tier": Damage(
        lambda path: shutil.rmtree(path / "hdd"),
        ("storage/directories.py:store_directories",),
        IN_HDD,
        first=lambda path: (path / "hdd").mkdir(),
    ),
    "tier without its cookie": Damage(lose_tier_and_make_it, ("storage/directories.py:check_doubtful",), IN_HDD),
    "lost cold segment": Damage(
        lose_segments,
        ("storage/directories.py:check_present",),
        IN_HDD,
    ),
    "lost records of the SSD tier": Damage(
        lambda path: (path / "ssd" / "entries" / "data.mdb").unlink(),
        ("storage/directories.py:check_present", "storage/readonly.py:open_environment_read_only"),
        frozenset({3, 4}),
    ),
    "SSD tier of garbage": Damage(
        lambda path: filled_with(b"x" * 9999)(path / "ssd" / "entries"),
        ("storage/io/lmdb_environment.py:_REMEDY",),
        frozenset({3, 4}),
    ),
    "cut SSD tier": Damage(
        lambda path: cut_to(4096)(path / "ssd" / "entries"),
        ("storage/io/lmdb_environment.py:_REMEDY",),
        frozenset({3, 4}),
    ),
    "cold segment that is lost while the store is open": Damage(
        lambda path: None,
        ("storage/store_reader.py:StoreReader.read_batch",),
        restored=("hdd",),
        later=lose_segments,
    ),
    "lost watermark": Damage(lambda path: (path / "watermark").unlink(), ("storage/format/log_file.py:_REMEDY",)),
    "lost record of the SSD tier": Damage(
        lose_record, ("storage/tiers/lmdb_tier.py:LmdbTier.load",), restored=("ssd/entries",)
    ),
    "other record in the SSD tier": Damage(
        swap_records,
        ("storage/repair/inspection.py:RecordReader._header", "storage/tiers/__init__.py:checked_record"),
        frozenset({4}),
    ),
    "lost commit": Damage(
        lambda path: flip(tail_log(path), 4096 + 10),
        ("storage/log/recovery.py:_REMEDY", "storage/readonly.py:ReadOnlyStore.catch_up"),
        cut=True,
    ),
    "lost tier with commits": Damage(
        lambda path: shutil.rmtree(path / "nvme"),
        ("storage/directories.py:store_directories",),
        first=lambda path: (path / "nvme").mkdir(),
        cut=True,
    ),
    "lost cookie": Damage(lambda path: (path / "cookie").unlink(), ("storage/directories.py:lost_cookie",)),
    "lost list of directories": Damage(
        lambda path: (path / "directories").unlink(), ("storage/volumes.py:_how_to_list",)
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Contents]:
    """Return a store that tests copy before they damage it, and what is in it."""
    path = tmp_path_factory.mktemp("sound") / "store"
    return path, fill(path)


def errors_of(path: Path, later: Callable[[Path], object]) -> list[str]:
    """Return what reading, verifying and opening a store raise and report."""

    def read(*, read_only: bool) -> None:
        with open_store(path, read_only=read_only) as manager:
            later(path)
            for ledger_id in manager.list_ledgers():
                try:
                    reader = open_ledger(manager, ledger_id)
                    list(reader.read(0, reader.last_add_confirmed))
                except PybkError as error:
                    texts.append(str(error))

    def verify() -> None:
        texts.extend(problem.message for problem in verify_store(str(path), password=b"p").problems)

    texts: list[str] = []
    for look in (partial(read, read_only=True), verify, partial(read, read_only=False)):
        try:
            look()
        except PybkError as error:
            texts.append(str(error))
    return texts


def run(text: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command as it is printed in a text; with ``--accept-loss``, if it asks for that, and the text names it."""
    for command in COMMAND.findall(text):
        words = [str(path) if word == "PATH" else word for word in shlex.split(command)[1:]]
        if str(path) not in words:
            assert re.search(rf"{re.escape(command)}` on (the store|it)\b", text), text
            words.append(str(path))
        capsys.readouterr()
        status = main(words)
        out, err = capsys.readouterr()
        assert status in (0, 1), (words, out, err)
        if status == 1 and "give --accept-loss" in out + err:
            assert "--accept-loss" in text, "the remedy as it is printed changes nothing"
            assert main([*words, "--accept-loss"]) == 0


def check_contents(path: Path, given: Contents, lost: frozenset[int]) -> None:
    """Open a store; all entries are there but those of ledgers that have lost some, whose reads say so."""
    for read_only in (False, True):
        with open_store(path, read_only=read_only) as manager:
            assert set(manager.list_ledgers()) == set(given)
            for ledger_id, payloads in given.items():
                reader = open_ledger(manager, ledger_id)
                assert reader.last_add_confirmed == len(payloads) - 1
                for entry_id, payload in enumerate(payloads):
                    try:
                        assert next(iter(reader.read(entry_id, entry_id))).payload == payload
                    except CorruptError:
                        assert ledger_id in lost


@pytest.mark.parametrize("name", DAMAGE)
def test_a_remedy_that_an_error_names_mends_the_store(
    name: str, sound: tuple[Path, Contents], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, (source, given) = DAMAGE[name], sound
    path = Path(shutil.copytree(source, tmp_path / "store"))
    damage.harm(path)
    texts = errors_of(path, damage.later)
    damage.first(path)
    for where in damage.named:
        (text, *_) = [text for text in texts if any(re.search(each, text) for each in remedies("storage")[where])]
        run(text, path, capsys)
    for part in damage.restored:
        shutil.copytree(source / part, path / part, dirs_exist_ok=True)
    if damage.cut:
        check_known_or_lost(path, given)
    else:
        check_contents(path, given, damage.lost)


def test_a_warning_of_others_that_may_read_a_store_names_what_ends_that(
    sound: tuple[Path, Contents], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(shutil.copytree(sound[0], tmp_path / "store"))
    (path / "nvme").chmod(0o755)
    with caplog.at_level(logging.WARNING), open_store(path):
        (warning,) = [each for each in caplog.messages if COMMAND.search(each)]
    assert any(re.search(each, warning) for each in remedies("storage")[PERMISSIONS])
    run(warning, path, capsys)
    caplog.clear()
    with open_store(path):
        assert not [each for each in caplog.messages if COMMAND.search(each)]


def test_an_error_of_a_store_of_an_older_level_names_what_raises_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_at(FeatureLevel.BASE, tmp_path) as manager, pytest.raises(IllegalOperationError) as raised:
        store_of(manager).named.compare_and_set("name", None, b"value", level=FeatureLevel.BASE)
    assert any(re.search(each, str(raised.value)) for each in remedies("storage")[LEVEL])
    run(str(raised.value), tmp_path, capsys)
    with open_store(tmp_path) as manager:
        store = store_of(manager)
        store.named.compare_and_set("name", None, b"value", level=store.feature_level)


# ---- several losses at once --------------------------------------------------------------------------------------


def lose(*names: str) -> Callable[[Path], None]:
    """Return a harm that loses files or directories, those that match patterns below the store's directory."""

    def harm(path: Path) -> None:
        for name in names:
            for found in sorted(path.glob(name)):
                if found.is_dir():
                    shutil.rmtree(found)
                else:
                    found.unlink()

    return harm


def lose_the_last_log_file(path: Path) -> None:
    for file in files_of(path, "log")[-1:]:
        file.unlink()


MADE_AGAIN: dict[str, Callable[[Path], None]] = {
    "index": lose("ssd/index"),
    "catalog": lose("catalog-*"),
    "watermark": lose("watermark"),
    "cookie": lose("cookie"),
    "cookie of the NVMe tier": lose("nvme/cookie"),
    "cookie of the SSD tier": lose("ssd/cookie"),
    "cookie of the HDD tier": lose("hdd/cookie"),
    "list of directories": lose("directories"),
}
"""Parts that are made again from others."""

ENTRIES_LOST: dict[str, Callable[[Path], None]] = {
    "NVMe tier": lose("nvme"),
    "SSD tier": lose("ssd"),
    "HDD tier": lose("hdd"),
    "log files": lose("nvme/*.log"),
    "last log file": lose_the_last_log_file,
    "cold segments": lose("*/*.cold"),
    "records of the SSD tier": lose("ssd/entries"),
}
LOSSES = MADE_AGAIN | ENTRIES_LOST
COMBINATIONS = [
    names
    for count in (1, 2, 3)
    for names in itertools.combinations(LOSSES, count)
    if not {"watermark", "last log file"} <= {*names}
]
"""Without the watermark nothing says that commits are missing at the end of the log, so that these are left out."""

TRIED = [names for number, names in enumerate(COMBINATIONS) if len(names) == 1 or number % every(13) == 0]


def mend(path: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """Run what the errors of opens name, as it is printed, until the store opens.

    Returns:
        None; or the last text, if it names no command.
    """
    text = ""
    for _ in range(2 * len(LOSSES)):
        if not text:
            try:
                open_store(path).close()
            except PybkError as error:
                text = str(error)
            else:
                return None
        commands = COMMAND.findall(text)
        if not commands:
            return text
        words = shlex.split(commands[-1])[1:]
        if "make an empty directory there" in text:
            for missing in [text.split(" is not there")[0], *(word.partition("=")[2] for word in words if "=" in word)]:
                if missing.startswith(str(path)) and " " not in missing:
                    Path(missing).mkdir(exist_ok=True)
        words += [] if str(path) in words else [str(path)]
        capsys.readouterr()
        status = main(words)
        out, err = capsys.readouterr()
        if status and "give --accept-loss" in out:
            assert "--accept-loss" in text, (text, out)
            assert main([*words, "--accept-loss"]) == 0, capsys.readouterr()
        text = err.removeprefix("pybk: ") if status and "give --accept-loss" not in out else ""
    raise AssertionError(f"the remedies lead in a circle: {text}")


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("names", TRIED, ids=" and ".join)
def test_what_errors_name_opens_a_store_that_lost_several_parts(
    names: tuple[str, ...], sound: tuple[Path, Contents], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, given = sound
    path = Path(shutil.copytree(source, tmp_path / "store"))
    for name in names:
        LOSSES[name](path)
    left = mend(path, capsys)
    if "catalog" in names and {"index", "SSD tier"} & {*names}:
        assert left is not None, "nothing else says which ledgers there are"
        assert re.search(r"restore (it|the \w+) from a backup", left)
        return
    assert left is None
    whole = frozenset(given) if MADE_AGAIN.keys() >= {*names} else frozenset()
    check_known_or_lost(path, given, whole)
    assert not any("run `" in problem.message for problem in verify_store(str(path), password=b"p").problems)


COVERED = frozenset({PERMISSIONS, LEVEL, *(where for damage in DAMAGE.values() for where in damage.named)})
