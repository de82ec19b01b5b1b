"""The options of a bookie as a service, in any process that serves as one: their names, their reader, their meaning."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Final

from pybk.bookie.advertising import check_advertised
from pybk.config import StoreConfig
from pybk.credentials import CLUSTER_SECRET, Secret
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.metadata.registration import check_new_name
from pybk.metadata.url import SCHEMES, parse_url
from pybk.options.rows import THE_TABLE, Option
from pybk.options.settings import DEFAULT, ConfigFile, Setting, resolve
from pybk.replication.locations import Location
from pybk.storage.io.filesystem import read_regular
from pybk.storage.volumes import check_distinct
from pybk.transport.curve import check_address

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

_RACK_BYTES_MAX: Final = 4096


OPTIONS: Final[Sequence[Option]] = THE_TABLE.options("options")
"""All options of ``pybk bookie``."""

RELOADED: Final = frozenset(option.name for option in OPTIONS if "reload" in option.words)
"""The options that a reload follows; the others are those of the next start."""


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


def check(settings: Mapping[str, Setting]) -> None:
    """Check the options that can be checked on any host: addresses, names, the URL, directories, store settings.

    Raises:
        UsageError: A value is wrong.
    """
    checks: Mapping[str, Callable[[str], object]] = {
        "bookie.listen": partial(check_address, secret=True),
        "bookie.advertise": check_advertised,
        "bookie.id": check_new_name,
        "cluster.metadata": _check_url,
        "bookie.rack": Location.parse,
    }
    for name, checking in checks.items():
        value = settings[name].value
        with _named(settings[name]):
            for each in value if isinstance(value, tuple) else () if value is None else (value,):
                checking(each)
    with _of_section(settings, "tier"):
        tiers = tiers_of({name: each.value for name, each in settings.items()}) or {}
        check_distinct(settings["bookie.directory"].value, tiers)
    config_of(settings)


def _check_url(text: str) -> None:
    url = parse_url(text)
    if url.parts.scheme not in SCHEMES:
        raise url.invalid(" has an unknown scheme")


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


def config_of(settings: Mapping[str, Setting]) -> StoreConfig:
    """Return the settings of the bookie's store, without a hook for traces.

    Raises:
        UsageError: Values contradict each other.
    """
    values = {each.option.key: each.value for each in settings.values() if each.option.section == "store"}
    values["default_tier"] = StorageHint(values["default_tier"])
    if values["group"] is not None and values["group"].isdecimal():
        values["group"] = int(values["group"])
    with _of_section(settings, "store"):
        return StoreConfig(**values)


def traced(config: StoreConfig, setting: Setting) -> StoreConfig:
    """Return the settings of a store with the hook that the option names.

    Raises:
        UsageError: The hook cannot be imported.
    """
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


def tiers_of(value: Mapping[str, Any]) -> dict[StorageHint, list[str]] | None:
    """Return the directories of tiers that lie outside of the bookie's own, by the values of options; None for none."""
    tiers = {tier: list(value[f"tier.{tier.value}"]) for tier in StorageHint if value[f"tier.{tier.value}"]}
    return tiers or None


def secret_of(value: Mapping[str, Any]) -> Secret | None:
    """Return the source of the cluster's secret, by the values of options; None for a cluster without a secret.

    Raises:
        UsageError: The secret cannot be read.
    """
    secret = Secret(file=value["cluster.secret_file"] or None, variable=CLUSTER_SECRET, private=True)
    return secret if secret.read_all() else None


def rack_of(value: Mapping[str, Any]) -> str:
    """Return the location of the bookie, by the values of options, which may name a file that has it.

    Raises:
        UsageError: The file cannot be read.
    """
    path: str = value["bookie.rack_file"]
    rack: str = value["bookie.rack"]
    if rack or not path:
        return rack
    try:
        return read_regular(path, _RACK_BYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is to hold the location of the bookie, and cannot be read: {error}") from error
