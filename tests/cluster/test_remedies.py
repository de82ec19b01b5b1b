"""Each command that an error of a bookie, a cluster or its metadata names is run as it is printed.

What was refused works after that, and what was acknowledged is there.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pybk import ClusterAdmin, LedgerManager, Log, StoreConfig
from pybk.admin.profiles import Profile
from pybk.bookie import advertising
from pybk.bookie.advertising import advertised
from pybk.errors import (
    CookieError,
    CorruptError,
    IllegalOperationError,
    MetadataOutdatedError,
    NotEnoughBookiesError,
    PybkError,
    UsageError,
)
from pybk.feature_level import FeatureLevel
from pybk.manager.connect import open_cluster
from tests.bookie import test_advertising
from tests.cluster.inside import SECRET, Inside, inside, make_cluster
from tests.private_files import write_private
from tests.remedies import Cases, Shell
from tests.storage.real_store import QUICK
from tests.waiting import PROCESS_S, wait_until

CASES = Cases()
PASSWORD = b"p"
BOOKIES = 3


def url_of(shell: Shell) -> str:
    return f"lmdb://{shell.path}/metadata"


def directories(shell: Shell) -> list[str]:
    return [str(shell.path / f"bookie-{place}") for place in range(BOOKIES)]


def opened(shell: Shell, place: int) -> LedgerManager:
    """Open a bookie of a cluster that is there."""
    return LedgerManager.open(
        directories(shell)[place],
        listen="tcp://127.0.0.1:*",
        metadata=url_of(shell),
        cluster_secret=SECRET,
        bookie_id=f"bookie-{place}",
        config=StoreConfig(**QUICK),
    )


def refused(shell: Shell, place: int, error: type[PybkError]) -> str:
    """Return why a bookie does not start."""
    with pytest.raises(error) as raised:
        opened(shell, place).close()
    return str(raised.value)


def filled(shell: Shell) -> int:
    """Make a cluster of three bookies with a closed ledger, and close it."""
    with inside(shell.path, count=BOOKIES) as cluster:
        return write(cluster)


def write(cluster: Inside) -> int:
    with cluster.connect().create_ledger(password=PASSWORD) as writer:
        writer.append(b"entry")
    return writer.ledger_id


@contextmanager
def served(shell: Shell, places: Sequence[int] = range(BOOKIES)) -> Iterator[LedgerManager]:
    """Run bookies of a cluster that is there, and return a client."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(opened(shell, place))
        yield stack.enter_context(LedgerManager.connect(url_of(shell), cluster_secret=SECRET))


def check(client: LedgerManager, ledger_id: int) -> None:
    """Check that a ledger has what was acknowledged, and that another one can be made."""
    with client.open_ledger(ledger_id, password=PASSWORD) as reader:
        assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
    with client.create_ledger(password=PASSWORD) as writer:
        assert writer.append(b"entry") == 0


def check_started(shell: Shell, command: str, place: int, ledger_id: int, *more: object) -> None:
    """Start a bookie by a command, and the others, and check what they serve."""
    options = ("--id", f"bookie-{place}", "--metadata", url_of(shell))
    listen = () if "--listen" in more else ("--listen", "tcp://127.0.0.1:*")
    name = f"bookie-{place}"
    with (
        shell.running(command, *more, directories(shell)[place], *options, *listen) as process,
        served(shell, [each for each in range(BOOKIES) if each != place]) as client,
    ):
        wait_for(ClusterAdmin(client), name, process)
        check(client, ledger_id)


def wait_for(admin: ClusterAdmin, name: str, process: subprocess.Popen[str]) -> None:
    """Wait until the bookie of a process is registered."""
    wait_until(lambda: process.poll() is not None or registered(admin, name), pause_s=0.1)
    assert process.poll() is None, process.communicate()


def registered(admin: ClusterAdmin, name: str) -> bool:
    return any(each.name == name and each.registered for each in admin.bookies())


