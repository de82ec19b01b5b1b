"""The meaning of the options of a bookie as a service; ``docs/admin/production.md`` has their table."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Final

from pybk.admin.http_options import HttpSettings
from pybk.admin.options.rows import THE_TABLE
from pybk.admin.options.settings import DEFAULT, ConfigFile, Option, Setting, resolve
from pybk.config import StoreConfig
from pybk.credentials import CLUSTER_SECRET, Secret
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.metadata.url import SCHEMES, parse_url

CREDENTIALS: Final = "CREDENTIALS_DIRECTORY"
"""The variable in which systemd passes the directory of a service's credentials."""

CREDENTIAL: Final = "cluster-secret"
"""The name of the credential that has the cluster's secret."""

VARIABLES: Final = (f"{CLUSTER_SECRET}_NEXT",)
"""Variables of ``pybk.credentials`` that are not options."""

STORE_LEFT_OUT: Final = {
    "tier_policy": "closed ledgers move by calls of clients",
    "scrub_seconds": "a bookie follows the settings of its cluster",
    "scrub_bytes_per_second": "a bookie follows the settings of its cluster",
    "background": "a bookie's store works in the background",
    "bookie_patience_seconds": "the process of a bookie has no writers of ledgers",
    "on_span": "`[trace] on_span` names it",
}
"""Settings of a store that are not options of a bookie, and the reasons."""


OPTIONS: Final[Sequence[Option]] = tuple(map(Option, THE_TABLE.rows("options")))
"""All options of ``pybk bookie``."""

RELOADED: Final = frozenset(option.name for option in OPTIONS if "reload" in option.row.words)
"""The options that a reload follows; the others are those of the next start."""


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


def resolved(flags: Mapping[str, Any], environment: Mapping[str, str], file: ConfigFile | None) -> dict[str, Setting]:
    """Return the value of each option of a bookie, by name; a secret that systemd passes counts as its file.

    Raises:
        UsageError: The file or the environment has a wrong name or value.
    """
    settings = resolve(OPTIONS, flags, environment, file, variables=VARIABLES)
    by_file, by_value = settings["cluster.secret_file"], settings["cluster.secret"]
    directory = environment.get(CREDENTIALS, "")
    credential = os.path.join(directory, CREDENTIAL)
    if by_file.origin == DEFAULT and by_value.origin == DEFAULT and directory and os.path.exists(credential):
        settings[by_file.option.name] = by_file._replace(value=credential, origin=CREDENTIALS)
    elif by_value.origin != DEFAULT and file is not None and by_file.origin == file.path:
        settings[by_file.option.name] = by_file._replace(value="", origin=DEFAULT)  # a variable comes before the file
    elif by_file.origin != DEFAULT:
        settings[by_value.option.name] = by_value._replace(value=None, origin=DEFAULT)
    return settings


def settings_of(settings: Mapping[str, Setting]) -> BookieSettings:
    """Return the settings of a bookie from the values of its options.

    Raises:
        UsageError: Values contradict each other, or a file that one of them names cannot be read.
    """
    check(settings)
    value = {name: each.value for name, each in settings.items()}
    rack = value["bookie.rack"]
    if not rack and value["bookie.rack_file"]:
        rack = _read_rack(value["bookie.rack_file"])
    return BookieSettings(
        directory=value["bookie.directory"],
        listen=value["bookie.listen"],
        metadata=value["cluster.metadata"],
        secret=_secret_of(value),
        advertise=value["bookie.advertise"],
        advertise_check=value["bookie.advertise_check"],
        bookie_id=value["bookie.id"],
        rack=rack,
        moved=value["bookie.moved"],
        replace=value["bookie.replace"],
        config=_traced(_config_of(settings), settings["trace.on_span"]),
        tiers=_tiers_of(value),
        start_wait_s=value["bookie.start_wait_s"],
        drain_s=value["bookie.drain_s"],
        drain_idle_s=value["bookie.drain_idle_s"],
        http=_http_of(value),
        log_format=value["log.format"],
        log_level=value["log.level"],
    )


