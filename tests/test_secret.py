"""Ledgers with a secret, whose keys no scrypt derives."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from pybk import (
    BlobStore,
    IllegalOperationError,
    LedgerManager,
    Log,
    Passwords,
    SealMismatchError,
    Secret,
    StorageHint,
    UnauthorizedError,
    UnsupportedFormatError,
    UsageError,
    WriteAheadLog,
    verify,
)
from pybk.admin.cli import main
from pybk.credentials import KeyKind, read_credentials, read_secret_file
from pybk.feature_level import FeatureLevel
from pybk.flags import WriteFlag
from pybk.ledger import ledger_metadata
from pybk.ledger.digest import DigestType
from pybk.ledger.keys import KeyRing
from pybk.ledger.ledger_metadata import LedgerMetadata, key_binding
from pybk.streams.log_settings import LedgerSpec
from pybk.testing import TestCluster, open_store
from tests.sealing import open_at

SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
PASSWORD = b"chosen by people"


@pytest.fixture
def stretched(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the salts that scrypt is called with."""
    found: list[bytes] = []

    def counted(*, salt: bytes, length: int, n: int, r: int, p: int) -> Scrypt:
        found.append(salt)
        return Scrypt(salt=salt, length=length, n=n, r=r, p=p)

    monkeypatch.setattr("pybk.ledger.keys.scrypt.Scrypt", counted)
    return found


def write(manager: LedgerManager, *, password: bytes = b"", secret: bytes | Secret | None = None) -> int:
    insecure = not password and secret is None
    with manager.create_ledger(password=password, secret=secret, insecure=insecure) as writer:
        writer.append(b"entry")
    return writer.ledger_id


def test_keys_of_a_secret_are_hkdf_alone() -> None:
    ring, salt = KeyRing(b"i" * 16, b"s" * 16, cost=2), b"l" * 16
    binding = key_binding(2, DigestType.CRC32C, WriteFlag.NONE)
    sizes = [b"pybk/3", b"verifier", (7).to_bytes(8, "big"), bytes(8), b"i" * 16, *binding]
    info = b"".join(len(part).to_bytes(4, "big") + part for part in sizes)
    made = ring.ledger_keys(SECRET, 7, salt, 0, kind=KeyKind.SECRET, binding=binding)
    assert made.verifier == HKDF(SHA256(), 32, salt, info).derive(SECRET)
    assert made.verifier.hex() == "78af6a57521fdd161c3a49f237ef04555835d9a6708a80c30292380315e69cbc"
    assert made.verifier != ring.ledger_keys(SECRET, 7, salt, 0, binding=binding).verifier
    nothing = ring.ledger_keys(b"", 7, salt, 0, kind=KeyKind.NOTHING, binding=binding)
    assert nothing.verifier == HKDF(SHA256(), 32, salt, info.replace(b"pybk/3", b"pybk/4")).derive(b"")


def test_a_secret_and_no_password_need_no_scrypt(tmp_path: Path, stretched: list[bytes]) -> None:
    with open_store(tmp_path / "store") as manager:
        for secret in (SECRET, None):
            ledger_id = write(manager, secret=secret)
            with manager.open_ledger(ledger_id, secret=secret, require_seal=True) as reader:
                assert [entry.payload for entry in reader.read(0, 0)] == [b"entry"]
            assert manager.check_password(ledger_id, secret=secret)
            assert manager.check_seal(ledger_id, secret=secret, require=True)
            assert manager.reseal(ledger_id, secret=secret).sealed
            with WriteAheadLog.open(manager, f"wal-{secret is None}", secret=secret, insecure=secret is None) as wal:
                wal.append(b"record")
            with (
                Log.open(manager, f"log-{secret is None}", secret=secret, insecure=secret is None) as log,
                log.writer() as appender,
            ):
                appender.append(b"record")
            with BlobStore.open(manager, f"blobs-{secret is None}", secret=secret, insecure=secret is None) as blobs:
                blobs.put("a", b"blob")
                assert blobs.get("a") == b"blob"
    assert verify(tmp_path / "store", secret=SECRET).complete
    with LedgerManager.open(tmp_path / "store") as manager, pytest.raises(UnauthorizedError):
        manager.open_ledger(0, secret=OTHER)
    assert stretched == []


