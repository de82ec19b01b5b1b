"""Options of Spark's Kafka source and sink that have no meaning for logs of pybk, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pybk.errors import UsageError

CLIENT: Final = "kafka."
"""The beginning of the names of the settings of Kafka's client."""

CLIENT_REPEATS: Final = "the client asks again by itself; leave it out"

_ELSEWHERE: Final = {
    "kafka.bootstrap.servers": "give metadataUri, the URL of a cluster's metadata store, or path, a store's directory",
}


def refuse_elsewhere(options: Mapping[str, str], elsewhere: Mapping[str, str]) -> None:
    """Refuse options that have no meaning for logs.

    Args:
        options: The options, as Spark passes them.
        elsewhere: What to do instead, by the option's name in lower case. It counts before what is known here of
            the settings of Kafka's client.

    Raises:
        UsageError: There is such an option; the error says what to use.
    """
    for name in options:
        remedy = elsewhere.get(name.lower(), _ELSEWHERE.get(name.lower()))
        if remedy is None and name.lower().startswith(CLIENT):
            remedy = "it is a setting of Kafka's client, which is not used; leave it out"
        if remedy is not None:
            raise UsageError(f"option {name} does not apply to a log of pybk: {remedy}")
