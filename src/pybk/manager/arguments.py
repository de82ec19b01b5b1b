"""Checks of the arguments of ``LedgerManager``, and the errors for arguments that are wrong."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, TypedDict, TypeVar

from pybk.backend import LedgerBackend
from pybk.config import StoreConfig
from pybk.credentials import ClusterSecret, Credentials, Secret, cut_value
from pybk.deferral import LateModule
from pybk.errors import IllegalOperationError, NoSuchLedgerError, UsageError
from pybk.flags import LedgerType, StorageHint, WriteFlag
from pybk.ledger.digest import DigestType, is_keyed
from pybk.values import flag_of, whole

if TYPE_CHECKING:
    from pybk.manager import connect
else:
    connect = LateModule("pybk.manager.connect")  # an embedded store does not need ZeroMQ

Progress = Callable[[int, int], None]
"""Called with what is done and what is to be done in all, 0 for unknown."""

Tiers = Mapping[StorageHint, str | Sequence[str]]
"""The directories of tiers that lie outside of the store's own: one path, or several that are filled in turn."""

LEDGER_ID_MAX: Final = (1 << 63) - 2

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|(?:lmdb|zk):/")
"""The beginning of a URL; ``pathlib.Path`` makes one slash of several."""

E = TypeVar("E", bound=Enum)


class LedgerOptions(TypedDict, total=False):
    """Keyword arguments of ``LedgerManager.create_ledger``."""

    password: bytes | Secret
    secret: bytes | Secret | None
    ledger_type: str
    storage_hints: Iterable[StorageHint]
    write_flags: WriteFlag
    digest_type: DigestType
    custom_metadata: Mapping[str, bytes] | None
    ledger_id: int | None
    ensemble_size: int | None
    write_quorum: int | None
    ack_quorum: int | None
    insecure: bool


class ClusterOptions(TypedDict, total=False):
    """Keyword arguments of ``LedgerManager.open`` that make the process a bookie.

    Attributes:
        metadata: The URL of the cluster's metadata store, as for ``connect``; required.
        listen: One or more addresses to serve on: ``tcp://host:port`` (port ``*`` for any), ``ipc://path``; required.
        advertise: One or more addresses that clients use instead of those of ``listen``, such as
            ``tcp://bookie1.example.org:3181``; required if clients cannot connect to those of ``listen``, such as
            ``tcp://0.0.0.0:3181``. Port ``*`` stands for the port that the bookie listens on. Before it serves, the
            bookie checks that it can be reached at the first address.
        cluster_secret: The secret of the cluster, as for ``connect``; None for a cluster of one host that has none.
        bookie_id: The bookie's name; None keeps the name in the directory, or makes one for a new directory.
        rack: The label of where the bookie stands, for placement, such as ``zone/rack/host``.
        replace: The bookie takes the name of a bookie whose directory is lost for good; its entries count as lost.
        moved: The bookie's directory was moved since its last start, not copied: no other copy exists.
        autorecovery: This process takes part in repairing the cluster: it may be elected auditor, and it copies to its
            bookie what lost bookies had. True by default.
    """

    metadata: str
    listen: str | Sequence[str]
    advertise: str | Sequence[str]
    cluster_secret: ClusterSecret | None
    bookie_id: str | None
    rack: str
    moved: bool
    replace: bool
    autorecovery: bool


