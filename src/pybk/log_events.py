"""The names of logged events, which stay the same from one version to the next, because programs search for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EVENTS: Final[Mapping[str, str]] = {
    # the process of a bookie
    "bookie.starting": "The process of a bookie begins: it opens its directory and its cluster.",
    "bookie.waiting": "The metadata store cannot be reached, and the start is tried again.",
    "bookie.started": "The bookie is registered and serves.",
    "bookie.reloaded": "Secrets, the log level and the file of options were read again.",
    "bookie.reload_failed": "They could not be read; the earlier values stay in use.",
    "bookie.draining": "The process will end: the bookie is read-only, and lets writers leave.",
    "bookie.drained": "Writers have left, or had their time.",
    "bookie.stopping": "The bookie removes its registration and closes its store.",
    "bookie.stopped": "The process ends.",
    # a bookie
    "bookie.registered": "The bookie is registered in the metadata store.",
    "bookie.session_lost": "The registration of the bookie is gone, for example with its session, and is made again.",
    "bookie.superseded": "Another process has registered under the bookie's name.",
    "bookie.removed": "The bookie was removed from the cluster, and ends.",
    "bookie.state": "A person or the auditor changed its state: active, maintenance, draining, drained, removed.",
    "bookie.read_only": "The bookie takes no entries of writers.",
    "bookie.writable": "The bookie takes entries of writers again.",
    "bookie.failed": "The bookie stopped serving, because of an error.",
    "bookie.unchecked_address": "The bookie did not check that others can reach it at the address that it registers.",
    "bookie.metadata_outdated": "The metadata store was put back to an older state, so the bookie takes no entries.",
    "bookie.salvaged": "The bookie's store is damaged; the bookie opened the rest of it.",
    "bookie.loss": "The bookie lost durable data.",
    "bookie.limbo.begun": "Ledgers are in limbo: the bookie may lack entries of them, which its peers have.",
    "bookie.limbo.lifted": "No ledger is in limbo any more.",
    "ledger.limbo.lifted": "A ledger is out of limbo.",
    # the cluster
    "auditor.elected": "This process is the auditor of the cluster.",
}
"""The meaning of each event."""


NOT_LIMITED: Final[Mapping[str, Any]] = {"not_limited": True}
"""The argument ``extra`` of a logging call whose lines may not be dropped, such as records of changes.

The caller bounds the number of these lines.
"""


def log_event(name: str, **fields: Any) -> dict[str, Any]:
    """Return the argument ``extra`` of a logging call that reports an event.

    Args:
        name: The event, one of ``EVENTS``.
        fields: The other fields of a line in JSON; neither payloads nor keys, and no lists that grow with a cluster.
    """
    return {"event": name, "fields": fields}
