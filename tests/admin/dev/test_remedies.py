"""Commands that the page, the command line and reasons of health print as remedies run as they are printed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk import LedgerManager
from pybk.admin.cli import parser_of
from pybk.admin.cli.console import command_of
from pybk.admin.dev.dev_cluster import DevCluster
from pybk.admin.profiles import Profile
from pybk.errors import UsageError
from tests.admin.dev.local import Local, local_cluster
from tests.paths import ROOT
from tests.remedies import COMMAND, remedies
from tests.waiting import wait_until

pytest.importorskip("prometheus_client")

LOOKS = ("cluster status", "cluster check", "repair list", "repair status", "bookie list", "scrub status")
WRONG = 2


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    with local_cluster(tmp_path_factory.mktemp("local"), "3", scaled=True) as found:
        yield found


def commands_of_page() -> tuple[dict[str, str], list[str]]:
    """Return the commands of the page by the code of a reason, and those of a drain."""
    source = (ROOT / "src/pybk/admin/page/app.js").read_text()
    by_code = dict(re.findall(r"(\w+): '([a-z -]+)'", source.partition("COMMANDS = {")[2].partition("}")[0]))
    drains = re.findall(r"'([^']+)'", source.partition("DRAIN_COMMANDS = [")[2].partition("]")[0])
    assert len(by_code) > 15
    assert len(drains) == 2
    return by_code, drains


def codes_of(local: Local) -> set[str]:
    """Return the codes of the reasons for the cluster's verdict."""
    return {each["code"] for each in json.loads(local.get("console", "/api/v1/cluster"))["cluster"]["reasons"]}


def check_remedies(local: Local) -> None:
    """Run each command that is printed in the present state."""
    overview = json.loads(local.get("console", "/api/v1/cluster"))
    by_code, drains = commands_of_page()
    codes = {each["code"] for each in overview["cluster"]["reasons"]}
    shown = [overview["command"].replace("COMMAND", by_code[code]) for code in codes if code in by_code]
    for each in json.loads(local.get("console", "/api/v1/bookies"))["bookies"]:
        if each["state"] == "draining":
            name = each["bookie"]["bookie_id"]
            shown += [f"{overview['command'].replace('COMMAND', word.replace(' NAME', ''))} {name}" for word in drains]
    texts = [each["text"] for each in overview["cluster"]["reasons"]]
    for words in LOOKS:
        done = local.ask("--profile", "dev", *words.split())
        assert done.returncode != WRONG, done.stderr
        texts += [done.stdout, done.stderr]
    named = re.findall(r"`(pybk [^`]+)`", "\n".join(texts))
    for command in [*shown, *(each.replace("pybk ", "pybk --profile dev ", 1) for each in named)]:
        done = local.ask(*shlex.split(command)[1:])
        assert done.returncode != WRONG, (command, done.stderr)


def fill(manager: LedgerManager, count: int) -> None:
    """Make closed ledgers that all three bookies have."""
    for _ in range(count):
        with manager.create_ledger(ensemble_size=3, write_quorum=3, ack_quorum=2, insecure=True) as writer:
            writer.append(b"entry")


@pytest.mark.long
def test_what_is_printed_as_a_remedy_runs(local: Local) -> None:
    with local.connect() as manager:
        fill(manager, 5)
    wait_until(lambda: json.loads(local.get("console", "/api/v1/cluster"))["cluster"]["auditor"], pause_s=0.2)
    check_remedies(local)
    local.run("--profile", "dev", "repair", "pause", "--for", "1h", "--by", "ann")
    wait_until(lambda: "repairs_paused" in codes_of(local), pause_s=0.2)
    check_remedies(local)
    local.run("--profile", "dev", "repair", "resume")
    local.run("dev", "kill", "b3")
    listing = ("--profile", "dev", "repair", "list", "--json")
    wait_until(lambda: json.loads(local.ask(*listing).stdout)["held"]["ledgers"] == 5)
    listed = local.run("--profile", "dev", "repair", "list")
    assert "5 ledgers with too few copies, not queued yet:" in listed
    assert "bookie b3 is absent, and its copies are made elsewhere unless it returns within" in listed
    page = wait_until(lambda: json.loads(local.get("console", "/api/v1/repairs")), "what the console sees")
    assert page["held"] == 5
    assert page["held_because"]
    wait_until(lambda: "bookies_absent" in codes_of(local), pause_s=0.2)
    check_remedies(local)


NAMED = frozenset(
    {
        "admin/profiles.py:Profile.read",
        "admin/dev/members.py:Member.signal",
        "admin/dev/dev_cluster.py:DevCluster.corrupt",
        "admin/dev/dev_cluster.py:DevCluster.purge",
        "admin/dev/dev_cluster.py:DevCluster.start",
        "admin/cli/dev.py:_up",
        "admin/cli/dev.py:_check_same",
    }
)
"""The texts of ``pybk dev`` whose commands ``test_what_dev_prints_as_a_remedy_runs`` runs."""


@pytest.mark.long
def test_what_dev_prints_as_a_remedy_runs(tmp_path: Path) -> None:
    local = Local(tmp_path)
    covered = set[str]()

    def run(where: str, text: str, *more: str) -> None:
        """Run the first command that a text names, which is that of a place in the sources."""
        assert any(re.search(each, text) for each in remedies("")[where]), (where, text)
        covered.add(where)
        local.run(*shlex.split(COMMAND.findall(text)[0])[1:], *more)

    def refused(*words: str) -> str:
        done = local.ask(*words)
        assert done.returncode == WRONG, (words, done.stdout, done.stderr)
        return done.stderr

    try:
        run("admin/profiles.py:Profile.read", refused("dev", "status"), "1", "--any-port")
        run("admin/dev/dev_cluster.py:DevCluster.corrupt", refused("dev", "corrupt", "b1"))
        local.run("dev", "stop", "b1")
        run("admin/dev/members.py:Member.signal", refused("dev", "pause", "b1"))
        local.run("dev", "pause", "b1")
        local.run("dev", "resume", "b1")
        local.run("dev", "wipe", "b1")
        run("admin/dev/dev_cluster.py:DevCluster.start", refused("dev", "start", "b1"))
        run("admin/cli/dev.py:_up", refused("dev", "up", "2"))
        local.run("dev", "up", "2", "--any-port")
        run("admin/cli/dev.py:_check_same", refused("dev", "up", "--zones", "2"))
        local.run("dev", "up", "2", "--any-port", "--zones", "2")
        cluster = DevCluster.found(str(tmp_path / "state" / "pybk" / "dev"))
        with pytest.raises(UsageError) as raised:
            cluster.purge()
        run("admin/dev/dev_cluster.py:DevCluster.purge", str(raised.value))
        assert cluster.purge() == []
    finally:
        local.ask("dev", "purge")
    assert covered == NAMED


def test_the_page_of_a_process_without_a_profile_names_the_file_of_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    url, file = "lmdb:///srv/a b", tmp_path / "secret"
    parsed = parser_of(["console"]).parse_args(["console", url, "--cluster-secret-file", str(file)])
    assert command_of(parsed) == f"pybk COMMAND 'lmdb:///srv/a b' --cluster-secret-file {file}"
    Profile(name="dev", metadata=url).write()
    parsed = parser_of(["console"], "dev").parse_args(["console", "lmdb:///srv/another"])
    assert command_of(parsed) == "pybk COMMAND lmdb:///srv/another"
    parsed = parser_of(["console"], "dev").parse_args(["console", url])
    assert command_of(parsed) == "pybk --profile dev COMMAND"
