"""Scenario 28: the secret of the cluster is replaced while bookies are restarted, and clients append and read."""

from __future__ import annotations

import json
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from pybk import LedgerManager, MetadataForgedError, Secret
from pybk.admin.cli.output import FAILED, REFUSED, SOUND
from pybk.metadata.url import open_metadata
from tests.cluster.child import PASSWORD, payload
from tests.cluster.inside import SECRET
from tests.cluster.scenarios.catalog import scenario
from tests.cluster.scenarios.stage import Figures, Stage, stage
from tests.cluster.test_rotation import NEXT, check_that_a_bookie_refuses
from tests.private_files import write_private
from tests.storage.real_store import contents
from tests.waiting import wait_until

BY_FILE: Final = "bookie-4"
"""The bookie that is given a file with the secret, and is not restarted; the others are given variables."""


class Reads:
    """Reads closed ledgers whole, and the ends of open ones, without a pause in a thread; the first error ends it."""

    def __init__(self, it: Stage) -> None:
        self.count = 0
        self.errors: list[BaseException] = []
        self._it, self._client = it, it.cluster.connect()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Reads:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                closed = list(self._it.closed)
                open_ledgers = [writer.ledger_id for writer in self._it.load.writers]
                self._read_closed(closed[self.count % len(closed)])
                self._read_last(open_ledgers[self.count % len(open_ledgers)])
                self.count += 1
        except BaseException as error:  # noqa: BLE001  # it is looked at in the end
            self.errors.append(error)

    def _read_closed(self, ledger_id: int) -> None:
        assert contents(self._client, ledger_id, PASSWORD) == [
            payload(ledger_id, number) for number in range(self._it.closed[ledger_id])
        ]

    def _read_last(self, ledger_id: int) -> None:
        with self._client.open_ledger(ledger_id, password=PASSWORD, recover=False) as reader:
            last = reader.last_add_confirmed
            if last >= 0:
                assert [each.payload for each in reader.read(last, last)] == [payload(ledger_id, last)]

    def more(self) -> None:
        """Wait until more was read than now."""
        before = self.count
        wait_until(lambda: self.count > before + 5 or self.errors, "reads continue")
        assert not self.errors, self.errors


class Rotation:
    """The steps of a rotation on the command line.

    Attributes:
        output: All that commands said.
    """

    def __init__(self, it: Stage, file: Path, reads: Reads) -> None:
        self.output: list[str] = []
        self._it, self._file, self._reads = it, file, reads

    def step(self, *verb: str, status: int = SOUND, says: str = "", file: Path | None = None) -> str:
        """Run ``pybk VERB``, check its exit status, what it says, and that appends, reads and new ledgers continue."""
        return self.tried(*verb, statuses=(status,), says=says, file=file)[1]

    def tried(self, *verb: str, statuses: tuple[int, ...], says: str = "", file: Path | None = None) -> tuple[int, str]:
        """Do as ``step`` does, for a command that may have several results."""
        given = "--cluster-secret-file", str(file or self._file)
        child = self._it.run(*verb, self._it.cluster.url, *given, "--debug")
        status = child.join()
        said = "\n".join([*child.lines, child.complaint()])
        self.output.append(said)
        assert status in statuses, f"pybk {verb} exits with {status}: {said}"
        assert says in said, said
        self._goes_on()
        return status, "\n".join(child.lines)

    def _goes_on(self) -> None:
        self._it.load.more(50)
        self._reads.more()
        self._it.fill(1)

    def status(self) -> dict[str, Any]:
        """Return what ``pybk secret status`` shows."""
        return dict(json.loads(self.step("secret", "status", "--json")))

    def restart(self, names: list[str], **variables: str) -> None:
        """Restart bookies, one after the other, with other variables of their environment."""
        for name in names:
            bookie = self._it.bookie(name)
            bookie.terminate()
            bookie.variables = variables
            bookie.start()
            self._goes_on()

    def retire(self) -> int:
        """Retire the old secret as soon as nothing uses it; return how many tries that took."""
        tries = 1
        while self.tried("secret", "retire", statuses=(SOUND, REFUSED))[0] == REFUSED:
            self.step("secret", "reseal")
            tries += 1
        return tries


