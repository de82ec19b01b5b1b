"""The bytes of packs and manifests, as ``docs/reference/format.md`` says."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from pybk.backup import back_up, restore_backup, verify_backup
from pybk.backup.chain import Chain
from pybk.backup.checking import LedgerChecks
from pybk.backup.manifest import STORE, KeptLedger, Manifest, SourceIdentity
from pybk.backup.pack import LedgerKey, PackBuilder, PackedEntries, Piece, check_pack, read_pack
from pybk.backup.verifying import EntriesCheck, WantedEntries
from pybk.errors import CorruptError, StorageRefusedError, UnsupportedFormatError, UsageError
from pybk.flags import StorageHint
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.entry import EntryBatch
from pybk.ledger.ledger_metadata import LedgerMetadata
from pybk.storage.format.index_rows import NamedRow
from tests.backup.backup_harness import KNOWN, PASSWORD, backed_up
from tests.storage.real_store import contents, numbered, open_quick

BACKUP_ID = bytes(range(16))
METADATA = LedgerMetadata(
    ledger_id=7,
    digest_type=DigestType.NONE,
    creation_time_ns=1,
    creation_sequence=2,
    tier=StorageHint.NVME,
    key_salt=b"salt",
    verifier=b"",
)


def pack() -> bytes:
    prefixes = entry_digest(DigestType.NONE, 7).prefixes(0, -1, 0, [b"a", b"bc"])
    buffer = memoryview(prefixes[0] + b"a" + prefixes[1] + b"bc")
    ids = np.arange(2, dtype=np.int64)
    builder = PackBuilder(BACKUP_ID, 5)
    builder.add(METADATA, 0, EntryBatch(7, ids, buffer, np.array([0, 33]), np.array([33, 34]), 0))
    assert builder.pieces == [((7, 1, 2, b"salt"), Piece(5, 0, 1))]
    return builder.finish()


MANIFEST = Manifest(
    base=False,
    backup_id=BACKUP_ID,
    run=1,
    previous=b"\1" * 32,
    source=SourceIdentity(STORE, bytes(16), b"s" * 16, 2, 0),
    created_ns=3,
    durable_lsn=4,
    next_ledger_id=9,
    next_creation_sequence=10,
    packs=(),
    ledgers={7: KeptLedger(METADATA.encode(), 1, 1, 3, (Piece(5, 0, 1),)), 8: None},
    named=(NamedRow("group/name", 4, b"value"), NamedRow("group/gone", 2, None)),
    left_out={6: "why"},
)


def test_the_bytes_of_a_pack() -> None:
    data = pack()
    assert data[:40] == b"PYBKBKP1\x01\0\0\0\0\0\0\0" + BACKUP_ID + b"\x05" + bytes(7)
    assert data[40:44] == b"RK\x01\x02"
    assert data[-48:-32] == b"PYBKBKE1\x02" + bytes(7)
    assert data[-32:] == hashlib.sha256(data[:-32]).digest()
    (found,) = read_pack(data, BACKUP_ID, 5, where="here")
    assert (found.first, found.last, found.sizes.tolist()) == (0, 1, [33, 34])
    assert bytes(found.buffer[-2:]) == b"bc"


def test_every_changed_byte_and_every_cut_of_a_pack_is_noticed() -> None:
    data = pack()
    for at in range(len(data)):
        with pytest.raises((CorruptError, UnsupportedFormatError)):
            check_pack(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], BACKUP_ID, 5, where="here")
        with pytest.raises(CorruptError):
            check_pack(data[:at], BACKUP_ID, 5, where="here")
    for backup_id, number in ((bytes(16), 5), (BACKUP_ID, 6)):
        with pytest.raises(CorruptError, match="expected pack"):
            check_pack(data, backup_id, number, where="here")


def test_the_bytes_of_a_manifest() -> None:
    data = MANIFEST.encode()
    assert Manifest.decode(data, where="here") == MANIFEST
    lines = data.splitlines()
    assert lines[0] == (
        b'{"backup":"000102030405060708090a0b0c0d0e0f","base":false,"created_ns":3,"durable_lsn":4,"format":1,'
        b'"incarnation":0,"kind":"store","next_creation_sequence":10,"next_ledger_id":9,"packs":[],'
        b'"previous":"' + b"01" * 32 + b'",'
        b'"run":1,"salt":"' + b"73" * 16 + b'","scrypt":2,"store":"' + b"00" * 16 + b'"}'
    )
    assert lines[2:6] == [
        b'{"gone":8}',
        b'{"name":"group/name","value":"dmFsdWU=","version":4}',
        b'{"name":"group/gone","value":null,"version":2}',
        b'{"left_out":6,"why":"why"}',
    ]


def test_every_changed_byte_and_every_cut_of_a_manifest_is_noticed() -> None:
    data = MANIFEST.encode()
    for at in range(len(data)):
        with pytest.raises((CorruptError, UnsupportedFormatError)):
            Manifest.decode(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], where="here")
        with pytest.raises(CorruptError):
            Manifest.decode(data[:at], where="here")
    newer = data.replace(b'"format":1', b'"format":2')
    body = newer[: newer.rindex(b'{"lines"')]
    newer = newer.replace(
        hashlib.sha256(data[: len(body)]).hexdigest().encode(), hashlib.sha256(body).hexdigest().encode()
    )
    with pytest.raises(UnsupportedFormatError, match="a backup of format 2; this pybk reads 1"):
        Manifest.decode(newer, where="here")


@pytest.mark.parametrize(
    "kept",
    [
        KeptLedger(METADATA.encode(), 2, 1, 3, (Piece(5, 0, 1),)),
        KeptLedger(METADATA.encode(), 1, 1, 3, (Piece(5, 1, 1),)),
        KeptLedger(METADATA.encode(), 1, 2, 3, (Piece(5, 0, 1),)),
        KeptLedger(METADATA.encode(), 2, 1, 3, (Piece(5, 0, 1), Piece(6, 1, 2))),
    ],
)
def test_a_ledger_with_other_entries_than_its_pieces_have_is_refused(kept: KeptLedger) -> None:
    manifest = Manifest(**{**{name: getattr(MANIFEST, name) for name in MANIFEST.__slots__}, "ledgers": {7: kept}})
    with pytest.raises(CorruptError, match="ledger 7"):
        Manifest.decode(manifest.encode(), where="here")


def test_new_entries_must_follow_what_the_backup_has() -> None:
    (found,) = read_pack(pack(), BACKUP_ID, 5, where="here")
    offsets, sizes = found.offsets[1:], found.sizes[1:]
    assert LedgerChecks(MANIFEST.source, KNOWN).of(METADATA, 1, 1).add(1, found.buffer, offsets, sizes) == 2
    with pytest.raises(CorruptError, match="has 3 bytes up to it, but 2 of its own after 7"):
        LedgerChecks(MANIFEST.source, KNOWN).of(METADATA, 1, 7).add(1, found.buffer, offsets, sizes)


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        (0, "run", "1"),
        (0, "run", 1.0),
        (0, "created_ns", -1),
        (0, "durable_lsn", 1 << 63),
        (0, "durable_lsn", True),
        (0, "packs", [[5, 1 << 40, "00" * 32]]),
        (0, "kind", 7),
        (1, "ledger", "7"),
        (1, "last", 10**30),
        (1, "lac", -2),
        (1, "length", -1),
        (1, "pieces", [[5, 0, 1.0]]),
        (1, "pieces", [[-5, 0, 1]]),
        (3, "name", 7),
        (3, "version", None),
        (5, "why", None),
    ],
)
def test_a_value_that_no_run_writes_is_refused(line: int, name: str, value: object) -> None:
    lines = MANIFEST.encode().splitlines()[:-1]
    assert name in json.loads(lines[line])
    lines[line] = json.dumps({**json.loads(lines[line]), name: value}).encode()
    body = b"".join(each + b"\n" for each in lines)
    end = json.dumps({"lines": len(lines), "sha256": hashlib.sha256(body).hexdigest()}).encode()
    with pytest.raises(CorruptError, match="the manifest is damaged"):
        Manifest.decode(body + end + b"\n", where="here")


def test_a_manifest_that_would_be_too_large_to_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pybk.backup.chain.MANIFEST_BYTES_MAX", 10)
    with open_quick(tmp_path / "store") as manager, pytest.raises(StorageRefusedError, match="at most 10 are read"):
        backed_up(manager, tmp_path / "backup")


def test_empty_entries_that_are_missing_are_noticed() -> None:
    """Lengths show nothing of entries without a payload, so the ids must follow each other."""
    (prefix,) = entry_digest(DigestType.NONE, 7).prefixes(1, -1, 0, [b""])
    found = PackedEntries(LedgerKey.of(METADATA), 1, memoryview(prefix), np.array([0]), np.array([32]))
    kept = KeptLedger(METADATA.encode(), 1, 1, 0, (Piece(5, 0, 1),))
    chain = Chain()
    chain.source, chain.ledgers = MANIFEST.source, {7: kept}
    with pytest.raises(CorruptError, match="entries 0 to 0 are not in the backup"):
        EntriesCheck(chain, KNOWN).add(WantedEntries(7, kept, found, 0, 1))


def test_a_backup_by_fsspec_is_that_of_a_directory(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    url = f"memory://backups/{tmp_path.name}"
    with open_quick(tmp_path / "store") as manager:
        writer = manager.create_ledger(password=PASSWORD)
        for run in range(2):
            writer.append_many(numbered(10, 10 * run))
            assert backed_up(manager, url).run == run + 1
        assert verify_backup(url, passwords=KNOWN).entries == 20
        names = [each.rpartition("/")[2] for each in fsspec.filesystem("memory").ls(url, detail=False)]
        assert sorted(names) == ["base-00000000", "pack-00000001", "pack-00000002", "run-00000001", "run-00000002"]
        restore_backup(url, tmp_path / "new", passwords=KNOWN)
        with pytest.raises(UsageError, match="fsspec cannot open unheard-of://x"):
            back_up(manager, "unheard-of://x")
        local = f"file://{tmp_path}/local"
        backed_up(manager, local)
        assert (tmp_path / "local").stat().st_mode & 0o777 == 0o700
        with pytest.raises(UsageError, match="storage_options"):
            back_up(manager, tmp_path / "local", storage_options={"key": "value"})
    with open_quick(tmp_path / "new") as again:
        assert contents(again, 0, PASSWORD) == numbered(20)
    fsspec.filesystem("memory").rm(f"{url}/pack-00000002")
    with pytest.raises(CorruptError, match="is missing"):
        restore_backup(url, tmp_path / "newer")
