"""The commands ``pybk spark …``, in the session that runs, and once in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pybk.admin.cli import main, parser_of
from pybk.admin.cli.given_secrets import target_secret_of
from pybk.credentials import Secret
from pybk.errors import UsageError
from pybk.spark.connection import StoreOrCluster, close_connections, connection
from pybk.spark.consumers import QueryConsumer, Selection
from pybk.spark.finished_ledgers import FinishedLedgers
from pybk.spark.sink.manifest import SINK_KEY, Sink, WrittenLedger
from pybk.spark.sink.sink_record import Attempt
from tests.cluster.inside import SECRET, Inside, inside
from tests.cluster.test_seals import rewrite
from tests.paths import ROOT
from tests.private_files import write_private
from tests.spark.jobs.test_jobs import bookie_named, damage, fill, payload
from tests.storage.real_store import contents, open_quick
from tests.waiting import PROCESS_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PASSWORD = b"the password of most ledgers here"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path / "cluster", count=3) as cluster:
        yield cluster
        close_connections()


def secrets_in(directory: Path) -> list[str]:
    """Write secrets to files; return the options that name them."""
    options: list[str] = []
    for option, secret in (("--cluster-secret-file", SECRET), ("--password-file", PASSWORD)):
        file = directory / option.strip("-")
        write_private(file, secret + b"\n")
        options += [option, str(file)]
    return options


class Commands:
    """Runs commands with their secrets in files."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._secrets = secrets_in(directory)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Return status, output and errors."""
        status = main(["spark", *arguments, *self._secrets])
        told = self._capsys.readouterr()
        for secret in (SECRET, PASSWORD):
            assert secret.decode() not in told.out + told.err
        return status, told.out, told.err

    def json(self, *arguments: str) -> tuple[int, dict[str, Any]]:
        """Return status and what was printed as JSON."""
        status, out, _ = self.run(*arguments, "--json")
        return status, json.loads(out)


