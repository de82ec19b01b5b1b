"""Profiles: what stands for the PATH of a cluster that is left out."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from pybk.admin.cli import main, parser_of
from pybk.admin.profiles import Profile, path_of
from pybk.errors import UsageError

URL = "zk://zoo:2181/pybk"


@pytest.fixture(autouse=True)
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("PYBK_PROFILE", raising=False)
    found = Profile(name="here", metadata=URL, secret_file="/secret")
    found.write()
    return found


def parsed(*words: str) -> tuple[str, str | None]:
    found = parser_of([words[0]], "here").parse_args(list(words))
    return found.path, found.cluster_secret_file


def test_a_profile_is_for_its_owner_alone(profile: Profile) -> None:
    assert Profile.read("here") == profile
    assert stat.S_IMODE(Path(path_of("here")).stat().st_mode) == 0o600


def test_the_profile_stands_for_a_path_that_is_left_out() -> None:
    assert parsed("cluster", "status") == (URL, "/secret")
    assert parsed("bookie", "drain", "b1", "--wait") == (URL, "/secret")
    assert parsed("bookie", "ok-to-stop", "b1", "b2") == (URL, "/secret")
    assert parsed("ledger", "list", "--json") == (URL, "/secret")
    assert parsed("metadata", "export", "/backup/metadata") == (URL, "/secret")
    assert parsed("metadata", "check", "--json") == (URL, "/secret")
    assert parsed("cluster", "status", "--cluster-secret-file", "mine") == (URL, "mine")


def test_a_path_that_is_given_counts(tmp_path: Path) -> None:
    assert parsed("cluster", "status", "--json", "lmdb:///other") == ("lmdb:///other", None)
    assert parsed("ledger", "list", str(tmp_path)) == (str(tmp_path), None)
    assert parsed("metadata", "check", "export") == ("export", None)
    assert parser_of(["store"], "here").parse_args(["store", "verify", "there"]).path == "there"


def test_a_directory_that_is_another_argument_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("store", "target"):
        (tmp_path / name).mkdir()
    for words in (("target",), ("--password-file", "store", "target"), ("--dry-run", "target")):
        assert parsed("backup", "make", *words) == (URL, "/secret"), words
    assert parsed("backup", "make", "--password-file", "p", "store", "--dry-run", "target") == ("store", None)


@pytest.mark.parametrize("words", [["--profile", "none"], ["--profile=none"]])
def test_a_profile_that_does_not_exist_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "cluster", "status"])
    assert ended.value.code == 2
    assert "there is no profile 'none'" in capsys.readouterr().err


def test_the_environment_names_a_profile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PYBK_PROFILE", "none")
    with pytest.raises(SystemExit):
        main(["cluster", "status"])
    assert "there is no profile 'none'" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "name"), [([], "dev"), (["--profile", "mine"], "mine")])
def test_a_local_cluster_has_the_profile_dev_or_the_one_that_is_named(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "dev", "status"]) == 2
    assert f"there is no profile {name!r}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "../dev", ".hidden", "a/b", "x" * 65])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a name of a profile"):
        path_of(name)


@pytest.mark.parametrize("text", ["metadata = 1 2", "metadata = 1", 'other = "x"', 'secret_file = "x"'])
def test_a_file_that_is_no_profile_is_refused(text: str) -> None:
    Path(path_of("here")).write_text(text)
    with pytest.raises(UsageError, match="is to be a profile"):
        Profile.read("here")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('metadata = "etcd://host/x"', "metadata URL 'etcd://host/x' has an unknown scheme, 'etcd'; use lmdb://"),
        ('metadata = "zk://host:1/x"\nowner = "x"', "it has owner, which no profile has"),
        ('metadata = "zk://host:1/x"\nsecret_file = 1', "secret_file is no text"),
        ('secret_file = "x"', "it has no metadata, the URL of a cluster"),
    ],
)
def test_what_is_wrong_in_a_profile_is_named_with_its_file(text: str, says: str) -> None:
    Path(path_of("here")).write_text(text)
    with pytest.raises(UsageError) as raised:
        Profile.read("here")
    assert path_of("here") in str(raised.value)
    assert says in str(raised.value)
