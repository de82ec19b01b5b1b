"""The key epochs of a cluster's secret, as the key ``cluster`` has them: valid, current and retired.

Theory of operation
-------------------

A cluster's first secret has epoch 0, and each further one the next number. Epochs go through

    add:    the next epoch becomes valid next to the current one    every member that holds both secrets accepts both
    switch: the next epoch becomes the current one                 what is written, and each new session, is of it
    retire: the epoch before is no longer valid                    its secret opens nothing any more

so at most two epochs are valid, and the newest always is. A valid epoch has a *proof*: a MAC by its metadata key over
the cluster's identity and, once there was a second epoch, over all values of this class. So only a process with a valid
secret can change them; it makes all proofs anew.

The metadata key of epoch N is kept, encrypted under that of epoch N + 1 (``earlier``). So a process that has the newest
secret has all earlier keys, but cannot derive a later key from an earlier secret. The keys of retired epochs verify
descriptions of ledgers, which bookies keep unchanged for ever; they never verify a value, and admit no client.
``retired`` has a MAC by the key of each retired epoch; by it a process that has only an old secret recognises that this
secret was retired.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self

from pybk.ledger.keys import unwrap_key, wrap_key
from pybk.metadata.authenticated_values import MAC_BYTES, mac_of
from pybk.metadata.metadata_keys import MetadataKeys
from pybk.values import encode_json, from_base64, to_base64

EPOCH_MAX: Final = 10_000
"""The highest key epoch; there is a bound because each epoch leaves some bytes in the key ``cluster``."""

_WRAPPED_BYTES: Final = 40
_WRAP_LABEL: Final = b"pybk earlier metadata key 1\0"
_RETIRED_LABEL: Final = b"pybk retired secret 1\0"


@dataclass(frozen=True, slots=True)
class SecretEpochs:
    """The part of the key ``cluster`` about the cluster's secrets.

    Attributes:
        current: The epoch of the values that are written now.
        proofs: The proof of each valid epoch; empty bytes for epoch 0 of a cluster without a secret.
        earlier: The metadata key of each epoch except the newest, encrypted under that of the next epoch.
        retired: For each retired epoch a MAC by its metadata key.
    """

    current: int = 0
    proofs: Mapping[int, bytes] = field(default_factory=dict)
    earlier: Mapping[int, bytes] = field(default_factory=dict)
    retired: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The newest epoch."""
        return max(self.proofs)

    @property
    def without_secret(self) -> bool:
        """True if the cluster has no secret."""
        return self.proofs == {0: b""}

    def claim(self) -> bytes:
        """Return the bytes that each proof covers next to the identity; empty before there was a second epoch."""
        return b"" if self.newest == 0 else encode_json(self._values(list(map(str, sorted(self.proofs)))))

    def values(self) -> dict[str, Any]:
        """Return the values of the payload; ``of`` is the inverse."""
        return self._values({str(epoch): to_base64(proof) for epoch, proof in self.proofs.items()})

    def _values(self, proofs: object) -> dict[str, Any]:
        values = {"key_epoch": self.current, "proofs": proofs}
        for name, found in (("earlier", self.earlier), ("retired", self.retired)):
            if found:
                values[name] = {str(epoch): to_base64(data) for epoch, data in found.items()}
        return values

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return the epochs in the values of the payload; raises ValueError if they cannot be decoded."""
        proofs = _by_epoch(values["proofs"], (0, MAC_BYTES))
        earlier = _by_epoch(values.get("earlier", {}), (_WRAPPED_BYTES,))
        retired = _by_epoch(values.get("retired", {}), (MAC_BYTES,))
        found = cls(values["key_epoch"], proofs, earlier, retired)
        valid = sorted(proofs)
        sound = (
            type(found.current) is int
            and found.current in proofs
            and 1 <= len(valid) <= 2
            and valid == list(range(valid[0], valid[-1] + 1))
            and sorted(earlier) == list(range(valid[-1]))
            and sorted(retired) == list(range(valid[0]))
            and (all(proofs.values()) or found.without_secret)
        )
        if not sound:
            raise ValueError(f"key epoch {found.current!r} with proofs for {valid}")
        return found

    # ---- steps ---------------------------------------------------------------------------------------------------

    def added(self, cluster_id: bytes, keys: MetadataKeys, key: bytes) -> Self:
        """Return a copy with another epoch, of the metadata key ``key``; its proofs are still to be made."""
        epoch = self.newest + 1
        wrapped = wrap_key(_wrapping(key, cluster_id, epoch - 1), keys.by_epoch[epoch - 1])
        return replace(
            self, proofs={**self.proofs, epoch: bytes(MAC_BYTES)}, earlier={**self.earlier, epoch - 1: wrapped}
        )

    def switched(self) -> Self:
        """Return a copy with the newest epoch as the current one; its proofs are still to be made."""
        return replace(self, current=self.newest)

    def without_old(self, cluster_id: bytes, keys: MetadataKeys) -> Self:
        """Return a copy without the epoch before the current one; its proofs are still to be made."""
        old = self.current - 1
        proofs = {epoch: proof for epoch, proof in self.proofs.items() if epoch != old}
        return replace(
            self, proofs=proofs, retired={**self.retired, old: retired_mac(keys.by_epoch[old], cluster_id, old)}
        )

    # ---- keys ----------------------------------------------------------------------------------------------------

    def unwrapped(self, cluster_id: bytes, epoch: int, key: bytes) -> dict[int, bytes]:
        """Return the metadata keys of all epochs before one, from the key of that one."""
        found: dict[int, bytes] = {}
        for before in range(epoch - 1, -1, -1):
            opened = unwrap_key(_wrapping(key, cluster_id, before), self.earlier[before])
            if opened is None:
                raise ValueError(f"the metadata key of epoch {before} was not encrypted under that of {before + 1}")
            key = found[before] = opened
        return found

    def retired_epoch(self, cluster_id: bytes, keys: Sequence[bytes]) -> int | None:
        """Return the retired epoch to which one of the metadata keys belongs; None if none does."""
        for epoch, mac in self.retired.items():
            if any(hmac.compare_digest(mac, retired_mac(key, cluster_id, epoch)) for key in keys):
                return epoch
        return None


def _by_epoch(values: object, sizes: tuple[int, ...]) -> dict[int, bytes]:
    """Decode an object of the payload with bytes for each of some epochs."""
    if not isinstance(values, dict) or len(values) > EPOCH_MAX + 1:
        raise ValueError("no object with a name for each key epoch")
    found = {}
    for name, text in values.items():
        data = from_base64(text)
        if not name.isdecimal() or name != str(int(name)) or len(data) not in sizes:
            raise ValueError(f"{len(data)} bytes for key epoch {name!r:.20}")
        found[int(name)] = data
    return found


def _wrapping(key: bytes, cluster_id: bytes, epoch: int) -> bytes:
    """Return the key that encrypts the metadata key of an epoch, from the metadata key of the next one."""
    return mac_of(key, _WRAP_LABEL, cluster_id, epoch.to_bytes(4, "big"))


def retired_mac(key: bytes, cluster_id: bytes, epoch: int) -> bytes:
    """Return the MAC by which a retired secret is recognised."""
    return mac_of(key, _RETIRED_LABEL, cluster_id, epoch.to_bytes(4, "big"))
