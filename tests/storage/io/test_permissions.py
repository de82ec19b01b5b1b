"""Files belong to their owner: modes of what is made, shared groups, warnings, and the command that narrows."""

from __future__ import annotations

import errno
import fcntl
import grp
import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.config import StoreConfig
from pybk.errors import StoreLockedError, UsageError
from pybk.flags import StorageHint
from pybk.manager.ledger_manager import LedgerManager
from pybk.metadata.lmdb_store import LmdbMetadataStore
from pybk.metadata.url import open_metadata
from pybk.storage.io.filesystem import OsFileSystem
from pybk.storage.io.permissions import Access, access_of

NOBODY = 65_534
GROUP = 4_242
"""A group that need not have a name: root may give files to it."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving up privileges takes root")


@pytest.fixture(params=(0o000, 0o022, 0o077))
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def modes(*roots: Path) -> dict[str, set[int]]:
    """Return the permission bits of all directories and files below, by kind."""
    found: dict[str, set[int]] = {"directories": set(), "files": set()}
    for root in roots:
        for path in (root, *root.rglob("*")):
            kind = "directories" if path.is_dir() else "files"
            found[kind].add(stat.S_IMODE(path.lstat().st_mode))
    return found


def groups(*roots: Path) -> set[int]:
    return {path.lstat().st_gid for root in roots for path in (root, *root.rglob("*"))}


def write_store(path: Path, **options: object) -> None:
    """Make a store that has a file of every kind: log files, a checkpoint, the SSD tier, a cold segment."""
    config = StoreConfig(free_bytes_low=0, free_bytes_ok=0, **options)  # type: ignore[arg-type]
    with LedgerManager.open(path, config=config) as manager:
        for tier in StorageHint:
            with manager.create_ledger(password=b"x", storage_hints=[tier]) as writer:
                for n in range(8):
                    writer.append(b"payload %d" % n)
            manager.move_ledger(writer.ledger_id, tier, password=b"x")
        with manager.create_ledger(password=b"x") as writer:
            writer.append(b"in the log")


def as_nobody(call: Callable[[], object]) -> int | None:
    """Run a call in a child that is another user; returns the number of its OSError, None if it raised none."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            try:
                call()
                os.write(write, b"0")
            except OSError as error:
                os.write(write, str(error.errno).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        answer = answers.read()
    os.waitpid(pid, 0)
    assert answer, "the child ended without an answer"
    return int(answer) or None


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users can reach, which pytest's are not: each session of it closes their parent again."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)
        yield Path(directory)


# ---- what is made ------------------------------------------------------------------------------------------------


def test_everything_in_a_new_store_belongs_to_its_owner_alone(tmp_path: Path, umask: int) -> None:
    write_store(tmp_path / "new" / "store")
    assert modes(tmp_path / "new") == {"directories": {0o700}, "files": {0o600}}
    suffixes = {path.suffix for path in tmp_path.rglob("*")}
    assert {".log", ".cold", ".mdb"} <= suffixes


def test_a_tier_directory_that_exists_keeps_its_mode_and_gets_private_files(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    slow.chmod(0o755)
    LedgerManager.open(tmp_path / "store", tiers={StorageHint.HDD: str(slow)}).close()
    assert modes(slow) == {"directories": {0o755}, "files": {0o600}}


def test_everything_in_a_new_metadata_store_belongs_to_its_owner_alone(tmp_path: Path, umask: int) -> None:
    tree = open_metadata(f"lmdb://{tmp_path}/new/metadata")
    tree.create("a/b", b"value", leased=True)
    assert modes(tmp_path / "new") == {"directories": {0o700}, "files": {0o600}}
    tree.close()


def test_a_rebuilt_index_is_private(tmp_path: Path, umask: int) -> None:
    write_store(tmp_path / "store")
    assert main(["rebuild-index", str(tmp_path / "store")]) == 0
    assert modes(tmp_path / "store") == {"directories": {0o700}, "files": {0o600}}


# ---- other users -------------------------------------------------------------------------------------------------


@as_root
def test_another_user_can_neither_read_payloads_nor_take_a_lock(reachable: Path) -> None:
    """Even where the main directory was made by somebody who let others in."""
    store, metadata = reachable / "store", reachable / "metadata"
    for directory in (store, metadata):
        directory.mkdir()
    write_store(store)
    LmdbMetadataStore(str(metadata)).close()
    for directory in (store, metadata):
        directory.chmod(0o755)

    def opens(path: Path, flags: int = os.O_RDONLY) -> Callable[[], object]:
        return lambda: os.open(path, flags)

    def locks(path: Path) -> Callable[[], object]:
        return lambda: fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)

    payloads = [path for path in store.rglob("*") if path.suffix in (".log", ".cold", ".mdb")]
    assert payloads
    for path in payloads:
        assert as_nobody(opens(path)) == errno.EACCES
    for path in (store / "LOCK", metadata / "sessions", metadata / "lock.mdb"):
        assert as_nobody(locks(path)) == errno.EACCES
        assert as_nobody(opens(path, os.O_RDWR)) == errno.EACCES
    assert as_nobody(lambda: OsFileSystem().lock(str(store / "LOCK"))) == errno.EACCES
    LedgerManager.open(store).close()


def test_another_process_of_the_owner_reads_while_the_writer_runs(tmp_path: Path) -> None:
    with LedgerManager.open(tmp_path / "store") as manager, manager.create_ledger(password=b"x") as writer:
        writer.append(b"seen")
        script = (
            "import sys; from pybk import LedgerManager\n"
            "with LedgerManager.open(sys.argv[1], read_only=True) as manager:\n"
            "    with manager.open_ledger(int(sys.argv[2]), password=b'x', recover=False) as reader:\n"
            "        print(reader.read_last_add_confirmed())\n"
        )
        found = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "store"), str(writer.ledger_id)],
            capture_output=True,
            text=True,
            check=True,
        )
    assert found.stdout.strip() == "0"


