"""The options of executors' bookies in Spark's configuration: ``spark.pybk.bookie.NAME``.

They are the options of ``pybk bookie`` from the same table, with the same values; ``LEFT_OUT`` has the exceptions. A
value in Spark's configuration counts before the variable of the option in the environment of the executor, which may
differ from host to host.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Final

from pybk.credentials import cut_value
from pybk.errors import UsageError
from pybk.flags import StorageHint
from pybk.options.bookie import OPTIONS, check, resolved, tiers_of
from pybk.options.rows import Option
from pybk.options.settings import Setting
from pybk.spark.executors.bookie_settings import BookieSettings

PREFIX: Final = "spark.pybk.bookie."

_ADDRESS: Final = "a bookie listens, at a free port, where its host reaches the metadata store from"
_SECRET: Final = "Spark shows its configuration; name a file by cluster.secret_file, or set PYBK_CLUSTER_SECRET"
_SERVICE: Final = "it is for a bookie that runs as a service, without Spark"

LEFT_OUT: Final = {
    "listen": _ADDRESS,
    "advertise": _ADDRESS,
    "advertise_check": _ADDRESS,
    "id": "a slot keeps the name of its bookie",
    "start_wait_s": "a supervisor starts the bookie again",
    "drain_s": "linger_s says how long a bookie serves after its executor",
    "drain_idle_s": "linger_s says how long a bookie serves after its executor",
    "moved": "it is for one start of one bookie",
    "replace": "it is for one start of one bookie",
    "cluster.secret": _SECRET,
    "http.listen": _SERVICE,
    "http.tokens": _SERVICE,
    "http.certificate": _SERVICE,
    "http.key": _SERVICE,
    "log.format": _SERVICE,
    "log.level": _SERVICE,
    "trace.on_span": _SERVICE,
}
"""Options of ``pybk bookie`` that Spark's configuration does not have, and the reasons."""

_LINGER: Final = Option(
    "linger_s --linger-s SECONDS:seconds_of_day =0 | the time for which a bookie still serves reads after its "
    "executor has ended; its entries are copied to other bookies meanwhile",
    section="bookie",
)

FIELDS: Final = {
    "cluster.metadata": "metadata",
    "directory": "directory",
    "cluster.secret_file": "secret_file",
    "rack": "rack",
    "linger_s": "linger_s",
}
"""The options that are attributes of ``BookieSettings``."""


def short_name(option: Option) -> str:
    """Return the name of an option after ``PREFIX``."""
    return option.name.removeprefix("bookie.")


KNOWN: Final = {short_name(option): option for option in (*OPTIONS, _LINGER) if short_name(option) not in LEFT_OUT}
"""All options of executors' bookies, by their names after ``PREFIX``."""


def settings_in(
    configuration: Mapping[str, str], options: Mapping[str, str] | None = None, **given: Any
) -> BookieSettings:
    """Return the settings of bookies in a session's configuration.

    Args:
        configuration: The configuration; keys that do not begin with ``PREFIX`` are other programs'.
        options: Texts of further options, which count before it.
        given: Attributes of the settings that count before both; None for those that these may have.

    Raises:
        UsageError: A name or a value is wrong, or values contradict each other.
    """
    texts = {key.removeprefix(PREFIX): text for key, text in configuration.items() if key.startswith(PREFIX)}
    texts |= options or {}
    fields = {FIELDS[name]: value for name, value in _values(texts).items() if name in FIELDS}
    fields |= {name: value for name, value in given.items() if value is not None}
    if "metadata" not in fields or "directory" not in fields:
        raise UsageError(
            "give metadata and directory, or both to configure() before the session is created, or set "
            f"{PREFIX}cluster.metadata and {PREFIX}directory in Spark's configuration"
        )
    settings = BookieSettings(**fields, options={name: text for name, text in texts.items() if name not in FIELDS})
    check(resolve_for(settings, {}))
    return settings


def configuration_of(settings: BookieSettings) -> dict[str, str]:
    """Return the configuration that has the settings."""
    texts = {name: str(value) for name, field in FIELDS.items() if (value := getattr(settings, field))}
    return {f"{PREFIX}{name}": text for name, text in (texts | dict(settings.options)).items()}


def resolve_for(settings: BookieSettings, environment: Mapping[str, str]) -> dict[str, Setting]:
    """Return the values of all options of a bookie, by name, with their origins.

    Args:
        settings: The settings of the bookie.
        environment: The environment of its executor, for the options that the settings do not have.

    Raises:
        UsageError: A name or a value is wrong.
    """
    values = {name: value for name, field in FIELDS.items() if (value := getattr(settings, field))}
    values.pop("linger_s", None)  # the executor's alone
    values |= _values(settings.options)
    found = resolved({KNOWN[name].name: value for name, value in values.items()}, environment, None)
    for name in values:
        found[KNOWN[name].name] = found[KNOWN[name].name]._replace(origin=f"{PREFIX}{name}")
    return found


def tiers_in(settings: Mapping[str, Setting], slot: str) -> dict[StorageHint, list[str]] | None:
    """Return the directories of tiers for the bookie of a slot: one in each that the options name; None for none."""
    named = tiers_of({name: each.value for name, each in settings.items()}) or {}
    own = os.path.basename(slot)
    return {tier: [os.path.join(path, own) for path in paths] for tier, paths in named.items()} or None


def _values(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of options by name; raises UsageError for a name or a value that is wrong."""
    values = {}
    for name, text in texts.items():
        option = KNOWN.get(name)
        if option is None:
            raise UsageError(_unknown(name))
        try:
            values[name] = option.reader.of_text(text)
        except ValueError:
            raise UsageError(f"{PREFIX}{name}: {option.reader.wrong(text)}") from None
        paths = values[name] if option.count else (text,) if option.kind == "path" else ()
        if not all(map(os.path.isabs, paths)):
            raise UsageError(
                f"{PREFIX}{name} is {cut_value(text, 200)}; it takes absolute paths, as executors run elsewhere"
            )
    return values


def _unknown(name: str) -> str:
    """Return the error for a name that no option has; it does not contain the value, which may be a secret."""
    if name in LEFT_OUT:
        return f"{PREFIX}{name} is not an option of executors' bookies: {LEFT_OUT[name]}"
    close = difflib.get_close_matches(name, KNOWN, 1)
    meant = f"did you mean {PREFIX}{close[0]}?" if close else f"there are {', '.join(KNOWN)}"
    return f"there is no option {PREFIX}{name:.100}: {meant}"