def test_each_kind_of_ledger_opens_with_its_own_alone(tmp_path: Path, stretched: list[bytes]) -> None:
    with open_store(tmp_path) as manager:
        of = {
            KeyKind.SECRET: write(manager, secret=SECRET),
            KeyKind.PASSWORD: write(manager, password=PASSWORD),
            KeyKind.NOTHING: write(manager),
        }
        for kind, ledger_id in of.items():
            assert manager.ledger_metadata(ledger_id).key_kind is kind
        for ledger_id in (of[KeyKind.SECRET], of[KeyKind.PASSWORD]):
            manager.open_ledger(ledger_id, password=PASSWORD, secret=SECRET).close()  # as while one replaces the other
        stretched.clear()
        with pytest.raises(
            UnauthorizedError, match=r"ledger 0 has a secret, not a password: pass secret=\.\.\. .*file"
        ):
            manager.open_ledger(of[KeyKind.SECRET], password=PASSWORD)
        with pytest.raises(UnauthorizedError, match="ledger 0 has a secret, and none was given: pass secret="):
            manager.open_ledger(of[KeyKind.SECRET])
        with pytest.raises(UnauthorizedError, match="ledger 1 has a password, not a secret: pass password="):
            manager.open_ledger(of[KeyKind.PASSWORD], secret=SECRET)
        with pytest.raises(UnauthorizedError, match="the secret is not that of ledger 0"):
            manager.open_ledger(of[KeyKind.SECRET], secret=OTHER)
        with pytest.raises(UnauthorizedError, match="ledger 2 has no secret, and one was given"):
            manager.open_ledger(of[KeyKind.NOTHING], secret=SECRET)
        assert stretched == []
        with pytest.raises(UnauthorizedError):
            manager.delete_ledger(of[KeyKind.SECRET], secret=OTHER)
        manager.delete_ledger(of[KeyKind.SECRET], secret=SECRET)


def test_a_changed_kind_of_key_is_found(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager:
        metadata = manager.ledger_metadata(write(manager, secret=SECRET))
        for key_format in (0, 1, 3):
            with pytest.raises(SealMismatchError, match="key format 2, but its metadata say"):
                manager.check_password(replace(metadata, key_format=key_format), secret=SECRET)
        metadata = manager.ledger_metadata(write(manager, password=PASSWORD))
        with pytest.raises(SealMismatchError, match="key format 1, but its metadata say"):
            manager.check_password(replace(metadata, key_format=2), PASSWORD)
        metadata = manager.ledger_metadata(write(manager))
        assert not manager.check_password(metadata, secret=SECRET)  # or a writer of metadata could forge entries


@pytest.mark.parametrize("short", [b"", bytes(31)])
def test_a_short_secret_is_refused_with_its_size(short: bytes, tmp_path: Path) -> None:
    with (
        open_store(tmp_path) as manager,
        pytest.raises(
            UsageError, match=rf"the secret has {len(short)} bytes, and takes at least 32 .*`pybk secret new FILE`"
        ),
    ):
        manager.create_ledger(secret=short)


def test_a_secret_of_another_type_or_an_empty_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match=r"a secret is bytes or a pybk\.Secret, not str"):
        read_credentials(None, "text" * 8)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="empty holds no secret; `pybk secret new FILE` makes one"):
        read_credentials(None, Secret(file=str(tmp_path / "empty")))


