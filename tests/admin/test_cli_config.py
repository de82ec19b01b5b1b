"""``pybk config``, and the options of ``pybk bookie``: their table in the documents, tiers, and secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import pytest

from pybk.admin.bookie_options import settings_of
from pybk.admin.cli import main
from pybk.config import StoreConfig
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.options.bookie import OPTIONS, STORE_LEFT_OUT, resolved
from pybk.options.rows import Option
from pybk.options.settings import read_file
from tests.paths import ROOT

SECRET = b"0123456789abcdef0123456789abcdef"

WHOLE = """
[bookie]
directory = "/srv/pybk"
id = "b1"
listen = ["tcp://127.0.0.1:3181"]
rack = "zone/rack"

[cluster]
metadata = "zk://user:hush@zoo-1:2181/ledgers"

[store]
free_bytes_low = "1GiB"
free_bytes_ok = "2GiB"
group = "1000"

[tier]
ssd = ["/mnt/ssd-1", "/mnt/ssd-2"]
hdd = ["/mnt/hdd"]

[log]
format = "json"
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in ("PYBK_CLUSTER_SECRET", "PYBK_CLUSTER_SECRET_FILE", "CREDENTIALS_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)

    def once(*arguments: object) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return once


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "bookie.toml"
    path.write_text(WHOLE, encoding="utf-8")
    return path


def private_file(path: Path, content: bytes = SECRET) -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


def markdown_table(options: Sequence[Option]) -> str:
    lines = ["| flag | variable | key in the file | takes | default | meaning |", "|---|---|---|---|---|---|"]
    for option in options:
        cells = (
            f"`{option.flag}`" if option.flag else "",
            f"`{option.variable}`" if option.variable else "",
            f"`[{option.section}]` `{option.key}`" if option.in_file else "",
            "" if option.once else option.reader.name,
            "needed" if option.required else option.shown_default,
            option.help,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def test_the_documents_have_the_table_of_all_options() -> None:
    document = (ROOT / "docs" / "admin" / "production.md").read_text(encoding="utf-8")
    table = markdown_table(OPTIONS)
    assert table in document, f"put this into docs/admin/production.md:\n{table}"


def test_each_setting_of_a_store_is_an_option_or_left_out_with_a_reason() -> None:
    there = {option.key for option in OPTIONS if option.section == "store"}
    assert there | STORE_LEFT_OUT.keys() == {field.name for field in fields(StoreConfig)}
    assert not there & STORE_LEFT_OUT.keys()
    settings = settings_of({**resolved({}, {}, None)})
    assert settings.config == StoreConfig()


def test_a_file_says_all_that_a_bookie_needs(file: Path) -> None:
    settings = settings_of(
        resolved({"bookie.id": "flag"}, {"PYBK_BOOKIE_RACK": "zone-2"}, read_file(str(file), OPTIONS))
    )
    assert (settings.directory, settings.bookie_id, settings.rack) == ("/srv/pybk", "flag", "zone-2")
    assert settings.tiers == {StorageHint.SSD: ["/mnt/ssd-1", "/mnt/ssd-2"], StorageHint.HDD: ["/mnt/hdd"]}
    assert (settings.config.free_bytes_low, settings.config.group) == (1 << 30, 1000)
    assert (settings.log_format, settings.drain_s, settings.secret) == ("json", 30.0, None)


def test_a_sound_file_is_checked(run: Run, file: Path) -> None:
    assert run("config", "check", file) == (0, f"{file}: 11 options, all of them known and of the right type\n", "")
    status, out, _ = run("config", "check", file, "--json")
    assert (status, json.loads(out)["problems"]) == (0, [])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[bookie]\nlisten = ['nowhere']", "[bookie] listen: 'nowhere' is not an address"),
        ("[bookie]\nrack = 'a/b/c/d'", "[bookie] rack: location"),
        ("[cluster]\nmetadata = 'http://x'", "[cluster] metadata: "),
        ("[store]\nfree_bytes_ok = 1", "[store]: free_bytes_ok 1 is below free_bytes_low"),
        ("[tier]\ntape = ['/x']", "[tier] tape = "),
        ("[tier]\nssd = ['/a', '/b/../a']", "[tier]: tiers[ssd] names /a, which is named before, or is"),
        ("[tier]\nnvme = ['/a']\nhdd = ['/a']", "[tier]: tiers[hdd] names /a, which is named before, or is"),
        ("[bookie]\ndirectory = '/b'\n[tier]\nssd = ['/b']", "[tier]: tiers[ssd] names /b, which is named before, or"),
        (f"[bookie]\nid = '{'x' * 129}'", f"[bookie] id: name '{'x' * 129}' takes a string of 1 to 128 bytes"),
        ("[bookie]\nid = '  '", "[bookie] id: the name '  ' of a bookie takes printable characters, and not blanks"),
        ("[bookie]\nadvertise = ['tcp://0.0.0.0:5']", "[bookie] advertise: tcp://0.0.0.0:5 stands for every address"),
        ("[bookie]\nadvertise = ['tcp://[::]:*']", "[bookie] advertise: tcp://[::]:* stands for every address"),
    ],
)
def test_a_wrong_file_is_refused(run: Run, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(line, encoding="utf-8")
    status, out, err = run("config", "check", path)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"pybk: {path}: {message}")
    assert (
        run("bookie", tmp_path / "b", "--listen", "tcp://127.0.0.1:*", "--metadata", "zk://h/x", "--config", path)[0]
        == 2
    )