@pytest.fixture
def commands(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    assert spark.getActiveSession() is not None
    return Commands(tmp_path, capsys)


def test_verify(cluster: Inside, commands: Commands) -> None:
    client = cluster.connect()
    ledger_id = fill(client, 20)
    status, told = commands.json("verify", cluster.url)
    assert (status, told["sound"], told["entries"], told["problems"]) == (0, True, 60, [])
    assert commands.run("verify", cluster.url)[:2] == (
        0,
        f"no problems in 1 ledger, 3 replicas of fragments, 60 entries, {told['bytes']} bytes\n",
    )
    bad = client.ledger_metadata(ledger_id).fragments[0].ensemble[1].bookie_id
    damage(bookie_named(cluster, bad).replicas.store, payload(17))
    status, told = commands.json("verify", cluster.url, "--ledgers", f"{ledger_id}")
    (problem,) = told["problems"]
    assert (status, problem["ledger"], problem["bookie"]) == (1, ledger_id, bad)
    assert problem["damaged"] == [[17, 17, 1]]
    status, out, _ = commands.run("verify", cluster.url)
    assert status == 1
    assert bad in out
    assert "1 problem in 1 ledger, " in out
    status, out, _ = commands.run("verify", cluster.url, "--repair")
    assert status == 0
    assert "1 replicas were repaired" in out


def test_verify_with_the_passwords_of_many_ledgers(cluster: Inside, commands: Commands, tmp_path: Path) -> None:
    client = cluster.connect()
    fill(client, 3)
    other = fill(client, 3, password=b"another", ledger_type="others")
    closed = fill(client, 3)
    write_private(tmp_path / "passwords.toml", b'[types]\nothers = "another"\n')
    arguments = ("verify", cluster.url, "--strict")
    assert commands.run(*arguments)[0] == 1
    status, told = commands.json(*arguments, "--passwords", str(tmp_path / "passwords.toml"))
    assert (status, told["sound"], told["complete"], told["not_opened"]) == (0, True, True, [])
    rewrite(client, closed, seal=b"", last_digest=b"")
    rewrite(client, other, length=1)
    status, out, _ = commands.run("verify", cluster.url, "--ledgers", f"{closed}")
    assert (status, "1 closed ledger without a seal" in out) == (0, True)
    assert commands.run(*arguments, "--ledgers", f"{closed}")[0] == 1
    status, out, _ = commands.run(*arguments, "--passwords", str(tmp_path / "passwords.toml"))
    assert status == 1
    assert f"ledger {other}: the seal is not that of" in out


@pytest.mark.long
def test_tier_and_inventory(cluster: Inside, commands: Commands) -> None:
    client = cluster.connect()
    fill(client, 20, ledger_type="logs")
    other = fill(client, 5, ledger_type="logs", password=b"another")
    status, told = commands.json("tier", cluster.url, "hdd", "--type", "logs", "--older-than", "0s", "--dry-run")
    assert (status, told["ledgers"], told["not_opened"]) == (1, [other - 1], [other])
    status, out, _ = commands.run("tier", cluster.url, "hdd", "--larger-than", "1k", "--ledgers", f"0-{other}")
    assert status == 0
    assert "1 (" in out
    assert "were moved to hdd" in out
    status, told = commands.json("inventory", cluster.url)
    assert status == 0
    assert sorted((row["tier"], row["ledgers"], row["entries"]) for row in told["ledgers"]) == [
        ("hdd", 1, 20),
        ("nvme", 1, 5),
    ]
    assert [row["entries"] for row in told["bookies"]] == [25, 25, 25]
    cluster.bookies[2].close()
    status, out, _ = commands.run("inventory", cluster.url)
    assert status == 1
    assert "2 replicas of fragments under-replicated" in out


@pytest.mark.long
def test_export_import_and_copy(cluster: Inside, commands: Commands, tmp_path: Path) -> None:
    client = cluster.connect()
    ledger_id = fill(client, 20)
    lake = str(tmp_path / "lake")
    status, told = commands.json("export", cluster.url, lake)
    assert (status, told["ledgers"], told["entries"]) == (0, [ledger_id], 20)
    status, _, err = commands.run("export", cluster.url, lake)
    assert status == 2
    assert "already exists" in err.lower()
    assert commands.run("export", cluster.url, lake, "--overwrite")[0] == 0
    with inside(tmp_path / "other", count=3, secret=None) as other:
        target = other.connect()
        status, told = commands.json("copy", cluster.url, other.url, "--quorums", "1,1,1")
        assert (status, told["copied"]) == (0, [ledger_id])
        assert contents(target, told["ledgers"][str(ledger_id)], PASSWORD) == contents(client, ledger_id, PASSWORD)
        assert "0 ledgers of 0 bytes were copied, 1 were there" in commands.run("copy", cluster.url, other.url)[1]
    status, told = commands.json("import", cluster.url, lake)
    assert (status, told["imported"]) == (0, [ledger_id])
    assert contents(client, told["ledgers"][str(ledger_id)], PASSWORD) == contents(client, ledger_id, PASSWORD)


def test_a_secret_of_the_target_that_every_user_may_read_is_refused(tmp_path: Path) -> None:
    file = write_private(tmp_path / "secret", SECRET)
    file.chmod(0o644)
    words = ["spark", "copy", "lmdb:///one", "lmdb:///other", "--target-secret-file", str(file)]
    with pytest.raises(UsageError, match="lets every user of this host read or change it: chmod 600"):
        target_secret_of(parser_of(words).parse_args(words))


def test_orphans_are_collected_without_spark(cluster: Inside, tmp_path: Path) -> None:
    client = cluster.connect()
    orphan = fill(client, 3, custom_metadata={SINK_KEY: b"write-1"})
    other = fill(client, 3)
    secrets = secrets_in(tmp_path)
    program = (
        "import sys\nsys.modules['pyspark'] = None\nfrom pybk.admin.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", program, "spark", "collect", cluster.url, *arguments, *secrets],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=True,
        )
        return done.stdout

    assert run() == "0 ledgers were deleted\n"
    assert set(client.list_ledgers()) == {orphan, other}
    assert json.loads(run("--older-than", "0s", "--json"))["deleted"] == {"write-1": [orphan]}
    assert set(client.list_ledgers()) == {other}


