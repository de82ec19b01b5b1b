"""Walks through runbooks: the commands are read from the document, and a walk has to run each that its runbook names.

A test ``test_NAME`` with the fixture ``walk`` walks through the runbook ``Name``. It makes the fault, runs the
commands, and waits until what the runbook calls done is true. Bookies are processes; commands run in this process,
because the start of Python would take most of the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from urllib.error import HTTPError

import pytest

from pybk import BookieStatus, ClusterAdmin, LedgerManager
from pybk.admin.cli import main
from pybk.admin.profiles import Profile
from pybk.ledger.ledger_metadata import Bookie
from pybk.metadata import authenticated_values
from pybk.operations import cluster_admin as cluster_admin_module
from tests.admin.dev.local import Local, local_cluster
from tests.paths import ROOT
from tests.waiting import wait_until

TEXT = (ROOT / "docs" / "admin" / "runbooks.md").read_text(encoding="utf-8")
RUNBOOKS = dict(re.findall(r"^### (.+?)\n(.*?)(?=^##|\Z)", TEXT, re.MULTILINE | re.DOTALL))
PASSWORD = b"the password of the ledgers"
PAYLOAD = b"entry" * 100
PAUSE_S = 0.1
REPAIR_S = 200.0


def commands_in(text: str) -> list[str]:
    """Return the commands in a text, each without ``pybk``."""
    return [" ".join(found.split()) for found in re.findall(r"`pybk ([a-z][^`]*)`", text)]


def slug(name: str) -> str:
    """Return the name of a runbook as that of a test has it."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|\W+", "_", name).lower()


def pybk(*words: str, status: int | tuple[int, ...] = 0) -> str:
    """Run ``pybk --profile dev``, check its exit status, and return what it prints."""
    said = StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        found = main(["--profile", "dev", *words])
    assert found in (status if isinstance(status, tuple) else (status,)), (words, found, said.getvalue())
    return said.getvalue()


class Walk:
    """A walk through one runbook.

    Args:
        text: Its text.

    Attributes:
        left: The commands that it names, and that were not run yet.
    """

    def __init__(self, text: str) -> None:
        self._commands = commands_in(text)
        self.left = set(self._commands)

    def __call__(self, begins: str, *, status: int | tuple[int, ...] = 0, yes: bool = False, **values: object) -> str:
        """Run a command of the runbook.

        Args:
            begins: The words with which it begins.
            status: Its exit status, or those that it may have.
            yes: Whether its question is answered with yes.
            values: What stands for the words in capitals, such as NAME.

        Returns:
            What it prints.
        """
        [command] = {each for each in self._commands if f"{each} ".startswith(f"{begins} ")}
        self.left.discard(command)
        words = []
        for word in command.split():
            placeholder = word.removesuffix("...")
            given = str(values[placeholder]) if re.fullmatch(r"[A-Z]+", placeholder) else word
            words += given.split()
        return pybk(*words, *(["--yes"] if yes else []), status=status)


@pytest.fixture
def walk(request: pytest.FixtureRequest) -> Iterator[Walk]:
    """The walk through the runbook that the test is named after; all of its commands have to be run."""
    [text] = [text for name, text in RUNBOOKS.items() if f"test_{slug(name)}" == request.function.__name__]
    made, failed = Walk(text), request.session.testsfailed
    yield made
    if request.session.testsfailed == failed:
        assert not made.left, "the runbook names commands that were not run"