# ---- metadata ----------------------------------------------------------------------------------------------------


def put_back(shell: Shell) -> tuple[int, Path]:
    """Put the metadata back to an older state; returns a ledger, and a newer export."""
    ledger_id, older, newer = filled(shell), shell.path / "older", shell.path / "newer"
    shell.said("metadata", "export", url_of(shell), older, status=0)
    with served(shell):
        pass
    shell.said("metadata", "export", url_of(shell), newer, status=0)
    shutil.rmtree(shell.path / "metadata")
    shell.said("metadata", "restore", url_of(shell), older, "--same-epoch", "--yes", status=0)
    return ledger_id, newer


def check_put_back(shell: Shell, which: int) -> None:
    ledger_id, export = put_back(shell)
    command = shell.commands("metadata/epochs.py:REMEDY", refused(shell, 0, MetadataOutdatedError))[which]
    shell.run(command, "--yes", URL=url_of(shell), FILE=export, DIRECTORY=directories(shell))
    with served(shell) as client:
        check(client, ledger_id)


@CASES.names("metadata/epochs.py:REMEDY")
def metadata_that_were_put_back_are_taken_as_they_are(shell: Shell) -> None:
    check_put_back(shell, 0)


@CASES.names("metadata/epochs.py:REMEDY")
def metadata_that_were_put_back_are_restored(shell: Shell) -> None:
    check_put_back(shell, 1)


@CASES.names("metadata/epochs.py:REMEDY")
def metadata_that_were_put_back_are_made_again(shell: Shell) -> None:
    check_put_back(shell, 2)


@CASES.names("metadata/export.py:read_export")
def a_file_that_is_no_export(shell: Shell) -> None:
    filled(shell)
    file = shell.path / "file"
    file.write_bytes(b"{}\n")
    text = shell.said("metadata", "check", file, status=1)
    shell.run(shell.command("metadata/export.py:read_export", text), url_of(shell), shell.path / "export")
    shell.said("metadata", "check", shell.path / "export", status=0)


@CASES.names("operations/metadata_restore.py:MetadataRestore._note")
def pointers_that_no_bookie_keeps(shell: Shell) -> None:
    with inside(shell.path, count=BOOKIES) as cluster:
        ledger_id = write(cluster)
        with Log.open(cluster.connect(), "log", password=PASSWORD) as log, log.writer() as writer:
            writer.append(b"record")
    shutil.rmtree(shell.path / "metadata")
    rebuild = ("metadata", "rebuild", url_of(shell), *directories(shell), "--all-directories", "--yes")
    text = shell.said(*rebuild, status=0)
    with served(shell) as client:
        shell.run(shell.command("operations/metadata_restore.py:MetadataRestore._note", text), url_of(shell), "log")
        with Log.open(client, "log", create=False, password=PASSWORD) as log:
            assert [each.data for each in log.reader()] == [b"record"]
        check(client, ledger_id)


@CASES.names("bookie/directory_identity.py:DirectoryIdentity.check")
def metadata_that_were_emptied_and_begun_anew(shell: Shell) -> None:
    ledger_id = filled(shell)
    shutil.rmtree(shell.path / "metadata")
    make_cluster(shell.path)
    text = refused(shell, 0, CookieError)
    shutil.rmtree(shell.path / "metadata")
    command = shell.command("bookie/directory_identity.py:DirectoryIdentity.check", text)
    shell.run(command, "--all-directories", "--yes", URL=url_of(shell), DIRECTORY=directories(shell))
    with served(shell) as client:
        check(client, ledger_id)


# ---- directories of bookies --------------------------------------------------------------------------------------


@CASES.names("metadata/registration.py:Bookies.claim_cookie")
def a_directory_that_is_lost(shell: Shell) -> None:
    ledger_id = filled(shell)
    shutil.rmtree(directories(shell)[1])
    command = shell.command("metadata/registration.py:Bookies.claim_cookie", refused(shell, 1, CookieError))
    check_started(shell, command, 1, ledger_id)


