"""Rights: passwords, the cluster secret, addresses; and that no secret is seen anywhere."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pybk.errors import CookieError, LedgerFencedError, MetadataError, PybkError, UnauthorizedError, UsageError
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerState
from pybk.manager.ledger_manager import LedgerManager
from tests.cluster.inside import SECRET, Inside, inside
from tests.internals import cluster_backend_of, descriptor_of
from tests.storage.real_store import contents, numbered

PASSWORD = b"a password of some length"
OTHER = b"another secret for the cluster --"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Inside]:
    with inside(tmp_path) as cluster:
        yield cluster


@pytest.mark.parametrize("digest_type", [DigestType.HMAC_SHA256, DigestType.CRC32C])
def test_a_wrong_password_from_another_client_changes_nothing(cluster: Inside, digest_type: DigestType) -> None:
    writer = cluster.connect().create_ledger(password=PASSWORD, digest_type=digest_type)
    writer.append(b"first")
    other = cluster.connect()
    before = other.ledger_metadata(writer.ledger_id)
    for password in (b"", b"wrong", PASSWORD + b" "):
        for recover in (True, False):
            with pytest.raises(UnauthorizedError, match="nothing was changed"):
                other.open_ledger(writer.ledger_id, password=password, recover=recover)
    assert other.ledger_metadata(writer.ledger_id) == before
    assert writer.append(b"second") == 1
    writer.close()
    assert contents(other, writer.ledger_id, PASSWORD) == [b"first", b"second"]


def test_a_client_that_skips_the_password_check_is_refused_by_every_bookie(
    cluster: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = cluster.connect().create_ledger(password=PASSWORD)
    writer.append(b"first")
    intruder = cluster.connect()
    monkeypatch.setattr("pybk.ledger.keys.hmac.compare_digest", lambda *_: True)
    with pytest.raises(PybkError) as refused:
        intruder.open_ledger(writer.ledger_id, password=b"wrong")
    monkeypatch.undo()
    assert not isinstance(refused.value, LedgerFencedError)
    assert writer.append(b"second") == 1, "a bookie was fenced by somebody without the password"
    # A client that reaches the metadata may say that a recovery began; only the password lets it fence and close.
    assert cluster.connect().ledger_metadata(writer.ledger_id).state is not LedgerState.CLOSED
    assert contents(cluster.connect(), writer.ledger_id, PASSWORD, recover=True) == [b"first", b"second"]


@pytest.mark.parametrize(("made_with", "secret"), [(SECRET, OTHER), (SECRET, None), (None, SECRET)])
def test_another_secret_and_one_on_one_side_only_are_refused(
    tmp_path: Path, made_with: bytes | None, secret: bytes | None
) -> None:
    with inside(tmp_path, secret=made_with, count=1) as cluster:
        writer = cluster.connect().create_ledger(ensemble_size=1, insecure=True)
        with pytest.raises(MetadataError, match="secret") as refused:
            LedgerManager.connect(cluster.url, cluster_secret=secret)
        assert not {SECRET, OTHER} & {part for part in refused.value.args if isinstance(part, bytes)}
        with pytest.raises(MetadataError, match="secret"):
            LedgerManager.open(
                tmp_path / "more", listen="tcp://127.0.0.1:*", metadata=cluster.url, cluster_secret=secret
            )
        writer.append(b"nothing happened to the others")
        writer.close()
        assert len(cluster_backend_of(cluster.bookies[0]).membership.bookies) == 1


def test_without_a_secret_bookies_listen_on_this_host_only(tmp_path: Path) -> None:
    for address in ("tcp://0.0.0.0:*", "tcp://*:*"):
        with pytest.raises(UsageError, match=r"loopback|secret"):
            LedgerManager.open(tmp_path / "bookie", listen=address, metadata=f"lmdb://{tmp_path}/metadata")


def test_a_directory_belongs_to_one_cluster_and_one_name(tmp_path: Path) -> None:
    with inside(tmp_path / "one", count=1) as one:
        one.connect().create_ledger(ensemble_size=1, insecure=True).close()
    with inside(tmp_path / "two", count=0) as two:
        for name, url in (("bookie-0", two.url), ("bookie-9", one.url)):
            with pytest.raises(CookieError, match=r"bookie 'bookie-0'.*(other cluster|name)"):
                LedgerManager.open(
                    one.directory / "bookie-0",
                    listen="tcp://127.0.0.1:*",
                    metadata=url,
                    cluster_secret=SECRET,
                    bookie_id=name,
                )


def test_no_secret_is_in_a_file_a_log_a_message_or_a_repr(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    seen: list[str] = []
    with inside(tmp_path) as cluster:
        client = cluster.connect()
        writer = client.create_ledger(password=PASSWORD)
        writer.append_many(numbered(10))
        with pytest.raises(UnauthorizedError) as refused:
            client.open_ledger(writer.ledger_id, password=b"wrong")
        with pytest.raises(MetadataError) as forged:
            LedgerManager.connect(cluster.url, cluster_secret=OTHER)
        reader = cluster.connect().open_ledger(writer.ledger_id, password=PASSWORD)
        backend = cluster_backend_of(client)
        keys = descriptor_of(writer).keys
        things = (client, writer, reader, reader.metadata, backend, backend.identity, keys, refused.value, forged.value)
        seen += [repr(thing) for thing in things]
        seen += [repr(vars(thing)) for thing in (client, writer, reader)]
        seen += [record.getMessage() for record in caplog.records]
        seen += [repr(vars(link)) for link, _ in backend.wire.by_bookie.values()]
        secret_keys = [keys.entry_key, keys.lac_key, keys.right_key]
    secrets = [PASSWORD, SECRET, *secret_keys]
    forms = [form for secret in secrets for form in (secret, secret.hex().encode(), repr(secret)[2:-1].encode())]
    for text in seen:
        assert not [form for form in forms if form in text.encode()], text
    files = [Path(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
    assert len(files) > 10
    for path in files:
        data = path.read_bytes()
        assert not [form for form in forms if form in data], path