def check(settings: Mapping[str, Setting]) -> None:
    """Check the options that can be checked on any host: addresses, names, the URL, directories, store settings.

    Raises:
        UsageError: A value is wrong.
    """
    # Imported here, because they import numpy and ZeroMQ, and `pybk bookie serve --help` needs the options alone.
    from pybk.bookie.advertising import check_advertised
    from pybk.metadata.registration import check_new_name
    from pybk.replication.locations import Location
    from pybk.storage.volumes import check_distinct
    from pybk.transport.curve import check_address

    with _named(settings["bookie.listen"]):
        for address in settings["bookie.listen"].value:
            check_address(address, secret=True)
    with _named(settings["bookie.advertise"]):
        for address in settings["bookie.advertise"].value:
            check_advertised(address)
    name = settings["bookie.id"]
    if name.value is not None:
        with _named(name):
            check_new_name(name.value)
    metadata = settings["cluster.metadata"]
    if metadata.value is not None:
        with _named(metadata):
            url = parse_url(metadata.value)
            if url.parts.scheme not in SCHEMES:
                raise url.invalid(" has an unknown scheme")
    with _named(settings["bookie.rack"]):
        Location.parse(settings["bookie.rack"].value)
    with _of_section(settings, "tier"):
        tiers = _tiers_of({name: each.value for name, each in settings.items()}) or {}
        check_distinct(settings["bookie.directory"].value, tiers)
    _config_of(settings)


@contextmanager
def _named(setting: Setting) -> Iterator[None]:
    """Begin the text of an error with the origin of a setting."""
    try:
        yield
    except UsageError as error:
        option, origin = setting.option, setting.origin
        raise UsageError(f"{origin}: [{option.section}] {option.key}: {error}") from None


@contextmanager
def _of_section(settings: Mapping[str, Setting], section: str) -> Iterator[None]:
    """Begin the text of an error with the origins of the settings of a section."""
    try:
        yield
    except UsageError as error:
        origins = {each.origin for each in settings.values() if each.option.section == section} - {DEFAULT}
        raise UsageError(f"{', '.join(sorted(origins))}: [{section}]: {error}") from None


def _config_of(settings: Mapping[str, Setting]) -> StoreConfig:
    values = {each.option.key: each.value for each in settings.values() if each.option.section == "store"}
    values["default_tier"] = StorageHint(values["default_tier"])
    if values["group"] is not None and values["group"].isdecimal():
        values["group"] = int(values["group"])
    with _of_section(settings, "store"):
        return StoreConfig(**values)


def _traced(config: StoreConfig, setting: Setting) -> StoreConfig:
    """Return the settings of a store with the hook that the option names."""
    if not setting.value:
        return config
    module, _, name = setting.value.partition(":")
    with _named(setting):
        try:
            return replace(config, on_span=getattr(import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            raise UsageError(
                f"{setting.value!r:.200} cannot be imported ({error}); it takes MODULE:NAME, such as "
                "pybk.adapters.opentelemetry:on_span, of a module that Python finds"
            ) from error


def _tiers_of(value: Mapping[str, Any]) -> dict[StorageHint, list[str]] | None:
    tiers = {tier: list(value[f"tier.{tier.value}"]) for tier in StorageHint if value[f"tier.{tier.value}"]}
    return tiers or None


def _http_of(value: Mapping[str, Any]) -> HttpSettings | None:
    given = {key: value[f"http.{key}"] for key in ("listen", "tokens", "certificate", "key")}
    if not given["listen"]:
        unused = sorted(key for key, each in given.items() if each)
        if unused:
            raise UsageError(f"[http] {unused[0]} is given, and [http] listen is not: nothing is served over HTTP then")
        return None
    return HttpSettings(**given)


def _secret_of(value: Mapping[str, Any]) -> Secret | None:
    secret = Secret(file=value["cluster.secret_file"] or None, variable=CLUSTER_SECRET, private=True)
    return secret if secret.read_all() else None


def _read_rack(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is to hold the location of the bookie, and cannot be read: {error}") from error