def test_each_value_is_shown_with_its_origin(run: Run, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYBK_CLUSTER_SECRET", SECRET.decode())
    monkeypatch.setenv("PYBK_LOG_LEVEL", "debug")
    status, out, err = run("config", "show", "--config", file, "--origin", "--id", "mine")
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["bookie.id"] == ["mine", "--id"]
    assert rows["bookie.rack"] == ["zone/rack", str(file)]
    assert rows["log.level"] == ["debug", "PYBK_LOG_LEVEL"]
    assert rows["store.fill_ratio"] == ["0.85", "default"]
    assert rows["cluster.secret"] == ["(hidden)", "PYBK_CLUSTER_SECRET"]
    assert rows["cluster.metadata"] == ["zk://...@zoo-1:2181/ledgers", str(file)]
    as_json = run("config", "show", "--config", file, "--json")[1]
    assert next(each for each in json.loads(as_json)["options"] if each["option"] == "tier.hdd")["value"] == [
        "/mnt/hdd"
    ]
    for shown in (out, as_json):
        assert SECRET.decode() not in shown
        assert "hush" not in shown


def test_a_secret_comes_from_a_private_file(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYBK_CLUSTER_SECRET", "PYBK_CLUSTER_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    credential = private_file(tmp_path / "cluster-secret")
    systemd = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    found = resolved({}, systemd, None)["cluster.secret_file"]
    assert (found.value, found.origin) == (str(credential), "CREDENTIALS_DIRECTORY")
    secret = settings_of(resolved({}, systemd, None)).secret
    assert secret is not None
    assert secret.read_all() == (SECRET,)
    other = private_file(tmp_path / "other", b"x" * 32)
    by_flag = settings_of(resolved({"cluster.secret_file": str(other)}, systemd, None)).secret
    assert by_flag is not None
    assert by_flag.read() == b"x" * 32
    private_file(tmp_path / "other.next", b"y" * 32)
    assert by_flag.read_all() == (b"x" * 32, b"y" * 32)
    for path, mode in ((other, 0o644), (other, 0o602), (tmp_path / "other.next", 0o644)):
        path.chmod(mode)
        with pytest.raises(UsageError, match=f"its mode 0{mode:o} lets every user .*chmod 600 {path}"):
            by_flag.read_all()
        path.chmod(0o640)
    assert len(by_flag.read_all()) == 2


def test_a_variable_with_a_secret_comes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bookie.toml"
    path.write_text(f'[cluster]\nsecret_file = "{tmp_path}/secret"\n', encoding="utf-8")
    file = read_file(str(path), OPTIONS)
    found = resolved({}, {"PYBK_CLUSTER_SECRET": "x"}, file)
    assert (found["cluster.secret_file"].value, found["cluster.secret"].value) == ("", "x")
    found = resolved({"cluster.secret_file": "f"}, {"PYBK_CLUSTER_SECRET": "x"}, file)
    assert (found["cluster.secret_file"].value, found["cluster.secret"].value) == ("f", None)
    assert resolved({}, {"PYBK_CLUSTER_SECRET_NEXT": "x"}, file)["cluster.secret_file"].value == f"{tmp_path}/secret"


def test_where_a_bookie_stands_may_be_in_a_file(tmp_path: Path) -> None:
    place = tmp_path / "zone"
    place.write_text("zone-1\n", encoding="utf-8")
    assert settings_of(resolved({"bookie.rack_file": str(place)}, {}, None)).rack == "zone-1"
    assert settings_of(resolved({"bookie.rack_file": str(place), "bookie.rack": "mine"}, {}, None)).rack == "mine"
    assert settings_of(resolved({"bookie.rack_file": "/proc/sys/kernel/ostype"}, {}, None)).rack == "Linux"  # of size 0
    with pytest.raises(UsageError, match="is to hold the location of the bookie"):
        settings_of(resolved({"bookie.rack_file": str(tmp_path / "none")}, {}, None))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match=r"cannot be read: .*a FIFO, and not a regular file"):
        settings_of(resolved({"bookie.rack_file": str(tmp_path / "fifo")}, {}, None))


def test_a_hook_for_traces_is_imported_at_the_start_alone(run: Run, file: Path) -> None:
    file.write_text(f'{WHOLE}[trace]\non_span = "pybk.adapters.nowhere:on_span"\n', encoding="utf-8")
    status, out, _ = run("config", "check", file)
    assert (status, out[-32:]) == (0, "all of them known and of the right type\n"[-32:])
    with pytest.raises(UsageError, match=r"\[trace\] on_span: 'pybk\.adapters\.nowhere:on_span' cannot be imported"):
        settings_of(resolved({}, {}, read_file(str(file), OPTIONS)))
    for wrong, message in (
        ("json", "takes MODULE:NAME"),
        ("json:none", "no attribute 'none'"),
        ("string:digits", "it takes a function"),
    ):
        with pytest.raises(UsageError, match=message):
            settings_of(resolved({"trace.on_span": wrong}, {}, None))
    settings = settings_of(resolved({}, {"PYBK_TRACE_ON_SPAN": "json:dumps"}, None))
    hook: object = settings.config.on_span
    assert hook is json.dumps