# ---- groups ------------------------------------------------------------------------------------------------------


@as_root
def test_a_shared_store_belongs_to_its_group(tmp_path: Path, umask: int) -> None:
    write_store(tmp_path / "store", group=GROUP)
    assert modes(tmp_path / "store") == {"directories": {0o2770}, "files": {0o660}}
    assert groups(tmp_path / "store") == {GROUP}


def test_a_store_shared_with_a_group_of_the_process_has_the_modes_of_a_shared_one(tmp_path: Path) -> None:
    write_store(tmp_path / "store", group=os.getegid())
    assert modes(tmp_path / "store") == {"directories": {0o2770}, "files": {0o660}}


@as_root
def test_a_shared_store_stays_shared_for_every_opener(tmp_path: Path) -> None:
    write_store(tmp_path / "store", group=GROUP)
    write_store(tmp_path / "store")
    assert main(["rebuild-index", str(tmp_path / "store")]) == 0
    assert modes(tmp_path / "store") == {"directories": {0o2770}, "files": {0o660}}
    assert groups(tmp_path / "store") == {GROUP}


@as_root
def test_members_of_a_group_use_one_store_and_one_metadata_store(reachable: Path) -> None:
    write_store(reachable / "store", group=GROUP)
    open_metadata(f"lmdb://{reachable}/metadata?group={GROUP}").close()
    assert modes(reachable / "metadata") == {"directories": {0o2770}, "files": {0o660}}
    script = (
        "import os, sys\n"
        "from pybk import LedgerManager\n"
        "from pybk.metadata.url import open_metadata\n"
        # After all imports, and those of first uses, as another user may be unable to read Python's library.
        "with LedgerManager.open(sys.argv[2] + '/first') as manager, manager.create_ledger(password=b'x') as writer:\n"
        "    writer.append(b'')\n"
        "open_metadata('lmdb://' + sys.argv[2] + '/first/metadata').close()\n"
        "os.setgroups([int(sys.argv[1])]); os.setgid(65534); os.setuid(65534)\n"
        "with LedgerManager.open(sys.argv[2] + '/store') as manager, manager.create_ledger(password=b'x') as writer:\n"
        "    writer.append(b'of a member')\n"
        "tree = open_metadata('lmdb://' + sys.argv[2] + '/metadata')\n"
        "tree.create('of/member', b'value', leased=True)\n"
        "tree.close()\n"
        "print(writer.ledger_id)\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(GROUP), str(reachable)], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    with (
        LedgerManager.open(reachable / "store") as manager,
        manager.open_ledger(int(found.stdout), password=b"x") as reader,
    ):
        assert [entry.payload for entry in reader.read(0, 0)] == [b"of a member"]
    assert modes(reachable / "store") == {"directories": {0o2770}, "files": {0o660}}
    assert groups(reachable / "store") == {GROUP}