@CASES.names("bookie/startup.py:open_replicas")
def a_directory_without_its_index(shell: Shell) -> None:
    ledger_id = filled(shell)
    shutil.rmtree(Path(directories(shell)[1]) / "ssd" / "index")
    _, command = shell.commands("bookie/startup.py:open_replicas", refused(shell, 1, CorruptError))
    shutil.rmtree(directories(shell)[1])
    check_started(shell, command, 1, ledger_id)


@CASES.names("bookie/directory_identity.py:DirectoryIdentity.check_place")
def a_directory_on_another_device(shell: Shell) -> None:
    ledger_id = filled(shell)
    shutil.copytree(directories(shell)[1], shell.path / "copy")
    shutil.rmtree(directories(shell)[1])
    (shell.path / "copy").rename(directories(shell)[1])
    where = "bookie/directory_identity.py:DirectoryIdentity.check_place"
    check_started(shell, shell.command(where, refused(shell, 1, CookieError)), 1, ledger_id)


@CASES.names("bookie/advertising.py:_check_bound", "bookie/advertising.py:_check_not_wildcard")
def an_address_that_stands_for_every_one(shell: Shell) -> None:
    ledger_id = filled(shell)
    with pytest.raises(UsageError) as raised:
        advertised(("tcp://0.0.0.0:*",), ("tcp://0.0.0.0:4000",), ())
    command = shell.command("bookie/advertising.py:_check_not_wildcard", str(raised.value))
    with pytest.raises(UsageError) as raised:
        advertised(("tcp://myhost:*",), ("tcp://127.0.1.1:4000",), ())
    assert shell.command("bookie/advertising.py:_check_bound", str(raised.value)) == command
    check_started(shell, command, 1, ledger_id, "tcp://127.0.0.1:*", "--listen", "tcp://0.0.0.0:*")


@CASES.names("bookie/advertising.py:check_reachable")
def an_address_that_does_not_lead_to_the_bookie(shell: Shell) -> None:
    ledger_id = filled(shell)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(advertising, "REACH_SECONDS", 0.5)
        with pytest.raises(UsageError) as raised:
            test_advertising.bookie(shell.path / "other", "tcp://127.0.0.1:*", advertise="tcp://127.0.0.1:1")
    right, unchecked = shell.commands("bookie/advertising.py:check_reachable", str(raised.value))
    check_started(shell, right, 1, ledger_id, "tcp://127.0.0.1:*")
    with (
        shell.running(
            unchecked,
            *(directories(shell)[0], "--id", "bookie-0", "--metadata", url_of(shell)),
            *("--listen", "tcp://127.0.0.1:*", "--advertise", "tcp://127.0.0.1:1"),
        ) as process,
        LedgerManager.connect(url_of(shell), cluster_secret=SECRET) as client,
    ):
        wait_for(ClusterAdmin(client), "bookie-0", process)


# ---- levels ------------------------------------------------------------------------------------------------------


@CASES.names("metadata/registration.py:Bookies.change_cookie")
def a_cluster_whose_bookies_have_no_states(shell: Shell) -> None:
    with inside(shell.path, count=BOOKIES, level=FeatureLevel.BASE) as cluster:
        ledger_id = write(cluster)
        metadata, _ = open_cluster(cluster.url, SECRET, create=False)
        with metadata, pytest.raises(IllegalOperationError) as raised:
            metadata.change_cookie("bookie-0", lambda cookie: cookie)
        shell.run(shell.command("metadata/registration.py:Bookies.change_cookie", str(raised.value)), URL=cluster.url)
        metadata, _ = open_cluster(cluster.url, SECRET, create=False)
        with metadata:
            assert metadata.change_cookie("bookie-0", lambda cookie: cookie).bookie.bookie_id == "bookie-0"
        check(cluster.connect(), ledger_id)


