"""Secrets that are read from files while they are replaced."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from pybk import Secret, UsageError
from pybk.credentials import SECRET_BYTES_MIN, Passwords, cluster_secrets, without_credentials

PRESENT = b"p" * 32
NEXT = b"n" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_bytes(PRESENT + b"\n")
    return file


def following(file: Path) -> Path:
    return file.with_name("secret.next")


def test_a_next_secret_that_is_too_short_is_refused_by_a_process_that_begins_with_it(file: Path) -> None:
    following(file).write_bytes(b"n" * (SECRET_BYTES_MIN - 1) + b"\n")
    with pytest.raises(UsageError, match=r"secret\.next has 15 bytes, and is to hold the next secret .* at least 16"):
        cluster_secrets(Secret(file=str(file)))
    following(file).write_bytes(b"n" * SECRET_BYTES_MIN)
    read = cluster_secrets(Secret(file=str(file)))
    assert read is not None
    assert read() == (PRESENT, b"n" * SECRET_BYTES_MIN)


@pytest.mark.parametrize("known", [False, True])
def test_a_next_secret_that_cannot_be_used_does_not_end_the_use_of_the_present_one(
    file: Path, known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if known:
        following(file).write_bytes(NEXT)
    read = cluster_secrets(Secret(file=str(file)))
    assert read is not None
    expected = (PRESENT, NEXT) if known else (PRESENT,)
    assert read() == expected
    following(file).write_bytes(b"")  # as while it is being written
    with caplog.at_level(logging.WARNING):
        assert [read() for _ in range(3)] == [expected] * 3
    assert [record.getMessage().partition(" has ")[0] for record in caplog.records] == [
        f"the cluster's secrets stay as they are: {file}.next"
    ]
    following(file).unlink()
    following(file).mkdir()  # which nobody can read as a file, as one of another user
    assert read() == expected
    following(file).rmdir()
    assert read() == (PRESENT,)
    following(file).write_bytes(NEXT)
    assert read() == (PRESENT, NEXT)


def test_the_present_secret_must_stay_readable(file: Path) -> None:
    read = cluster_secrets(Secret(file=str(file)))
    assert read is not None
    file.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        read()


def test_the_next_secret_of_a_variable_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", PRESENT.decode())
    monkeypatch.setenv("SOME_SECRET_NEXT", "short")
    with pytest.raises(UsageError, match="SOME_SECRET_NEXT has 5 bytes"):
        Secret(variable="SOME_SECRET").read_all()
    assert Secret(variable="SOME_SECRET").read() == PRESENT


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://user:pass@h/x", "s3://...@h/x"),
        ("s3://key:sec/ret@b/x", "s3://...@b/x"),
        ("sftp://u:p@ss@h/x", "sftp://...@h/x"),
        ("ftp://:pw@h/", "ftp://...@h/"),
        ("sftp://u:p'q@host/", "sftp://...@host/"),
        ('sftp://u:p"q\\r@host/', "sftp://...@host/"),
        ("https://h/x?sig=SECRET&token=abc", "https://h/x?sig=...&token=..."),
        ("abfs://c@a/x?sv=1&sig=SECRET", "abfs://...@a/x?sv=...&sig=..."),
        ("simplecache::s3://key:secret@b/x", "simplecache::s3://...@b/x"),
        ("https://h/x?SECRET", "https://h/x?..."),
        ("403 for 's3://k:s@b/x', twice: s3://k:s@b/y", "403 for 's3://...@b/x', twice: s3://...@b/y"),
        ("s3://k:se cret@b/x", "s3://...@b/x"),
        ("unrecognized arguments: s3://k:se cre t@b/x --to a", "unrecognized arguments: s3://...@b/x --to a"),
        ("s3://b/x is not s3://k:se cret@b/x", "s3://b/x is not s3://...@b/x"),
        ("http://host:80/a and b@c; is it?", "http://...@c;... is it?"),  # it could be a password
        ('{"url": "http://host:80/a", "by": "b@c"}', '{"url": "http://host:80/a", "by": "b@c"}'),
    ],
)
def test_no_part_of_a_url_that_may_be_secret_is_shown(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_settings_that_are_no_secrets_are_shown() -> None:
    assert without_credentials("zk://u:p@h/x?acl=all&auth=a", {"acl"}) == "zk://...@h/x?acl=all&auth=..."


def test_passwords_that_every_user_may_read_are_refused_where_privacy_is_asked_for(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    inner.write_text("secret")
    outer.write_text(f'default = {{ file = "{inner}" }}')
    assert Passwords.read(str(outer)).default == b"secret"
    for open_file, closed_file in ((outer, inner), (inner, outer)):
        open_file.chmod(0o644)
        closed_file.chmod(0o600)
        with pytest.raises(UsageError, match=f"{open_file} holds a secret, and its mode 0644"):
            Passwords.read(str(outer), private=True)