def test_an_unknown_group_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no group 'no-such-group' on this host"):
        LedgerManager.open(tmp_path / "store", config=StoreConfig(group="no-such-group"))
    with pytest.raises(UsageError, match="there is no group"):
        open_metadata(f"lmdb://{tmp_path}/metadata?group=no-such-group")
    assert not any(tmp_path.iterdir())


def test_a_group_without_this_user_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    with pytest.raises(UsageError, match=f"is not a member of group {GROUP}"):
        LedgerManager.open(tmp_path / "store", config=StoreConfig(group=GROUP))
    with pytest.raises(UsageError, match=f"is not a member of group {GROUP}"):
        open_metadata(f"lmdb://{tmp_path}/metadata?group={GROUP}")
    assert not any(tmp_path.iterdir())


def test_a_group_is_known_by_its_name_and_by_its_number(tmp_path: Path) -> None:
    mine = grp.getgrgid(os.getegid())
    assert access_of(str(tmp_path / "LOCK"), mine.gr_name) == Access(mine.gr_gid)
    assert access_of(str(tmp_path / "LOCK"), str(mine.gr_gid)) == Access(mine.gr_gid)
    assert access_of(str(tmp_path / "LOCK"), mine.gr_gid) == Access(mine.gr_gid)


@pytest.mark.parametrize("group", ["", True, 1.5, b"staff"])
def test_a_group_that_cannot_be_one_is_refused(group: object) -> None:
    with pytest.raises(UsageError, match="group is"):
        StoreConfig(group=group)  # type: ignore[arg-type]


# ---- what exists keeps its mode ----------------------------------------------------------------------------------


def widen(root: Path) -> None:
    """Give a store the modes that versions before these permissions gave."""
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_an_open_changes_no_modes_and_names_the_wider_ones_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    write_store(store)
    widen(store)
    before = {path: path.stat().st_mode for path in store.rglob("*")}
    caplog.clear()
    with LedgerManager.open(store):
        pass
    (warning,) = [record.getMessage() for record in caplog.records if "open to more users" in record.getMessage()]
    for path in (store, store / "LOCK", store / "nvme", store / "ssd", store / "hdd"):
        assert f"{path} (" in warning
    assert f"`pybk permissions {store} --narrow`" in warning
    after = {path: path.stat().st_mode for path in store.rglob("*")}
    assert {path: mode for path, mode in after.items() if before.get(path, mode) != mode} == {}


def test_an_open_of_a_private_store_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_store(tmp_path / "store")
    write_store(tmp_path / "store")
    open_metadata(f"lmdb://{tmp_path}/metadata").close()
    assert not [record for record in caplog.records if "open to more users" in record.getMessage()]


def test_opening_a_metadata_store_that_others_can_open_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metadata = tmp_path / "metadata"
    LmdbMetadataStore(str(metadata)).close()
    widen(metadata)
    LmdbMetadataStore(str(metadata)).close()
    (warning,) = [record.getMessage() for record in caplog.records if "open to more users" in record.getMessage()]
    assert f"{metadata / 'sessions'} (0644)" in warning
    assert f"`pybk permissions lmdb://{metadata} --narrow`" in warning


# ---- the command -------------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    status = main(["permissions", *arguments, "--json"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return status, found


