"""A closed ledger without a seal is checked whole and then sealed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pybk.admin.cli import main
from pybk.errors import CorruptError, IllegalOperationError, SealMismatchError, UnauthorizedError
from pybk.feature_level import FeatureLevel
from pybk.ledger.digest import DigestType
from pybk.manager.ledger_manager import LedgerManager
from tests.internals import store_of, store_view_of
from tests.private_files import write_private
from tests.sealing import PASSWORD, open_at, open_sealing, tamper
from tests.test_seal import make


@pytest.mark.parametrize("digest_type", DigestType)
@pytest.mark.parametrize("entries", [0, 1, 3000])
def test_reseal_seals_what_it_has_checked(tmp_path: Path, digest_type: DigestType, entries: int) -> None:
    with open_at(FeatureLevel.BASE, tmp_path) as manager:
        with manager.create_ledger(password=PASSWORD, digest_type=digest_type, insecure=True) as writer:
            writer.append_many(b"x" * (number % 50) for number in range(entries))
        with pytest.raises(IllegalOperationError, match="pybk store upgrade"):
            manager.reseal(writer.ledger_id, password=PASSWORD)
        store_view_of(manager).feature_level = FeatureLevel.SEALS
        with pytest.raises(UnauthorizedError):
            manager.reseal(writer.ledger_id, password=b"another")
        sealed = manager.reseal(writer.ledger_id, password=PASSWORD)
        assert sealed.sealed
        assert manager.reseal(writer.ledger_id, password=PASSWORD) == sealed
    with (
        LedgerManager.open(tmp_path) as manager,
        manager.open_ledger(writer.ledger_id, password=PASSWORD, require_seal=True) as reader,
    ):
        assert len(list(reader.read(0, entries - 1))) == entries


def test_reseal_seals_nothing_that_was_changed(tmp_path: Path) -> None:
    with open_sealing(tmp_path) as manager:
        cut, changed, running = make(manager), make(manager), make(manager, close=False)
    tamper(tmp_path, cut, last_entry_id=2, length=21, seal=b"", last_digest=b"")
    tamper(tmp_path, changed, last_entry_id=2, length=21)
    with open_sealing(tmp_path) as manager:
        with pytest.raises(CorruptError, match="35 in all, and 21 are recorded"):
            manager.reseal(cut, password=PASSWORD)
        with pytest.raises(SealMismatchError):
            manager.reseal(changed, password=PASSWORD)
        with pytest.raises(IllegalOperationError, match="is open"):
            manager.reseal(running, password=PASSWORD)
        assert not manager.ledger_metadata(cut).sealed


def test_the_command_reseals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, file = tmp_path / "store", tmp_path / "password"
    write_private(file, PASSWORD + b"\n")
    with open_at(FeatureLevel.BASE, root) as manager:
        first, second = make(manager), make(manager)
    assert main(["reseal", str(root), str(first), str(second), "--password-file", str(file), "--json"]) == 0
    assert [row["ledger"] for row in json.loads(capsys.readouterr().out)["ledgers"]] == [first, second]
    assert main(["verify", str(root), "--password-file", str(file), "--strict"]) == 0
    assert main(["reseal", str(tmp_path / "none"), "0"]) == 2
    assert not (tmp_path / "none").exists()


def test_the_command_says_that_no_password_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYBK_PASSWORD", raising=False)
    with open_sealing(tmp_path) as manager:
        ledger_id = make(manager)
    assert main(["reseal", str(tmp_path), str(ledger_id)]) == 2
    error = capsys.readouterr().err
    assert f"no password was given for ledger {ledger_id}" in error
    assert "--password-file FILE" in error
    assert "PYBK_PASSWORD" in error
    assert "digest type" not in error
    monkeypatch.setenv("PYBK_PASSWORD", "another")
    assert main(["reseal", str(tmp_path), str(ledger_id)]) == 2
    assert "the password is not that of ledger" in capsys.readouterr().err


def test_a_ledger_that_changes_while_it_is_checked_is_not_sealed(tmp_path: Path) -> None:
    with open_at(FeatureLevel.BASE, tmp_path) as manager:
        ledger_id = make(manager)
    with open_sealing(tmp_path) as manager:
        store = store_of(manager)
        descriptor = store.descriptor(ledger_id)
        checked = replace(descriptor.metadata, seal=bytes(32))
        store.change_all([(descriptor, replace(descriptor.metadata, last_entry_id=2, length=21, version=99))])
        with pytest.raises(IllegalOperationError, match="was changed while it was checked"):
            store.reseal(descriptor, checked)
        assert not manager.ledger_metadata(ledger_id).sealed