def join_cluster(
    root: str, tiers: Tiers | None, config: StoreConfig, *, read_only: bool, options: ClusterOptions
) -> LedgerBackend:
    """Open a directory as a bookie's, let the bookie serve, and return the backend of its cluster."""
    known = ClusterOptions.__annotations__
    if options.keys() - known:
        unknown = ", ".join(sorted(options.keys() - known))
        raise UsageError(f"{unknown:.100}: no such argument; there are {', '.join(known)}")
    if read_only:
        raise UsageError("a bookie's directory cannot be opened read-only as one; leave out read_only or metadata")
    listen, url = options.get("listen"), options.get("metadata")
    if not listen or not url:
        raise UsageError("a bookie needs both metadata='zk://...' and listen='tcp://127.0.0.1:3181'")
    rack = options.get("rack", "")
    if not isinstance(rack, str):
        raise UsageError(f"rack is {rack!r:.100}; it takes a string, such as '/room/rack'")
    return connect.join(
        root,
        _addresses(listen, "listen"),
        url,
        options.get("cluster_secret"),
        config,
        tiers=tiers,
        bookie_id=options.get("bookie_id"),
        rack=rack,
        moved=flag_of(options.get("moved", False), "moved"),
        replace_lost=flag_of(options.get("replace", False), "replace"),
        advertise=_addresses(options.get("advertise", ()), "advertise"),
        autorecovery=flag_of(options.get("autorecovery", True), "autorecovery"),
    )


def _addresses(addresses: object, name: str) -> list[str]:
    """Return addresses that are given as one string or as several."""
    given = [addresses] if isinstance(addresses, str) else addresses
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise UsageError(
            f"{name} is {cut_value(addresses, 100)}; it takes an address, such as 'tcp://127.0.0.1:3181', or several"
        )
    found = list(given)
    for address in found:
        if not isinstance(address, str):
            raise UsageError(
                f"{name} has {cut_value(address, 100)}; an address is a string, such as 'tcp://127.0.0.1:3181'"
            )
    return found