def test_the_command_shows_and_narrows_and_then_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    write_store(store)
    widen(store)
    (store / "notes.txt").touch(0o644)
    status, found = shown(capsys, str(store))
    assert (status, found["narrowed"]) == (1, False)
    assert modes(store) == {"directories": {0o755}, "files": {0o644}}
    assert main(["permissions", str(store), "--narrow"]) == 0
    out = capsys.readouterr().out
    assert f"{store / 'LOCK'}: 0644" in out
    assert "changed to 0600" in out
    assert stat.S_IMODE((store / "notes.txt").stat().st_mode) == 0o644, "the file is not pybk's"
    (store / "notes.txt").unlink()
    assert modes(store) == {"directories": {0o700}, "files": {0o600}}
    for arguments in ([str(store)], [str(store), "--narrow"]):
        status, found = shown(capsys, *arguments)
        assert (status, found["differences"]) == (0, [])
    with LedgerManager.open(store) as manager:
        assert len(list(manager.list_ledgers())) == 4


def test_the_command_narrows_a_metadata_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = tmp_path / "metadata"
    LmdbMetadataStore(str(metadata)).close()
    widen(metadata)
    assert shown(capsys, f"lmdb://{metadata}")[0] == 1
    assert shown(capsys, f"lmdb://{metadata}", "--narrow")[0] == 0
    assert modes(metadata) == {"directories": {0o700}, "files": {0o600}}
    assert shown(capsys, f"lmdb://{metadata}") == (
        0,
        {"schema": 1, "path": str(metadata), "group": None, "narrowed": False, "differences": []},
    )


@as_root
def test_the_command_shares_a_store_and_makes_it_private_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    write_store(store)
    assert shown(capsys, str(store), "--narrow", "--group", str(GROUP))[0] == 0
    assert modes(store) == {"directories": {0o2770}, "files": {0o660}}
    assert groups(store) == {GROUP}
    status, found = shown(capsys, str(store))
    assert (status, found["group"], found["differences"]) == (0, str(GROUP), [])
    write_store(store)
    assert modes(store) == {"directories": {0o2770}, "files": {0o660}}
    assert shown(capsys, str(store), "--narrow")[0] == 0
    assert modes(store)["files"] == {0o600}
    assert not any(mode & 0o077 for mode in modes(store)["directories"])


def test_the_command_changes_no_store_that_is_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    with LedgerManager.open(store):
        widen(store)
        assert shown(capsys, str(store))[0] == 1
        assert main(["permissions", str(store), "--narrow"]) == 4
        assert "locked by this very process" in capsys.readouterr().err
    assert modes(store)["directories"] == {0o755}


def test_the_command_leaves_links_alone_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a directory that others could write, a link may lead to a file that is not the store's."""
    store, other = tmp_path / "store", tmp_path / "other"
    write_store(store)
    other.touch(0o644)
    os.link(other, store / "cookie.hard")
    (store / "cookie.soft").symlink_to(other)
    assert main(["permissions", str(store), "--narrow"]) == 1
    out = capsys.readouterr().out
    assert "cookie.hard: 0644" in out
    assert "it has 2 hard links" in out
    assert "a symbolic link is not followed" in out
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


@as_root
def test_the_command_does_not_lock_the_owner_out_of_files_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    write_store(store)
    widen(store)
    os.chown(store / "watermark", NOBODY, -1)
    assert main(["permissions", str(store), "--narrow"]) == 1
    assert "watermark: 0644 of group root, not changed: it belongs to user nobody, not to root" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize("place", ["nothing", "lmdb:///no/such/place", "zk://127.0.0.1:1/x"])
def test_the_command_takes_nothing_but_stores_and_lmdb_metadata(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Nobody is there, so the time-out runs out.
    monkeypatch.setattr("pybk.admin.cli.permissions.open_metadata", partial(open_metadata, timeout_s=0.5))
    assert main(["permissions", place, "--narrow"]) == (4 if place.startswith("zk") else 2)
    assert capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_two_opens_share_no_lock_whatever_made_it(tmp_path: Path) -> None:
    path = str(tmp_path / "LOCK")
    lock = OsFileSystem().lock(path)
    with pytest.raises(StoreLockedError):
        OsFileSystem(Access(os.getegid())).lock(path)
    lock.release()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
