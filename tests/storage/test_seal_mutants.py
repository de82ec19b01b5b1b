"""Each rule of making and checking seals is broken on purpose, and a test of the rule must notice."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pybk.flags import WriteFlag
from pybk.ledger import keys
from pybk.ledger.digest import DigestType
from tests import test_seal as seal
from tests.mutation.patterns import changed
from tests.storage import test_reseal as reseal
from tests.storage.repair import test_verify_seals as verify

CHECKS: dict[str, Callable[[Path], None]] = {
    "truncated": partial(seal.test_a_ledger_changed_in_the_directory_is_not_opened, what="truncated"),
    "downgraded": seal.test_an_open_ledger_that_was_downgraded_is_not_opened,
    "another last entry": seal.test_another_last_entry_than_the_sealed_one_is_not_read,
    "taken away": seal.test_a_seal_that_was_taken_away_is_missed,
    "open": seal.test_an_open_ledger_has_no_seal_yet,
    "followed": seal.test_a_follower_does_not_take_a_changed_end,
    "recovered": partial(
        seal.test_every_recovery_of_one_end_makes_the_seal_of_the_writer,
        digest_type=DigestType.HMAC_SHA256,
        entries=5,
        flags=WriteFlag.NONE,
    ),
    "resealed": reseal.test_reseal_seals_nothing_that_was_changed,
    "raced": reseal.test_a_ledger_that_changes_while_it_is_checked_is_not_sealed,
    "verified": partial(
        verify.test_verify_finds_what_was_changed_in_the_directory, changes={"custom_metadata": {"schema": b"2"}}
    ),
    "verified last entry": verify.test_verify_finds_another_last_entry_than_the_sealed_one,
    "counted": verify.test_ledgers_without_a_seal_are_counted,
    "lengths": verify.test_lengths_that_do_not_add_up_are_found,
}


class Mutant(NamedTuple):
    """A rule, the function that is broken, how, and the check that has to notice."""

    rule: str
    function: str
    old: str
    new: str
    check: str


MUTANTS = [
    Mutant(
        "a reader checks the seal of a closed ledger",
        "pybk.manager.ledger_manager:LedgerManager._check_end",
        "seal.require(metadata, HOW_TO_SEAL)",
        "pass",
        "truncated",
    ),
    Mutant(
        "a reader checks the end of a ledger that is closed when it is opened, or later",
        "pybk.manager.ledger_reader:LedgerReader._take_metadata",
        "metadata.state is LedgerState.CLOSED",
        "False",
        "followed",
    ),
    Mutant(
        "a reader compares the last entry of a batch",
        "pybk.manager.ledger_reader:LedgerReader._read_batch",
        "self._sealed_last >= 0",
        "False",
        "another last entry",
    ),
    Mutant(
        "a reader compares a last entry that it reads alone",
        "pybk.manager.ledger_reader:LedgerReader._take_metadata",
        "metadata.last_entry_id if metadata.sealed else -1",
        "-1",
        "another last entry",
    ),
    Mutant(
        "a required seal is missed",
        "pybk.ledger.keys:LedgerSeal.require",
        "not metadata.sealed",
        "False",
        "taken away",
    ),
    Mutant(
        "a required seal is missed on an open ledger",
        "pybk.manager.ledger_manager:LedgerManager._open_ledger",
        "require_seal and descriptor.metadata.state is not LedgerState.CLOSED",
        "False",
        "open",
    ),
    Mutant(
        "a ledger whose kind was changed is recognised",
        "pybk.ledger.keys:unlocked",
        "keys = opens(metadata)\nif keys is not None:\n    ...",
        "return keys_of(ring, given, metadata)",
        "downgraded",
    ),
    Mutant(
        "a recovery seals over the entry that the ledger ends with",
        "pybk.storage.store:Store._sealed",
        "self.read_batch(descriptor, last, last, 1, digest_bytes=sealer.digest.size, direct=False)",
        "self.read_batch(descriptor, 0, 0, 1, digest_bytes=sealer.digest.size, direct=False)",
        "recovered",
    ),
    Mutant(
        "a ledger is sealed again only after it was checked whole",
        "pybk.manager.ledger_manager:LedgerManager._reseal",
        "handles.checked_whole(reader)",
        "bytes(next(iter(reader)).payload)",
        "resealed",
    ),
    Mutant(
        "what is sealed again has the length that its metadata say",
        "pybk.manager.ledger_reader:checked_whole",
        "reader.length != metadata.length or length != metadata.length",
        "False",
        "resealed",
    ),
    Mutant(
        "what has changed since it was checked is not sealed again",
        "pybk.storage.store:Store.reseal",
        "replace(wanted, tier=sealed.tier, version=sealed.version) != sealed",
        "False",
        "raced",
    ),
    Mutant(
        "the check of a store checks seals",
        "pybk.ledger.ledger_check:check_seal",
        "seal.check(metadata)",
        "pass",
        "verified",
    ),
    Mutant(
        "the check of a store counts ledgers without a seal",
        "pybk.ledger.ledger_check:check_seal",
        "not sealed",
        "False",
        "counted",
    ),
    Mutant(
        "the check of a store compares the last entry",
        "pybk.ledger.ledger_check:check_last",
        "end.digest != metadata.last_digest",
        "False",
        "verified last entry",
    ),
    Mutant(
        "the check of a store adds the lengths up",
        "pybk.ledger.ledger_check:end_of",
        "len(wrong) or first < 0",
        "False",
        "lengths",
    ),
]


@pytest.fixture(autouse=True)
def _cheap_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "SCRYPT_COST", 2)


def mutate(patch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """Put a changed copy of a function in the place of the real one, wherever it was imported."""
    module_name, path = mutant.function.split(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    real = getattr(owner, name)
    broken = changed(real, mutant.old, mutant.new)
    modules = [
        importlib.import_module(f"pybk.{each}")
        for each in ("manager", "manager.ledger_manager", "storage.repair.verify")
    ]
    for place in [owner, *(each for each in modules if not classes and getattr(each, name, None) is real)]:
        patch.setattr(place, name, broken)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_broken_rule_is_noticed(mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, mutant)
    with pytest.raises((Exception, pytest.fail.Exception)):  # whatever the test says
        CHECKS[mutant.check](tmp_path)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", sorted({mutant.check for mutant in MUTANTS}))
def test_the_checks_pass_where_no_rule_is_broken(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)