@scenario(28, "the secret of the cluster is replaced")
def scenario_28_rotated(directory: Path) -> Figures:
    file = directory / "secrets" / "secret"
    following, place = file.with_name("secret.next"), directory / "cluster"
    file.parent.mkdir()
    write_private(file, SECRET)
    file.chmod(0o600)
    repair = {"grace_s": 60.0}
    with stage(place, ledgers=20, repair=repair, options=("--debug",), given=Secret(file=str(file))) as it:
        it.bookie(BY_FILE).terminate()
        it.bookie(BY_FILE).variables = {"PYBK_CLUSTER_SECRET_FILE": str(file)}
        it.bookie(BY_FILE).start()
        others = sorted(it.cluster.bookies.keys() - {BY_FILE})
        with Reads(it) as reads:
            go = Rotation(it, file, reads)
            go.step("secret", "add", status=FAILED, says="give the cluster's secret and the new one")
            write_private(following, NEXT)
            following.chmod(0o600)
            go.step("secret", "switch", status=FAILED, says="add another one first")
            go.restart(others[1:], PYBK_CLUSTER_SECRET_NEXT=NEXT.decode())
            go.step("secret", "add")
            go.step("secret", "switch", status=REFUSED, says=f"{others[0]} does not have secret 1")
            go.restart(others[:1], PYBK_CLUSTER_SECRET_NEXT=NEXT.decode())
            it.until(lambda: not go.status()["lacking"], "bookies to have the new secret")
            go.step("secret", "switch")
            go.step("secret", "retire", status=REFUSED, says="reseal")
            old = go.status()["old_values"]
            go.step("secret", "reseal")
            tries = go.retire()
            retired = go.status()
            assert (retired["valid"], retired["old_values"]) == ([1], 0), retired
            following.replace(file)
            old_file = file.with_name("old")
            write_private(old_file, SECRET)
            go.step("cluster", "status", status=FAILED, says="which was retired", file=old_file)
            _check_that_the_old_one_is_refused(it, others[-1])
            it.cluster.secret = NEXT
            go.restart(others)
        assert not reads.errors, reads.errors
        appended, values = len(it.load.seconds), _values(it)
        it.until_whole()
        it.check()
        _check_that_nothing_shows(place, [*go.output, *_said(it)], values)
        return {
            "appends": appended,
            "failed": len(it.load.errors),
            "reads": reads.count,
            "longest append ms": it.load.slowest_ms(),
            "values that were resealed": old,
            "tries of retiring": tries,
        }


def _check_that_the_old_one_is_refused(it: Stage, name: str) -> None:
    """Check that a client, a session and the start of a bookie with the old secret are refused."""
    with pytest.raises(MetadataForgedError, match="which was retired"):
        LedgerManager.connect(it.cluster.url, cluster_secret=SECRET)
    check_that_a_bookie_refuses(it.metadata, SECRET)
    bookie = it.bookie(name)
    bookie.terminate()
    bookie.variables = {}
    assert bookie.begin().join() == FAILED, bookie.child.complaint()
    assert "which was retired" in bookie.child.complaint(), bookie.child.complaint()
    it.cluster.secret = NEXT
    bookie.start()


def _said(it: Stage) -> Iterator[str]:
    """Yield what all processes of bookies said."""
    for name in it.cluster.bookies:
        yield from ("\n".join(child.lines) for child in it.bookie(name).children)


def _values(it: Stage) -> list[bytes]:
    """Return the keys and values of the metadata."""
    with closing(open_metadata(it.cluster.url, create=False)) as store:
        return [part for key, node in store.walk() for part in (key.encode(), node.value)]


def _check_that_nothing_shows(directory: Path, said: list[str], values: list[bytes]) -> None:
    """Check that neither secret is in a log, a file of a bookie or of the metadata, a value, or what was printed."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    logs = [path for path in files if path.suffix == ".log"]
    assert any(b"INFO" in path.read_bytes() for path in logs), "nothing was logged"
    places: dict[object, bytes] = {path: path.read_bytes() for path in files}
    places |= {f"output {number}": text.encode() for number, text in enumerate(said)}
    places |= {f"value {number}": value for number, value in enumerate(values)}
    for secret in (SECRET, NEXT):
        for form in (secret, secret.hex().encode(), b64encode(secret)[:-4]):
            assert not [where for where, data in places.items() if form in data], secret