def test_each_call_takes_a_password_from_its_source(tmp_path: Path) -> None:
    (tmp_path / "word").write_bytes(b"correct horse\n")
    word = Secret(file=str(tmp_path / "word"))
    with open_store(tmp_path / "store") as manager:
        with manager.create_ledger(password=word) as writer:
            writer.append(b"entry")
        ledger_id = writer.ledger_id
        assert manager.check_password(ledger_id, word)
        with manager.open_ledger(ledger_id, password=b"correct horse") as reader:
            assert reader.read_last_add_confirmed() == 0
        manager.open_ledger(ledger_id, password=word).close()
        manager.move_ledger(ledger_id, StorageHint.HDD, password=word)
        (tmp_path / "word").write_bytes(b"another")
        with pytest.raises(UnauthorizedError):
            manager.delete_ledger(ledger_id, password=word)
        manager.delete_ledger(ledger_id, password=b"correct horse")


def test_the_command_that_errors_of_secrets_name_makes_one(tmp_path: Path) -> None:
    made = tmp_path / "made"
    assert main(["secret", "new", str(made)]) == 0
    with open_store(tmp_path / "store") as manager:
        ledger_id = write(manager, secret=Secret(file=str(made)))
        manager.open_ledger(ledger_id, secret=Secret(file=str(made))).close()


def test_a_device_is_not_to_be_given_another_mode() -> None:
    """A remedy that is followed by root would take it from all other programs."""
    with pytest.raises(UsageError, match=r"/dev/null is a device .* name a file that holds the secret"):
        read_secret_file("/dev/null", private=True)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"file": 0}, "file is 0; it takes the path of a file"),
        ({"file": True}, "file is True; it takes the path of a file"),
        ({"file": b"/secret"}, "file is b'/secret'; it takes the path of a file"),
        ({"file": ""}, "file is ''; it takes the path of a file"),
        ({"variable": 3}, "variable is 3; it takes the name of an environment variable"),
        ({"private": "no"}, "private is 'no'; it takes True or False"),
        ({"value": "text"}, "a password is bytes, not str"),
    ],
)
def test_a_source_of_another_type_is_refused(given: dict[str, Any], says: str) -> None:
    """The number of a descriptor would read, and close, a file that another part of the process has open."""
    with pytest.raises(UsageError, match=says):
        Secret(**given)


def test_the_file_of_a_secret_may_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    given = Secret(file=tmp_path / "secret")
    assert given == Secret(file=str(tmp_path / "secret"))
    assert given.read() == SECRET


def test_a_secret_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = tmp_path / "made"
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert main(["secret", "new", str(made)]) != 0
    assert not made.exists()
    assert main(["secret", "new", str(made)]) == 0


def test_the_command_that_a_lower_level_names_lets_ledgers_take_a_secret(tmp_path: Path) -> None:
    with open_at(FeatureLevel.STREAMS, tmp_path) as manager, pytest.raises(IllegalOperationError, match="--finalize"):
        manager.create_ledger(secret=SECRET)
    assert main(["store", "upgrade", str(tmp_path), "--finalize"]) == 0
    with LedgerManager.open(tmp_path) as manager:
        write(manager, secret=SECRET)


def test_credentials_are_not_shown() -> None:
    given = read_credentials(PASSWORD, SECRET)
    assert "chosen" not in repr(given)
    assert repr(SECRET) not in repr(given)
    assert repr(SECRET) not in repr(Passwords(secret=SECRET))
    assert repr(SECRET) not in repr(LedgerSpec(ledger_type="log", given=given))


@pytest.mark.parametrize("level", [level for level in FeatureLevel if level < FeatureLevel.SECRETS])
def test_a_lower_level_keeps_passwords_and_refuses_a_secret(level: FeatureLevel, tmp_path: Path) -> None:
    with open_at(level, tmp_path) as manager:
        with pytest.raises(
            IllegalOperationError, match=rf"level {level.name}, at which ledgers have a password.*upgrade"
        ):
            manager.create_ledger(secret=SECRET)
        metadata = manager.ledger_metadata(write(manager))
        assert (metadata.key_kind, metadata.key_format) == (KeyKind.PASSWORD, min(level, 1))
        manager.open_ledger(metadata.ledger_id).close()
        with pytest.raises(UnauthorizedError, match="has a password, not a secret"):
            manager.open_ledger(metadata.ledger_id, secret=SECRET)


