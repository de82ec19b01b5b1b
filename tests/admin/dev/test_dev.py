"""``pybk dev``: a cluster of real processes, its profile, and real faults."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pybk import ClusterAdmin
from pybk.admin.cli import main
from pybk.admin.dev import dev_cluster
from pybk.admin.dev.dev_cluster import DevCluster, DevOptions
from pybk.errors import StorageFullError
from tests.admin.dev.local import Commands, Local, local_cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.sampled(one_in=8, using="local")

yaml: Any = pytest.importorskip("yaml")
pytest.importorskip("prometheus_client")

SLOW_MS = 300


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    with local_cluster(tmp_path_factory.mktemp("local"), "3", "--zones=3", "--tiers") as found:
        wait_until(lambda: json.loads(found.ask("--profile", "dev", "cluster", "status", "--json").stdout)["auditor"])
        yield found


def append(local: Local, count: int = 1) -> float:
    """Append entries to a new ledger; return how long the slowest took, seconds."""
    slowest = 0.0
    with local.connect() as client, client.create_ledger(password=b"p") as writer:
        for _ in range(count):
            began = time.monotonic()
            writer.append(b"entry" * 200)
            slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_a_cluster_is_found_by_its_profile(local: Local) -> None:
    found = local.status()
    assert {name: (each["state"], each["zone"]) for name, each in found.items()} == {
        "b1": ("running", "zone-1"),
        "b2": ("running", "zone-2"),
        "b3": ("running", "zone-3"),
        "console": ("running", ""),
    }
    shown = json.loads(local.run("--profile", "dev", "bookie", "list", "--json"))
    assert "zone-2" in json.dumps(shown)
    directory = local.directory / "state" / "pybk" / "dev"
    modes = {name: stat.S_IMODE((directory / name).stat().st_mode) for name in ("cluster-secret", "token", "tokens")}
    assert set(modes.values()) == {0o600}
    secret, token = ((directory / name).read_text() for name in ("cluster-secret", "token"))
    environment = (
        Path(f"/proc/{found['b1']['pid']}/environ").read_text()
        + Path(f"/proc/{found['b1']['pid']}/cmdline").read_text()
    )
    for text in (environment, (directory / "dev.json").read_text(), (directory / "tokens").read_text()):
        assert secret not in text
        assert token not in text


def test_metrics_of_all_processes_can_be_scraped(local: Local) -> None:
    [scrapes] = yaml.safe_load(local.run("dev", "status", "--prometheus"))["scrape_configs"]
    [config] = scrapes["static_configs"]
    assert config["labels"] == {"cluster": "dev"}
    assert config["targets"] == [each["http"].removeprefix("http://") for each in local.status().values()]
    assert 'pybk_registered{store="b2"} 1.0' in local.get("b2", "/metrics").splitlines()
    assert 'store="console"' in local.get("console", "/metrics")
    overview = json.loads(local.get("console", "/api/v1/cluster"))
    assert overview["name"] == "dev"
    assert overview["cluster"]["bookies"] == {"active": 3}


def test_a_bundle_has_the_logs_and_the_metrics_of_all_processes(local: Local, tmp_path: Path) -> None:
    done = json.loads(local.run("--profile", "dev", "support", "bundle", str(tmp_path / "b.tar.gz"), "--json"))
    assert not done["failed"]
    with tarfile.open(tmp_path / "b.tar.gz") as bundle:
        texts = {member.name: bundle.extractfile(member).read() for member in bundle.getmembers()}  # type: ignore[union-attr]
    assert sum(b"pybk_registered" in text for text in texts.values()) == 3
    assert sum("log-" in name for name in texts) == 4


def test_up_and_status_print_where_the_metadata_is(local: Local) -> None:
    url = f"lmdb://{local.directory / 'state' / 'pybk' / 'dev' / 'metadata'}"
    assert f"metadata: {url}" in local.run("dev", "status")
    assert f"metadata: {url}" in local.run("dev", "up")


def test_a_killed_bookie_is_started_again_on_its_port(local: Local) -> None:
    before = local.status()["b2"]
    local.run("dev", "kill", "b2")
    assert local.status()["b2"]["state"] == "stopped"
    assert local.ask("dev", "status").returncode == 1
    refused = local.ask("dev", "pause", "b2")
    assert (refused.returncode, refused.stderr) == (2, "pybk: b2 does not run; `pybk dev start b2` starts it\n")
    local.run("dev", "up")
    after = local.status()["b2"]
    assert (after["state"], after["address"], after["http"]) == ("running", before["address"], before["http"])
    assert after["pid"] != before["pid"]


def test_a_paused_bookie_neither_answers_nor_ends(local: Local) -> None:
    local.run("dev", "pause", "b3")
    assert local.status()["b3"]["state"] == "paused"
    local.run("dev", "resume", "b3")
    assert local.get("b3", "/livez") == "ok\n"


@pytest.mark.long
def test_slow_disks_delay_appends(local: Local) -> None:
    local.run("dev", "slow", "b1", "b2", "--ms", str(SLOW_MS))
    assert "writes take 300 ms longer" in local.run("dev", "status")
    assert append(local) >= SLOW_MS / 1e3, "two of three bookies acknowledge an entry"
    local.run("dev", "slow", "b1", "b2", "--end")
    assert all(not each["faults"] for each in local.status().values())


def test_a_bookie_with_a_full_tier_takes_no_entries_until_there_is_space(local: Local) -> None:
    def codes() -> set[str]:
        return {each["code"] for each in json.loads(local.get("b1", "/api/v1/bookies/self"))["reasons"]}

    local.run("dev", "fill", "b1", "--tier", "hdd")
    wait_until(lambda: "store_full" in codes(), pause_s=0.1)
    local.run("dev", "fill", "b1", "--end")
    wait_until(lambda: "store_full" not in codes(), pause_s=0.1)


def test_flipped_bits_are_damage(local: Local) -> None:
    with local.connect() as client:  # b1 was full a moment ago
        wait_until(lambda: not any(each.read_only for each in ClusterAdmin(client).bookies()), pause_s=0.1)
    append(local, 3)
    local.run("dev", "restart", "b3")
    assert local.run("dev", "corrupt", "b3") == "b3: a bit in 1 record\n"
    directory = str(local.directory / "state" / "pybk" / "dev" / "data" / "b3")
    assert local.ask("store", "verify", directory).returncode == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("slow", "b1", "--ms=-5"), "-5 ms longer; a write can take 0 to 60000 ms longer"),
        (("slow", "b1", "--ms=nan"), "nan ms longer; a write can take 0 to 60000 ms longer"),
        (("corrupt", "b1", "--records=0"), "'0' is not accepted, it takes a whole number from 1"),
        (("corrupt", "b1", "--records=-1"), "'-1' is not accepted, it takes a whole number from 1"),
        (("up", "--zones=2"), "was made without --zones 2; leave that out, or `pybk dev purge` removes the cluster"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(local: Local, words: tuple[str, ...], error: str) -> None:
    before = local.status()
    refused = local.ask("dev", *words)
    assert (refused.returncode, error in refused.stderr) == (2, True), refused.stderr
    assert local.status() == before


def test_processes_import_nothing_of_the_directory_in_which_the_command_runs(local: Local, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this is no module of Python')")
    done = local.ask("dev", "restart", "b3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wiped_bookie_takes_its_name_again_only_if_that_is_said(local: Local) -> None:
    local.run("dev", "wipe", "b2")
    assert not (local.directory / "state" / "pybk" / "dev" / "data" / "b2").exists()
    for words in (("start", "b2"), ("restart", "b2")):  # the first one makes a directory, which is not the lost one
        refused = local.ask("dev", *words)
        assert refused.returncode == 2
        assert "b2 has lost its data; it is refused until you confirm this" in refused.stderr
        assert "`pybk dev start b2 --replace`" in refused.stderr
        assert "`pybk bookie --replace`" not in refused.stderr
    local.run("dev", "start", "b2", "--replace")
    assert local.get("b2", "/livez") == "ok\n"


def test_logs_of_a_process_are_shown(local: Local) -> None:
    lines = local.run("dev", "logs", "b1", "-n", "100").splitlines()
    assert all(line.startswith("b1: ") for line in lines)
    assert any("[bookie.started]" in line for line in lines)
    objects = [json.loads(line) for line in local.run("dev", "logs", "b1", "-n", "1", "--json").splitlines()]
    assert [each.keys() for each in objects] == [{"name", "line"}]


def test_what_it_did_not_make_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config", "state"):
        monkeypatch.setenv(f"XDG_{name.upper()}_HOME", str(tmp_path / name))

    def refused(*words: str) -> str:
        assert main(list(words)) == 2
        return capsys.readouterr().err

    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    assert "has files that `pybk dev up` has not made" in refused("dev", "up", "--directory", str(mine))
    assert "there is no profile 'dev'" in refused("dev", "purge")
    profile = tmp_path / "config" / "pybk" / "profiles" / "dev.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text('metadata = "zk://zoo/production"\n')
    for verb in ("up", "purge", "down"):
        assert "which `pybk dev up` has not made" in refused("dev", verb), verb
    assert "another name" in refused("dev", "up", "--directory", str(tmp_path / "new"))
    profile.write_text(f'metadata = "lmdb://{mine}"\ndirectory = "{mine}"\n')
    for words in (("purge",), ("wipe", "b1"), ("down",)):
        assert "so nothing there is touched" in refused("dev", *words), words
    assert (mine / "file").read_text() == "mine"
    assert not (tmp_path / "new").exists()


def test_a_cluster_that_could_not_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    directory = tmp_path / "new"

    def fail(*_: object, **__: object) -> None:
        assert not (directory / "dev.json").exists(), "it says that all the rest is there"
        raise StorageFullError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(dev_cluster, "open_cluster", fail)
        with pytest.raises(StorageFullError):
            DevCluster.made(str(directory), "dev", DevOptions())
    assert not directory.exists()
    made = DevCluster.made(str(directory), "dev", DevOptions())
    assert DevCluster.found(str(directory)).members == made.members


def test_a_purge_leaves_what_others_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    directory = tmp_path / "new"
    DevCluster.made(str(directory), "dev", DevOptions()).write_profile()
    (directory / "notes").write_text("mine")
    assert main(["dev", "purge"]) == 0
    assert f"{directory} stays, because others have made notes there" in capsys.readouterr().err
    assert [each.name for each in directory.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("words", "text"), [(("0",), "'0' is not accepted"), (("2", "--zones=3"), "3 zones for 2 bookies")]
)
def test_options_that_cannot_be_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    text: str,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with suppress(SystemExit):
        assert main(["dev", "up", "--directory", str(tmp_path / "new"), *words]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.long
def test_a_port_that_is_taken_is_named_and_a_purge_leaves_nothing(tmp_path: Path) -> None:
    commands = Commands(tmp_path)
    with local_cluster(tmp_path, "1") as local:
        port = int(local.status()["b1"]["address"].rpartition(":")[2])
        local.run("dev", "down")
        assert {each["state"] for each in local.status().values()} == {"stopped"}
        with socket.create_server(("127.0.0.1", port)):
            refused = commands.ask("dev", "up")
        assert (refused.returncode, f"port {port} of b1 cannot be used" in refused.stderr) == (2, True)
        local.run("dev", "up")
        assert local.status()["b1"]["state"] == "running"
        os.kill(local.status()["b1"]["pid"], signal.SIGSTOP)
        local.run("dev", "purge")
    assert not (tmp_path / "state" / "pybk" / "dev").exists()
    assert "there is no profile" in commands.ask("dev", "status").stderr


def test_a_cluster_without_the_packages_for_http_runs_without_its_page(tmp_path: Path) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "sitecustomize.py").write_text("import sys\nsys.modules['uvicorn'] = None\n")
    commands = Local(tmp_path)
    commands.environment["PYTHONPATH"] = f"{tmp_path / 'without'}{os.pathsep}{commands.environment['PYTHONPATH']}"
    try:
        said = commands.run("dev", "up", "1", "--any-port")
        assert "there is no page: HTTP takes uvicorn: pip install 'pybk[http]'" in said
        found = commands.status()
        assert {name: (each["state"], each["http"]) for name, each in found.items()} == {
            "b1": ("running", ""),
            "console": ("stopped", ""),
        }
        assert commands.ask("dev", "status").returncode == 0
        done = commands.ask("dev", "start", "console")
        assert done.returncode != 0
        assert "pip install 'pybk[http]'" in done.stderr
    finally:
        commands.run("dev", "purge")