@CASES.names("metadata/cluster.py:ClusterMetadata.add_secret.added")
def a_cluster_that_knows_one_secret(shell: Shell) -> None:
    file = write_private(shell.path / "secret", SECRET)
    write_private(shell.path / "secret.next", b"the secret that a cluster gets --")
    add = ("secret", "add", url_of(shell), "--cluster-secret-file", file)
    with inside(shell.path, count=BOOKIES, level=FeatureLevel.BASE) as cluster:
        ledger_id = write(cluster)
        text = shell.said(*add)
        command = shell.command("metadata/cluster.py:ClusterMetadata.add_secret.added", text)
        shell.run(command, URL=cluster.url)
        shell.said(*add, status=0)
        check(cluster.connect(), ledger_id)


# ---- what a cluster waits for ------------------------------------------------------------------------------------


@CASES.names("operations/cluster_checks.py:drain_waits")
def a_drain_that_waits_for_a_writer(shell: Shell) -> None:
    with inside(shell.path, count=BOOKIES) as cluster:
        client = cluster.connect()
        Profile(name="here", metadata=cluster.url).write()
        with client.create_ledger(ensemble_size=1, write_quorum=1, ack_quorum=1, password=PASSWORD) as writer:
            writer.append(b"entry")
            admin = ClusterAdmin(client)
            name = writer.metadata.fragments[-1].ensemble[0].bookie_id
            text = "\n".join(admin.drain(name).waits)
            shown = shell.run(shell.command("operations/cluster_checks.py:drain_waits", text))
            assert str(writer.ledger_id) in shown.split()
        assert not any("writers" in each for each in admin.drain_progress(name).waits)


@CASES.names("operations/cluster_checks.py:_status")
def a_loss_that_was_accepted_of_a_bookie_that_runs_again(shell: Shell) -> None:
    with inside(shell.path, count=BOOKIES) as cluster:
        Profile(name="here", metadata=cluster.url).write()
        cluster.bookies[1].close()
        shell.said("repair", "resume", cluster.url, "--accept-loss-of", "bookie-1", status=0)
        cluster.open_bookie(1)
        text = shell.said("cluster", "status", cluster.url, status=1)
        shell.run(shell.command("operations/cluster_checks.py:_status", text))
        assert "runs again" not in shell.said("cluster", "status", cluster.url, status=1)


@CASES.names("client/membership.py:Membership._lacking", "client/membership.py:Membership._remedies")
def an_ensemble_that_lacks_a_bookie_that_is_drained(shell: Shell) -> None:
    with inside(shell.path, count=BOOKIES) as cluster:
        client = cluster.connect()
        ClusterAdmin(client).drain("bookie-1", wait_s=PROCESS_S)
        wait_until(lambda: "bookie-1 read-only: it is drained" in lacking(client))
        text = lacking(client)
        _, status = shell.commands("client/membership.py:Membership._lacking", text)
        assert "the cluster is warn" in shell.run(status, status=1, URL=cluster.url)
        end = shell.command("client/membership.py:Membership._remedies", text)
        shell.run(end, URL=cluster.url, NAME="bookie-1")
        wait_until(lambda: not lacking(client))


def lacking(client: LedgerManager) -> str:
    """Return why no ledger that needs all bookies can be made; nothing if one can."""
    try:
        client.create_ledger(ensemble_size=BOOKIES, write_quorum=BOOKIES, ack_quorum=BOOKIES, password=PASSWORD).close()
    except NotEnoughBookiesError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_a_remedy_that_an_error_names_works(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    monkeypatch.setenv("PYBK_PASSWORD", PASSWORD.decode())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if name in ("a_drain_that_waits_for_a_writer", "a_loss_that_was_accepted_of_a_bookie_that_runs_again"):
        monkeypatch.setenv("PYBK_PROFILE", "here")
    CASES.check(name, Shell(tmp_path, capsys))
