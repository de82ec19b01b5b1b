"""Probes for supervisors of processes, answered from the values that were seen last.

*Live* means that a restart would not help, *ready* that the process can serve; *health* is the state of the cluster.
The first two do not depend on other processes: a process is live even without the metadata store, and ready even if
other bookies are not. A probe that may wait does so for the first look, or for the next one after a pause without
requests; any other is answered from known values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from pybk.admin.http.json_values import as_body
from pybk.admin.http.problems import JSON, TEXT
from pybk.admin.http.view import View
from pybk.health import REASON_STATES, Health
from pybk.operations.cluster_checks import ClusterVerdict

_UNREADY: Final = frozenset({"not_registered", "draining", "drained", "retired"})
"""Codes of reasons with which a process is not ready, besides its states."""

_OF_OTHERS: Final = frozenset({"no_bookie", "too_few_bookies"})
"""Codes of reasons with which a client is fit, and the bookies that it needs are not there."""

TURN_SECONDS: Final = 30.0
"""The time after which a bookie whose serving thread has not turned hangs; it turns each second, even without requests.

The same time holds for the thread that looks; older values are not used.
"""

SEEN_SECONDS: Final = 0.5
"""The time for which ``/livez`` waits for the first look; a kubelet gives a probe one second, then ends the pod."""


def live(view: View, request: Request, wait: bool) -> Response:
    """Return 200 unless the process has to be started again."""
    seen, bookie = view.seen_within(SEEN_SECONDS if wait else 0.0), view.bookie
    reasons = [] if seen is None else _own_reasons(seen.health, {"failed"})
    idle_s = 0.0 if bookie is None or not bookie.turned_ns else (time.monotonic_ns() - bookie.turned_ns) / 1e9
    if idle_s > TURN_SECONDS:
        reasons.append(f"the thread that serves clients has not turned for {idle_s:.0f} s")
    return _answer(not reasons, reasons)


def _own_reasons(health: Health, states: Collection[str], codes: Collection[str] = ()) -> list[str]:
    """Return the texts of reasons that cause one of some states, or have one of some codes, but for those of others."""
    return [
        each.text
        for each in health.reasons
        if (REASON_STATES[each.code] in states or each.code in codes) and each.code not in _OF_OTHERS
    ]


def ready(view: View, request: Request, wait: bool) -> Response:
    """Return 200 if the process serves: registered, not drained, and out of limbo unless ``?allow=limbo``."""
    seen = view.seen() if wait else view.seen_now()
    refused = {"failed"} if request.query_params.get("allow") == "limbo" else {"failed", "in_limbo"}
    reasons = _own_reasons(seen.health, refused, _UNREADY)
    if (age_s := time.monotonic() - seen.looked) > TURN_SECONDS:
        reasons.append(f"what is known of it is {age_s:.0f} s old: the log may say why")
    return _answer(not reasons, reasons)


def health(view: View, request: Request, wait: bool) -> Response:
    """Return 200 unless the cluster is bad, or a store degraded; with ``?verbose`` the verdict and its reasons."""
    seen = view.seen() if wait else view.seen_now()
    if seen.cluster is None:
        verdict, reasons = str(seen.health.state), seen.health.reasons
        well = seen.health.state in ("ok", "read_only") and not seen.trouble
    else:
        verdict, reasons = seen.cluster.verdict.value, seen.cluster.reasons
        well = seen.cluster.verdict is not ClusterVerdict.BAD and not seen.trouble
    if "verbose" not in request.query_params:
        return _answer(well, [each.text for each in reasons] if not well else [])
    document: Mapping[str, Any] = {
        "verdict": verdict,
        "reasons": reasons,
        "trouble": seen.trouble,
        "seen_ns": seen.seen_ns,
    }
    return Response(as_body(document), _status(well), media_type=JSON)


def _status(well: bool) -> int:
    return int(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE)


def _answer(well: bool, reasons: list[str]) -> Response:
    return Response("\n".join(reasons or ["ok"]) + "\n", _status(well), media_type=TEXT)


PROBES: Final[Mapping[str, Callable[[View, Request, bool], Response]]] = {
    "/livez": live,
    "/readyz": ready,
    "/healthz": health,
}
