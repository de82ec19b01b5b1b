"""The options of a store; every number has its unit in its name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final, Literal

from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.spans import OnSpan

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

_ANY_BYTES: Final = 1 << 60

PATIENCE_MAX: Final = 86_400
"""The maximum of ``bookie_patience_seconds``."""

BYTE_LIMITS: Final = {
    "max_entry_bytes": (1, GIB),
    "free_bytes_low": (0, _ANY_BYTES),
    "free_bytes_ok": (0, _ANY_BYTES),
    # Offsets in a file have 32 bits, and a file may exceed its size by one commit.
    "max_outstanding_bytes": (64 * KIB, GIB),
    "log_file_bytes": (MIB, GIB),
    "unchecked_tail_bytes": (4 * MIB, _ANY_BYTES),
    "cold_block_bytes": (4 * KIB, GIB),
    "ssd_block_bytes": (4 * KIB, GIB),
    "index_cache_bytes": (MIB, _ANY_BYTES),
    "scrub_bytes_per_second": (64 * KIB, _ANY_BYTES),
}
"""The minimum and maximum of each setting in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPolicy:
    """The policy by which closed ledgers move automatically to a tier.

    A ledger moves if it is closed, in another tier, at least ``min_age_seconds`` old, and at least ``min_bytes`` long.

    Args:
        target: The tier to move ledgers to.
        min_age_seconds: Seconds since the ledger was created.
        min_bytes: Payload bytes of the ledger.

    Raises:
        UsageError: A value is out of range.
    """

    target: StorageHint = StorageHint.HDD
    min_age_seconds: float = 7 * 86_400.0
    min_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse values that cannot work; the error names them."""
        if not isinstance(self.target, StorageHint):
            raise UsageError(
                f"target is {self.target!r:.100}; it takes StorageHint.NVME, StorageHint.SSD or StorageHint.HDD"
            )
        for name in ("min_age_seconds", "min_bytes"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= _ANY_BYTES:
                raise UsageError(f"{name} is {value!r:.100}; it takes a number from 0 to {_ANY_BYTES}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    """Settings of one store; all have working defaults.

    Behaviour:
        max_entry_bytes: Longest payload accepted. Default 5 MiB.
        default_tier: The tier of ledgers without hints.
        tier_policy: The policy that moves closed ledgers by age and size; None moves nothing.
        cold_compression: ``"zstd"`` compresses cold segments of the HDD tier; None stores them as they are.
        free_bytes_low: The store turns read-only when a device has less free space; ledgers can still be deleted then.
            Default 256 MiB. If this is at least ``unchecked_tail_bytes``, a checkpoint can copy all live entries. With
            less, a full store deletes dead files first and compacts the others one by one. With almost none, a delete
            may have no space for its own record.
        free_bytes_ok: The store accepts appends again when every device has this much. Default 320 MiB.

    Performance:
        max_outstanding_bytes: The limit of bytes that are appended and not yet durable; appends beyond it wait or fail.
            Default 32 MiB.
        log_file_bytes: The size up to which log files grow. Default 64 MiB.
        unchecked_tail_bytes: The limit of log bytes that are not checkpointed, which the next open reads. A checkpoint
            starts at half of the limit, and appends wait at the limit. Default 256 MiB.
        cold_block_bytes: Bytes of entries per cold-segment record. Default 256 KiB.
        ssd_block_bytes: Bytes of entries per SSD record; one point read copies this much. Default 32 KiB.
        index_cache_bytes: Bytes of index pages kept in memory for readers. Default 32 MiB.
        fill_ratio: Files with a smaller share of live bytes are compacted. Default 0.85.
        scrub_seconds: Seconds in which the checksum of each stored entry is checked once, in the background; 0 checks
            none. Default 30 days. A bookie follows the settings of its cluster instead.
        scrub_bytes_per_second: The limit of bytes that these checks read in a second. Default 32 MiB.
        background: Whether checkpoints, preallocation, collection, the writing of deferred entries and the checks of
            stored entries run in the background; False leaves them to explicit calls.

    Cluster:
        bookie_patience_seconds: Seconds for which a writer keeps its pending entries and waits for bookies to return or
            to register while too few answer; then it fails with NotEnoughBookiesError. It waits equally long for a
            metadata store that does not answer during an ensemble change, and then fails with MetadataUnreachableError.
            0 does not wait. Default 30. A store without bookies does not use it.

    Access:
        group: The name or number of the group whose members may use the store as well: new directories and files have
            mode 2770 or 0660 and belong to the group. None makes a new store for its owner alone (0700, 0600), and
            keeps the access to an existing store.

    Tracing:
        on_span: A hook that is called at the start and at the end of operations, such as
            ``pybk.adapters.opentelemetry.on_span``; None for none. See ``docs/howto/tracing.md``.
    """

    max_entry_bytes: int = 5 * MIB
    default_tier: StorageHint = StorageHint.NVME
    tier_policy: TierPolicy | None = None
    cold_compression: Literal["zstd"] | None = None
    free_bytes_low: int = 256 * MIB
    free_bytes_ok: int = 320 * MIB

    max_outstanding_bytes: int = 32 * MIB
    log_file_bytes: int = 64 * MIB
    unchecked_tail_bytes: int = 256 * MIB
    cold_block_bytes: int = 256 * KIB
    ssd_block_bytes: int = 32 * KIB
    index_cache_bytes: int = 32 * MIB
    fill_ratio: float = 0.85
    scrub_seconds: float = 30 * 86_400.0
    scrub_bytes_per_second: int = 32 * MIB
    background: bool = True

    bookie_patience_seconds: float = 30.0

    group: str | int | None = None

    on_span: OnSpan | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work; the error names them."""
        for name, (least, most) in BYTE_LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UsageError(f"{name} is {value!r:.100}; it takes a whole number of bytes from {least} to {most}")
        ratio: object = self.fill_ratio
        if not isinstance(ratio, (int, float)) or not 0.0 < ratio <= 0.95:
            raise UsageError(f"fill_ratio is {ratio!r:.100}; it lies above 0 and at most at 0.95")
        seconds: object = self.scrub_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= _ANY_BYTES:
            raise UsageError(f"scrub_seconds is {seconds!r:.100}; it takes a number of seconds, and 0 for no checks")
        patience: object = self.bookie_patience_seconds
        if isinstance(patience, bool) or not isinstance(patience, (int, float)) or not 0 <= patience <= PATIENCE_MAX:
            raise UsageError(
                f"bookie_patience_seconds is {patience!r:.100}; it takes seconds, from 0, which does not wait, to "
                f"{PATIENCE_MAX}"
            )
        if not isinstance(self.default_tier, StorageHint):
            raise UsageError(
                f"default_tier is {self.default_tier!r:.100}; it takes StorageHint.NVME, StorageHint.SSD or "
                "StorageHint.HDD"
            )
        if self.tier_policy is not None and not isinstance(self.tier_policy, TierPolicy):
            raise UsageError(f"tier_policy is {self.tier_policy!r:.100}; it takes TierPolicy(...) or None")
        if not isinstance(self.background, bool):
            raise UsageError(f"background is {self.background!r:.100}; it takes True or False")
        group: object = self.group
        if isinstance(group, bool) or not isinstance(group, str | int | None) or group == "":
            raise UsageError(f"group is {group!r:.100}; it takes a group's name, its number, or None")
        on_span: object = self.on_span
        if on_span is not None and not callable(on_span):
            raise UsageError(f"on_span is {on_span!r:.100}; it takes a function, see pybk.OnSpan, or None")
        if self.free_bytes_ok < self.free_bytes_low:
            raise UsageError(f"free_bytes_ok {self.free_bytes_ok} is below free_bytes_low {self.free_bytes_low}")
        if self.cold_compression not in (None, "zstd"):
            raise UsageError(f"cold_compression is {self.cold_compression!r:.100}; it takes None or 'zstd'")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of all settings."""
        return tuple(field.name for field in fields(cls))