def test_impossible_arguments_are_wrong_usage(commands: Commands, tmp_path: Path) -> None:
    open_quick(tmp_path / "store").close()
    for arguments in (
        ["tier", str(tmp_path / "store"), "hdd"],
        ["verify", str(tmp_path / "store"), "--repair"],
        ["verify", str(tmp_path / "nothing")],
        ["copy", str(tmp_path / "store"), str(tmp_path / "store")],
    ):
        status, out, err = commands.run(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith("pybk: ")
        assert err.count("\n") == 1
    for wrong in (["--ledgers", "x"], ["--ledgers", "1-99999999"], ["--pass", "secret"]):
        with pytest.raises(SystemExit) as ended:
            commands.run("verify", str(tmp_path / "store"), *wrong)
        assert ended.value.code == 2


@pytest.mark.long
def test_a_command_starts_spark_by_itself(spark: SparkSession, tmp_path: Path) -> None:
    with open_quick(tmp_path / "store") as manager:
        fill(manager, 7, password=b"", insecure=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", "pybk.admin", "spark", "verify", str(tmp_path / "store"), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["entries"] == 7


def test_retention_and_consumers_by_commands(
    cluster: Inside, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They need no Spark, so they run without a session."""
    commands = Commands(tmp_path, capsys)
    place = connection(StoreOrCluster(metadata_uri=cluster.url, secret=Secret(SECRET)))
    assert place.metadata is not None
    ids = [fill(place.manager, 3, ledger_type="logs", custom_metadata={SINK_KEY: b"app"}) for _ in range(3)]
    written = [WrittenLedger(each, 3, 1, place.manager.ledger_metadata(each).creation_time_ns) for each in ids]
    assert Sink(place.manager, place.metadata, "app").commit(Attempt(0, written[0].created_ns), written)
    consumer = QueryConsumer(place.metadata, "audit", Selection("logs", None))
    consumer.begin(FinishedLedgers(done=((ids[0], ids[0]),)))

    def of_consumers(*arguments: str) -> tuple[int, str]:
        """Run the command about consumers, which takes no password; return status and output."""
        secret = ("--cluster-secret-file", str(tmp_path / "cluster-secret-file"))
        return main(["spark", "consumers", cluster.url, *arguments, *secret]), capsys.readouterr().out

    status, out = of_consumers("--json")
    told = [(each["name"], each["ledger_type"]) for each in json.loads(out)["consumers"]]
    assert (status, told) == (0, [("audit", "logs")])
    status, out = of_consumers()
    assert (status, "audit" in out, "type 'logs'" in out) == (0, True, True)
    limits = ("--max-age", "0s", "--delete-read")
    assert commands.json("retain", cluster.url, "logs", *limits, "--dry-run")[1]["deleted"] == {"app": ids[:1]}
    assert commands.run("retain", cluster.url, "logs", *limits)[1].endswith("1 ledgers were deleted\n")
    assert commands.run("retain", cluster.url, "logs", *limits)[1] == "0 ledgers were deleted\n"
    assert of_consumers("--forget", "audit") == (0, "consumer audit is forgotten\n")
    assert of_consumers("--forget", "audit")[0] == 2
    assert commands.json("retain", cluster.url, "logs", "--max-bytes", "0")[1]["deleted"] == {"app": ids[1:]}
    assert commands.run("retain", cluster.url, "logs")[0] == 2
    assert commands.run("retain", cluster.url, "logs", "--delete-unread")[0] == 2


def test_without_spark_the_error_names_the_package_to_install(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['pyspark'] = None\n"
        "from pybk.admin.cli import main\n"
        "assert 'pybk.spark' not in sys.modules\n"
        f"sys.exit(main(['spark', 'verify', {str(tmp_path)!r}]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert done.returncode == 2
    assert "pip install 'pybk[spark]'" in done.stderr
    assert "Traceback" not in done.stderr