class Cluster:
    """A local cluster of four bookies, b1 to b4.

    Attributes:
        local: Its processes.
        client: A client.
        admin: What looks at it while something is waited for.
        profile: Its URL, secret and directory.
    """

    NAMES = ("b1", "b2", "b3", "b4")

    def __init__(self, local: Local, client: LedgerManager) -> None:
        self.local = local
        self.client = client
        self.admin = ClusterAdmin(client)
        self.profile = Profile.read("dev")

    def dev(self, *words: str) -> None:
        """Make a fault, or end it."""
        self.local.run("dev", *words)

    def directory(self, name: str) -> Path:
        """Return the directory of a bookie."""
        return Path(self.profile.directory, "data", name)

    @contextmanager
    def settings(self, **repair: object) -> Iterator[None]:
        """Have other settings of repairs during a block."""
        found = self.admin.settings().repair
        before = {name: getattr(found, name) for name in repair}

        def put(values: dict[str, object]) -> None:
            words = [f"repair.{name}={str(value).lower()}" for name, value in values.items()]
            pybk("cluster", "settings", "set", *words)

        put(repair)
        yield
        put(before)

    # ---- ledgers -------------------------------------------------------------------------------------------------

    def append(self, count: int = 3, bookies: int = 3) -> list[int]:
        """Write closed ledgers to so many of the bookies each; return their ids."""
        made = []
        for _ in range(count):
            with self.client.create_ledger(password=PASSWORD, ensemble_size=bookies) as writer:
                writer.append(PAYLOAD)
            made.append(writer.ledger_id)
        return made

    def append_until(self, holds: Callable[[list[str]], bool]) -> int:
        """Write closed ledgers to three bookies each until one has bookies that fit; return it."""
        while not holds(self.holders(ledger_id := self.append(1)[0])):
            pass
        return ledger_id

    def holders(self, ledger_id: int) -> list[str]:
        """Return the bookies of a ledger."""
        return [each.bookie_id for each in self.ensemble(ledger_id)]

    def ensemble(self, ledger_id: int) -> tuple[Bookie, ...]:
        """Return the bookies of a ledger, with their instances."""
        return tuple(self.client.ledger_metadata(ledger_id).fragments[-1].ensemble)

    def naming(self, name: str) -> list[int]:
        """Return the ledgers that name a bookie."""
        found = (self.client.ledger_metadata(each.ledger_id) for each in self.client.ledgers())
        return [
            each.ledger_id
            for each in found
            if name in {bookie.bookie_id for fragment in each.fragments for bookie in fragment.ensemble}
        ]

    def check(self, ledger_id: int) -> None:
        """Check that what was written to a ledger can be read."""
        with self.client.open_ledger(ledger_id, password=PASSWORD) as reader:
            assert [entry.payload for entry in reader.read(0, 0)] == [PAYLOAD]

    # ---- looks ---------------------------------------------------------------------------------------------------

    def codes(self) -> set[str]:
        """Return the codes of the reasons of the cluster's status."""
        return {each.code for each in self.admin.status().reasons}

    def bookie(self, name: str) -> BookieStatus:
        """Return what is known of a bookie."""
        return next(each for each in self.admin.bookies() if each.name == name)

    def is_ready(self, name: str) -> bool:
        """Return whether a bookie says that it is ready."""
        try:
            return self.local.get(name, "/readyz") == "ok\n"
        except (HTTPError, OSError):
            return False

    def is_whole(self) -> bool:
        """Return whether all bookies run, and all ledgers have all copies."""
        status = self.admin.status()
        return (
            bool(status.auditor) and not status.absent and not any(status.short.values()) and not self.admin.repairs()
        )

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds; the error has how the cluster is instead."""
        try:
            wait_until(condition, seconds=REPAIR_S, pause_s=PAUSE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.admin.status()}; {self.admin.repairs()}") from error

    def until_whole(self) -> None:
        """Wait until the cluster is whole."""
        self.until(self.is_whole)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that the walks of a module share; each walk leaves it whole."""
    directory = tmp_path_factory.mktemp("runbooks")
    with pytest.MonkeyPatch.context() as patch, local_cluster(directory, "4", scaled=True) as local:
        patch.setenv("XDG_CONFIG_HOME", local.environment["XDG_CONFIG_HOME"])
        patch.setenv("PYBK_PASSWORD", PASSWORD.decode())
        patch.setattr(authenticated_values, "SECRETS_AGE_SECONDS", 1.0)
        patch.setattr(cluster_admin_module, "REQUESTS_SECONDS", 1.0)
        with local.connect() as client:
            found = Cluster(local, client)
            patch.setenv("PYBK_CLUSTER_SECRET_FILE", found.profile.secret_file)
            pybk("cluster", "settings", "set", "repair.grace_s=1", "repair.surplus_delay_s=1")
            wait_until(lambda: found.admin.status().auditor, pause_s=PAUSE_S)
            found.append()
            yield found