def path_of(path: str | os.PathLike[str]) -> str:
    """Return the path of a store's directory as ``str``."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise UsageError(f"path is {cut_value(path, 100)}; it takes a str or a path") from None
    if not name:
        raise UsageError("path is empty; give the store's directory, or '.' for the current one")
    if "\0" in name:
        raise UsageError(f"path is {cut_value(path, 100)}; no path holds a NUL character")
    return name


def store_path_of(path: str | os.PathLike[str]) -> str:
    """Return the path of a directory to open a store in as ``str``; raise UsageError if it is the URL of a cluster."""
    name = path_of(path)
    if _URL.match(name):
        raise UsageError(
            f"path is {cut_value(path, 100)}, a URL; it takes a directory; for a cluster, use "
            "LedgerManager.connect(url) and pass that manager"
        )
    return name


def config_of(config: object) -> StoreConfig:
    """Return valid settings; None stands for the defaults."""
    if config is None:
        return StoreConfig()
    if not isinstance(config, StoreConfig):
        raise UsageError(f"config is {config!r:.100}; it takes StoreConfig(...), or None for the defaults")
    return config


def member_of(kind: type[E], value: object, name: str) -> E:
    """Return the member of an enum that an argument names."""
    try:
        return kind(value)
    except (ValueError, TypeError) as error:
        known = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise UsageError(f"{name}: {error!s:.150}; there are {known}") from error


def user_type(name: str) -> LedgerType:
    """Return the type of a ledger that a user creates."""
    ledger_type = LedgerType(name)
    if ledger_type.is_system:
        raise UsageError(f"ledger_type {name!r} is the system's own; choose a name that does not begin with '.'")
    return ledger_type


def system_type(ledger_type: object) -> LedgerType:
    """Return the type of a ledger that a package built on pybk creates for itself."""
    if ledger_type != LedgerType.METADATA:
        raise UsageError(f"ledger_type is {ledger_type!r:.100}; the one system type to create is LedgerType.METADATA")
    return LedgerType.METADATA


def digest_type_of(value: object, given: Credentials, *, insecure: bool) -> DigestType:
    """Return the digest type of a new ledger."""
    digest_type = member_of(DigestType, value, "digest_type")
    flag_of(insecure, "insecure")
    if is_keyed(digest_type) and not given and not insecure:
        raise UsageError(
            f"{digest_type.name} with an empty password proves nothing, as anybody can make the key: pass secret=... "
            "or password=... from a file or the environment (pybk.Secret reads both), or insecure=True if that is meant"
        )
    if digest_type is DigestType.NONE and not insecure:
        raise UsageError("DigestType.NONE finds no damage at all; pass insecure=True if that is meant")
    return digest_type


def hints_of(hints: Iterable[StorageHint]) -> frozenset[StorageHint]:
    """Return the storage hints of a new ledger."""
    if isinstance(hints, (str, bytes)) or not isinstance(hints, Iterable):
        raise UsageError(f"storage_hints is {hints!r:.100}; it takes a set of hints: {{StorageHint.NVME}}")
    if isinstance(hints, frozenset) and all(isinstance(hint, StorageHint) for hint in hints):
        return hints  # shared by all ledgers that are made with it
    return frozenset(member_of(StorageHint, hint, "storage_hints") for hint in hints)


def id_for(backend: LedgerBackend, ledger_id: int | None) -> int:
    """Return the id of a ledger to be created: the requested id, or one that was never assigned."""
    if ledger_id is None:
        ledger_id = backend.new_ledger_id()
        if ledger_id > LEDGER_ID_MAX:
            raise IllegalOperationError(
                f"ledger {LEDGER_ID_MAX} exists and has the highest possible id; choose a free one: ledger_id=..."
            )
    number = whole(ledger_id)
    if number is None or not 0 <= number <= LEDGER_ID_MAX:
        raise UsageError(f"ledger_id is {ledger_id!r:.100}; it is a whole number from 0 to {LEDGER_ID_MAX}")
    return number


def whole_from(value: object, least: int, name: str, what: str, most: int | None = None) -> int:
    """Return an argument that is a whole number of at least ``least``, and at most ``most``; ``what`` says of what."""
    found = whole(value)
    if found is None or found < least or (most is not None and found > most):
        bounds = f"from {least} up" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name} is {value!r:.50}; it takes {what}, a whole number {bounds}")
    return found


def bound_of(number: object, name: str, default: int) -> int:
    """Return a bound of ledger ids: a whole number from 0 up, ``default`` for None."""
    if number is None:
        return default
    found = whole(number)
    if found is None or found < 0:
        raise UsageError(f"{name} is {number!r:.100}; it takes a ledger id: a whole number from 0 up")
    return found


def quorums_of(
    ensemble_size: int | None, write_quorum: int | None, ack_quorum: int | None
) -> tuple[int | None, int | None, int | None]:
    """Return the requested ensemble size and quorums as plain integers; None stays None."""
    asked = {"ensemble_size": ensemble_size, "write_quorum": write_quorum, "ack_quorum": ack_quorum}
    plain = {name: None if count is None else whole(count) for name, count in asked.items()}
    for name, count in asked.items():
        if count is not None and plain[name] is None:
            raise UsageError(f"{name} is {count!r:.100}; it takes a number of bookies, from 1 up, or None")
    return plain["ensemble_size"], plain["write_quorum"], plain["ack_quorum"]


def existing_id(ledger_id: object) -> int:
    """Return a valid ledger id as a plain integer."""
    number = whole(ledger_id)
    if number is None:
        raise UsageError(f"a ledger id is a whole number, not {ledger_id!r:.100}")
    if not 0 <= number <= LEDGER_ID_MAX:
        raise NoSuchLedgerError(f"there is no ledger {number}: ids lie within 0 to {LEDGER_ID_MAX}")
    return number


def existing_ids(ledger_ids: object) -> list[int]:
    """Return the ids of ledgers that may exist, ascending, each once."""
    if isinstance(ledger_ids, (str, bytes)) or not isinstance(ledger_ids, Iterable):
        raise UsageError(f"ledger_ids is {ledger_ids!r:.100}; it takes an iterable of ledger ids, such as [3, 5]")
    return sorted({existing_id(ledger_id) for ledger_id in ledger_ids})


def progress_of(progress: object) -> Progress:
    """Return the function that progress is reported to; one that does nothing for None."""
    if progress is None:
        return _ignore
    if not callable(progress):
        raise UsageError(
            f"progress is {progress!r:.100}; it takes a function of two numbers, the bytes done and the bytes in all"
        )
    return progress


def _ignore(done: int, total: int) -> None:
    """Do nothing; stands for the progress that a caller does not ask for."""
