from __future__ import annotations

import hashlib
import inspect
import threading
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from pybk.errors import OutOfMemoryError, UsageError
from pybk.ledger import keys as keys_module
from pybk.ledger.digest import DigestType, entry_digest
from pybk.ledger.keys import KeyRing

STORE, SALT = b"store id 16 byte", b"scrypt salt 16 b"


def ring(**changes: Any) -> KeyRing:
    return KeyRing(**{"store_id": STORE, "salt": SALT, "cost": 2, **changes})


def rfc_5869(root: bytes, salt: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 of 32 bytes, as another implementation has it."""
    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=info).derive(root)


def test_keys_are_scrypt_and_hkdf() -> None:
    root = hashlib.scrypt(b"s3cret", salt=SALT, n=16, r=8, p=1, dklen=32)
    assert ring(cost=16).root(b"s3cret") == root
    keys = ring(cost=16).ledger_keys(b"s3cret", 5, b"ledger salt", 2)
    scope = b"\0\0\0\x08" + (5).to_bytes(8, "big") + b"\0\0\0\x08" + (2).to_bytes(8, "big") + b"\0\0\0\x10" + STORE
    assert keys.entry_key == rfc_5869(root, b"ledger salt", b"\0\0\0\x06pybk/1" + b"\0\0\0\x09entry-mac" + scope)
    assert keys.verifier == rfc_5869(root, b"ledger salt", b"\0\0\0\x06pybk/1" + b"\0\0\0\x08verifier" + scope)


def test_whatever_differs_gives_other_keys() -> None:
    made_keys = [
        ring().ledger_keys(b"", 1, b"salt", 0),
        ring().ledger_keys(b"p", 1, b"salt", 0),
        ring().ledger_keys(b"p", 2, b"salt", 0),
        ring().ledger_keys(b"p", 1, b"tlas", 0),
        ring().ledger_keys(b"p", 1, b"salt", 1),
        ring(store_id=b"another store id").ledger_keys(b"p", 1, b"salt", 0),
        ring(salt=b"another salt 16b").ledger_keys(b"p", 1, b"salt", 0),
        ring(cost=4).ledger_keys(b"p", 1, b"salt", 0),
    ]
    secrets = {key for keys in made_keys for key in (keys.entry_key, keys.verifier)}
    assert len(secrets) == 2 * len(made_keys)


def test_the_same_gives_the_same_keys() -> None:
    one, other = (ring().ledger_keys(b"p", 1, b"salt", 0) for _ in range(2))
    assert (one.entry_key, one.verifier) == (other.entry_key, other.verifier)


class CountingScrypt:
    """Stands before scrypt and counts."""

    calls = 0
    original = Scrypt

    def __init__(self, **arguments: Any) -> None:
        self._scrypt = self.original(**arguments)

    def derive(self, password: bytes) -> bytes:
        type(self).calls += 1
        return self._scrypt.derive(password)


def test_scrypt_runs_once_per_password_whatever_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingScrypt, "calls", 0)
    monkeypatch.setattr("pybk.ledger.keys.scrypt.Scrypt", CountingScrypt)
    keys = ring(cost=1 << 10)
    threads = [threading.Thread(target=keys.ledger_keys, args=(b"p", n, b"salt", 0)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert CountingScrypt.calls == 1
    keys.root(b"q")
    keys.root(b"p")
    assert CountingScrypt.calls == 2


def test_the_cache_is_bounded_and_forgets_the_longest_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingScrypt, "calls", 0)
    monkeypatch.setattr("pybk.ledger.keys.scrypt.Scrypt", CountingScrypt)
    keys = ring()
    for number in range(64):
        keys.root(b"%d" % number)
    keys.root(b"0")
    assert CountingScrypt.calls == 64
    keys.root(b"new")
    keys.root(b"0")
    assert CountingScrypt.calls == 65
    keys.root(b"1")
    assert CountingScrypt.calls == 66


def test_the_password_is_not_kept() -> None:
    keys = ring()
    keys.ledger_keys(b"s3cret-password", 1, b"salt", 0)
    held = [getattr(keys, name) for name in KeyRing.__slots__]
    assert "s3cret-password" not in repr(held)


def test_no_repr_shows_a_secret() -> None:
    ring_ = ring()
    keys = ring_.ledger_keys(b"s3cret-password", 1, b"salt", 0)
    shown = repr(ring_) + repr(keys) + repr(entry_digest(DigestType.HMAC_SHA256, 1, keys.entry_key))
    for secret in (b"s3cret-password", ring_.root(b"s3cret-password"), keys.entry_key, keys.verifier):
        assert repr(secret)[2:-1] not in shown
        assert secret.hex() not in shown


@pytest.mark.parametrize("cost", [-2, 0, 1, 3, 1000, 1 << 21])
def test_impossible_costs_are_refused(cost: int) -> None:
    with pytest.raises(UsageError, match=f"cost {cost} "):
        ring(cost=cost)


def test_short_salts_and_text_passwords_are_refused() -> None:
    with pytest.raises(UsageError, match="15 bytes"):
        ring(salt=bytes(15))
    with pytest.raises(UsageError, match="encode"):
        ring().root("text")  # type: ignore[arg-type]  # what a careless caller may do


def test_new_stores_take_todays_cost() -> None:
    source = inspect.getsource(keys_module)
    assert "SCRYPT_COST: Final = 1 << 17" in source, "tests lower the constant, so its value is looked up in the source"


def test_no_memory_for_a_password_is_an_error_that_says_how_much_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def derive(self: object, password: bytes) -> bytes:
        raise MemoryError

    monkeypatch.setattr("pybk.ledger.keys.scrypt.Scrypt", lambda **arguments: type("None", (), {"derive": derive})())
    with pytest.raises(OutOfMemoryError, match="128 MiB"):
        ring(cost=1 << 17).root(b"password")


def test_a_key_ring_adopts_what_another_one_of_its_store_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    before, other = ring(), ring(salt=SALT[::-1])
    root = before.root(b"p")
    monkeypatch.setattr(CountingScrypt, "calls", 0)
    monkeypatch.setattr("pybk.ledger.keys.scrypt.Scrypt", CountingScrypt)
    after = ring()
    after.adopt(before)
    assert after.root(b"p") == root
    assert CountingScrypt.calls == 0
    after.root(b"q")
    assert CountingScrypt.calls == 1
    other.adopt(before)
    assert other.root(b"p") != root
    assert CountingScrypt.calls == 2
