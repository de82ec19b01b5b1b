"""The settings of a bookie's process as a service; ``docs/admin/production.md`` has the table of its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pybk.admin.http_options import HttpSettings
from pybk.config import StoreConfig
from pybk.credentials import Secret
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.options.bookie import check, config_of, rack_of, secret_of, tiers_of, traced
from pybk.options.settings import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class BookieSettings:
    """The settings of a bookie's process.

    Attributes:
        directory: The bookie's own directory.
        listen: Addresses to listen on.
        metadata: The URL of the cluster's metadata store.
        secret: The cluster's secret, or its source; None for none.
        advertise: Addresses to register for clients instead of ``listen``; empty registers those of ``listen``.
        advertise_check: Whether the bookie checks at its start that it can be reached at the first one.
        bookie_id: Its name; None for the name in the directory, or a new one if the directory is new.
        rack: Its location.
        moved: Whether its directory was moved, and not copied, since its last start.
        replace: Whether it takes the name of a bookie whose directory is lost for good.
        config: The settings of its store.
        tiers: The directories of tiers that lie outside of ``directory``.
        start_wait_s: Seconds for which the start is repeated while the metadata store cannot be reached.
        drain_s: The most seconds that it gives writers to leave when it is stopped.
        drain_idle_s: Seconds without an add after which writers count as gone.
        http: The settings of its HTTP port; None without one.
        log_format: ``text`` or ``json``.
        log_level: ``debug``, ``info``, ``warning`` or ``error``.
    """

    directory: str
    listen: Sequence[str]
    metadata: str
    secret: Secret | None = None
    advertise: Sequence[str] = ()
    advertise_check: bool = True
    bookie_id: str | None = None
    rack: str = ""
    moved: bool = False
    replace: bool = False
    config: StoreConfig = field(default_factory=StoreConfig)
    tiers: Mapping[StorageHint, Sequence[str]] | None = None
    start_wait_s: float = 0.0
    drain_s: float = 30.0
    drain_idle_s: float = 2.0
    http: HttpSettings | None = None
    log_format: str = "text"
    log_level: str = "info"


def settings_of(settings: Mapping[str, Setting]) -> BookieSettings:
    """Return the settings of a bookie from the values of its options.

    Raises:
        UsageError: Values contradict each other, or a file that one of them names cannot be read.
    """
    check(settings)
    value = {name: each.value for name, each in settings.items()}
    return BookieSettings(
        directory=value["bookie.directory"],
        listen=value["bookie.listen"],
        metadata=value["cluster.metadata"],
        secret=secret_of(value),
        advertise=value["bookie.advertise"],
        advertise_check=value["bookie.advertise_check"],
        bookie_id=value["bookie.id"],
        rack=rack_of(value),
        moved=value["bookie.moved"],
        replace=value["bookie.replace"],
        config=traced(config_of(settings), settings["trace.on_span"]),
        tiers=tiers_of(value),
        start_wait_s=value["bookie.start_wait_s"],
        drain_s=value["bookie.drain_s"],
        drain_idle_s=value["bookie.drain_idle_s"],
        http=_http_of(value),
        log_format=value["log.format"],
        log_level=value["log.level"],
    )


def _http_of(value: Mapping[str, Any]) -> HttpSettings | None:
    given = {key: value[f"http.{key}"] for key in ("listen", "tokens", "certificate", "key")}
    if not given["listen"]:
        unused = sorted(key for key, each in given.items() if each)
        if unused:
            raise UsageError(f"[http] {unused[0]} is given, and [http] listen is not: nothing is served over HTTP then")
        return None
    return HttpSettings(**given)
