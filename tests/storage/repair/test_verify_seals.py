"""Verification finds ledgers whose kind or end was changed, and counts what it could not check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pybk.admin.cli import main
from pybk.credentials import Passwords
from pybk.errors import UsageError
from pybk.feature_level import FeatureLevel
from pybk.ledger.digest import DigestType
from pybk.ledger.ledger_metadata import LedgerState
from pybk.storage.repair.verify import VerifyReport, verify_store
from tests.internals import descriptor_of, digest_of, store_of
from tests.private_files import write_private
from tests.sealing import PASSWORD, open_at, open_sealing, tamper
from tests.test_seal import make, written_over


def verified(path: Path, passwords: Passwords | None = None) -> VerifyReport:
    return verify_store(str(path), passwords=passwords or Passwords(PASSWORD))


@pytest.mark.parametrize("digest_type", DigestType)
def test_sealed_ledgers_are_sound_and_complete(tmp_path: Path, digest_type: DigestType) -> None:
    with open_sealing(tmp_path) as manager:
        for entries in (0, 1, 5):
            make(manager, entries, digest_type=digest_type)
        make(manager, close=False, digest_type=digest_type)
    found = verified(tmp_path)
    assert found.problems == ()
    assert found.complete
    without = verify_store(str(tmp_path))
    assert without.problems == ()
    assert (without.seals_unchecked, without.complete) == (3, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"digest_type": DigestType.NONE},
        {"digest_type": DigestType.NONE, "seal": b"", "last_digest": b""},
        {"last_entry_id": 2, "length": 21},
        {"last_entry_id": 2, "length": 21, "seal": b"", "last_digest": b""},
        {"custom_metadata": {"schema": b"2"}},
    ],
    ids=["downgraded", "downgraded-and-unsealed", "truncated", "truncated-and-unsealed", "other-custom-metadata"],
)
def test_verify_finds_what_was_changed_in_the_directory(tmp_path: Path, changes: dict[str, Any]) -> None:
    with open_sealing(tmp_path) as manager:
        ledger_id = make(manager, custom_metadata={"schema": b"1"})
    tamper(tmp_path, ledger_id, **changes)
    found = verified(tmp_path)
    assert {problem.ledger_id for problem in found.problems} == {ledger_id}


def test_verify_finds_another_last_entry_than_the_sealed_one(tmp_path: Path) -> None:
    copy, ledger_id = written_over(tmp_path / "store")
    (problem,) = verified(copy).problems
    assert problem.ledger_id == ledger_id
    assert "entry 1, its last, is not the one that was sealed" in problem.message


def test_lengths_that_do_not_add_up_are_found(tmp_path: Path) -> None:
    with open_sealing(tmp_path) as manager:
        writer = manager.create_ledger(password=PASSWORD)
        writer.append(b"one")
        store, prefix = store_of(manager), b""
        for entry_id, length, payload in ((1, 7, b"two"), (2, 12, b"three")):  # the first adds one too many
            prefix = digest_of(writer).prefix(entry_id, 0, length, payload)
            store.log.stage_entry(descriptor_of(writer), entry_id, prefix, payload, length - len(payload), 64, True)
        store.log.flush()
        descriptor_of(writer).last_pushed, descriptor_of(writer).length_pushed = 2, 12
        descriptor_of(writer).last_prefix = prefix
        writer.close()
        assert writer.metadata.state is LedgerState.CLOSED
    problems = verified(tmp_path).problems
    assert "entry 1 says that the ledger has 7 bytes up to it, but 3 of its own after 3" in problems[0].message


def test_ledgers_without_a_seal_are_counted(tmp_path: Path) -> None:
    with open_at(FeatureLevel.BASE, tmp_path) as manager:
        make(manager)
        make(manager, digest_type=DigestType.XXH3)
    found = verified(tmp_path)
    assert (found.problems, found.unsealed, found.complete) == ((), 2, False)


def passwords_file(path: Path, text: str) -> Path:
    return write_private(path / "passwords.toml", text.encode())


def test_one_run_checks_ledgers_of_many_passwords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("PYBK_PASSWORD", raising=False)
    root = tmp_path / "store"
    with open_sealing(root) as manager:
        for number, (kind, secret) in enumerate((("", b"a"), ("orders", b"b"), ("orders", b"c"), ("x.y", b"\xff\n"))):
            with manager.create_ledger(password=secret, ledger_type=kind) as writer:
                writer.append(b"payload")
            assert writer.ledger_id == number
    write_private(tmp_path / "b", b"b\n")
    file = passwords_file(
        tmp_path,
        f'default = "a"\n[types]\norders = {{ file = "{tmp_path / "b"}" }}\n"x.y" = {{ base64 = "/wo=" }}\n'
        '[ledgers]\n2 = "c"\n',
    )
    assert main(["verify", str(root), "--passwords", str(file), "--strict"]) == 0
    assert "no problems in 4 ledgers" in capsys.readouterr().out
    passwords_file(tmp_path, 'default = "a"\n[types]\norders = "b"\n')
    assert main(["verify", str(root), "--passwords", str(file)]) == 0
    assert "the entries of 2 ledgers were checked by checksum only" in capsys.readouterr().out
    assert main(["verify", str(root), "--passwords", str(file), "--strict"]) == 1
    passwords_file(tmp_path, '[ledgers]\n1 = "wrong"\n')
    assert main(["verify", str(root), "--passwords", str(file)]) == 1
    assert "ledger 1: the password that is given for it is another" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("default = 5", "default takes a password"),
        ("secret", "in TOML"),
        ("[others]", "nothing else"),
        ("[ledgers]\nfirst = 'a'", "by id, a whole number, not 'first'"),
        ("[types]\na = { base64 = '=' }", "types.a is not base64"),
        ("[types]\na = { file = '/no/such/file' }", "cannot be read"),
        ("[types]\na = { file = 'a', base64 = 'a' }", "types.a takes a password"),
    ],
)
def test_errors_in_a_file_of_passwords_do_not_show_passwords(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Passwords.read(str(passwords_file(tmp_path, text)))
    assert "hidden" not in repr(Passwords(b"hidden", {"a": b"hidden"}, {1: b"hidden"}))