def test_an_older_pybk_refuses_the_metadata_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(tmp_path) as manager:
        encoded = manager.ledger_metadata(write(manager, secret=SECRET)).encode()
    assert LedgerMetadata.decode(encoded, where="it").key_kind is KeyKind.SECRET
    monkeypatch.setattr(ledger_metadata, "KEY_FORMAT_MAX", 1)
    with pytest.raises(
        UnsupportedFormatError, match="a ledger of key format 2; this pybk derives keys of formats 0 to 1"
    ):
        LedgerMetadata.decode(encoded, where="it")


def test_logs_take_the_secret_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "secret")
    assert main(["secret", "new", file]) == 0
    assert file in capsys.readouterr().out
    text = Path(file).read_bytes()
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    assert len(text) == 65
    assert main(["secret", "new", file]) != 0
    assert Path(file).read_bytes() == text
    assert "exists" in capsys.readouterr().err
    monkeypatch.setenv("PYBK_SECRET_FILE", file)
    with open_store(tmp_path / "store") as manager:
        with WriteAheadLog.open(manager) as wal:
            wal.append(b"record")
        with pytest.raises(UnauthorizedError, match="log 'wal' has a secret, not a password: pass secret="):
            WriteAheadLog.open(manager, password=PASSWORD)
    monkeypatch.delenv("PYBK_SECRET_FILE")
    with LedgerManager.open(tmp_path / "store") as manager:
        with pytest.raises(UnauthorizedError, match="log 'wal' has a secret, and none was given"):
            WriteAheadLog.open(manager, insecure=True)
        with pytest.raises(UsageError, match="there is no password and no secret: pass secret="):
            WriteAheadLog.open(manager)
    store = str(tmp_path / "store")
    assert main(["wal", "cat", store, "wal", "--secret-file", file]) == 0
    assert capsys.readouterr().out == "record\n"
    assert main(["wal", "cat", store, "wal"]) != 0
    assert "--secret-file" in capsys.readouterr().err
    assert main(["store", "verify", store, "--secret-file", file, "--strict"]) == 0
    Path(f"{file}.toml").write_text(f'secret = {{ file = "{file}" }}\n')
    Path(f"{file}.toml").chmod(0o600)
    assert main(["store", "verify", store, "--passwords", f"{file}.toml", "--strict"]) == 0
    assert main(["store", "verify", store, "--strict"]) != 0


def test_old_segments_keep_their_password_and_new_ones_get_the_secret(tmp_path: Path) -> None:
    with open_store(tmp_path) as manager:
        with WriteAheadLog.open(manager, password=PASSWORD) as wal:
            wal.append(b"old")
        with WriteAheadLog.open(manager, password=PASSWORD, secret=SECRET) as wal:
            wal.append(b"new")
            assert [record.data for record in wal.replay()] == [b"old", b"new"]
        kinds = {each.metadata.key_kind for each in manager.ledgers()}
        assert kinds == {KeyKind.PASSWORD, KeyKind.SECRET}
        with pytest.raises(UnauthorizedError):
            WriteAheadLog.open(manager, password=PASSWORD)


def test_a_cluster_takes_a_secret_in_every_call(tmp_path: Path, stretched: list[bytes]) -> None:
    async def written(manager: LedgerManager) -> None:
        async with manager.create_ledger_async(secret=SECRET, ensemble_size=1) as writer:
            await writer.append_async(b"entry")
        async with manager.open_ledger_async(writer.ledger_id, secret=SECRET) as reader:
            assert reader.last_add_confirmed == 0
        assert await manager.check_password_async(writer.ledger_id, secret=SECRET)
        assert await manager.check_seal_async(writer.ledger_id, secret=SECRET)
        await manager.reseal_async(writer.ledger_id, secret=SECRET)
        with pytest.raises(UnauthorizedError, match="has a secret"):
            await manager.delete_ledger_async(writer.ledger_id)
        await manager.delete_ledger_async(writer.ledger_id, secret=SECRET)

    with TestCluster(tmp_path, bookies=1) as cluster:
        asyncio.run(written(cluster.connect()))
    assert stretched == []
