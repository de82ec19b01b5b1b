"""Expressions of Prometheus's language, held against the list of metrics, which is held against a live scrape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from pybk import errors
from pybk.admin.exported_metrics import EXPORTED, HISTOGRAM, exported_name
from pybk.errors import PybkError
from pybk.healing.repair_report import COPIES, SHORT_REASONS
from pybk.healing.scrub_schedule import ScrubKind
from pybk.healing.situation import HoldReason, Status
from pybk.health import HEALTH_STATES, REASON_STATES
from pybk.metrics import code_of

promql: Any = pytest.importorskip("promql_parser")

OF_TARGETS: Final = {"cluster", "instance", "job"}
"""Labels that the scrape configuration gives."""

RECORDED: Final = {"pybk:append_latency_seconds:p99": {"store", "ledger_type", "at"}}
"""What recording rules make of metrics, and its labels."""

_CODES: Final = {
    code_of(each("text"))
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, PybkError) and each.__init__ is PybkError.__init__
}

VALUES: Final[Mapping[tuple[str, str], set[str]]] = {
    ("pybk_append_errors_total", "code"): _CODES,
    ("pybk_auditor_pass_timestamp_seconds", "check"): {"bookies", "ledgers"},
    ("pybk_health_reason", "code"): set(REASON_STATES),
    ("pybk_members", "state"): {each.value for each in Status},
    ("pybk_repair_hold", "reason"): {each.value for each in HoldReason},
    ("pybk_scrub_oldest_timestamp_seconds", "kind"): {each.value for each in ScrubKind},
    ("pybk_state", "pybk_state"): set(HEALTH_STATES),
    ("pybk_under_replicated_ledgers", "copies"): set(COPIES),
    ("pybk_under_replicated_ledgers", "reason"): set(SHORT_REASONS),
}
"""The values of labels, by metric and label, as far as an expression may name one."""


def labels_of() -> dict[str, set[str]]:
    """Return the labels of each series that may be named, besides those of targets."""
    found = dict(RECORDED)
    for name, about in EXPORTED.items():
        shown, labels = exported_name(name, about.kind), {"store", *about.labels}
        if about.kind == HISTOGRAM:
            found.update({f"{shown}_bucket": labels | {"le"}, f"{shown}_count": labels, f"{shown}_sum": labels})
        else:
            found[shown] = labels
    return found


def mistakes(expression: str) -> list[str]:
    """Return what is wrong with an expression: metrics, labels and values of labels that do not exist.

    Raises:
        ValueError: It is no expression.
    """
    known, nodes = labels_of(), list(_nodes(promql.parse(expression)))
    found: list[str] = []
    seen = set(OF_TARGETS)
    for node in nodes:
        if isinstance(node, promql.VectorSelector):
            if node.name not in known:
                found.append(f"there is no metric {node.name}")
                continue
            seen |= known[node.name]
            for matcher in node.matchers.matchers:
                found += _mistakes_of_matcher(node.name, matcher.name, matcher.value, known[node.name])
    for node in nodes:
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found += [f"no metric here has the label {each}" for each in node.modifier.labels if each not in seen]
    return found


def _mistakes_of_matcher(metric: str, label: str, value: str, labels: set[str]) -> Iterator[str]:
    if label not in labels | OF_TARGETS:
        yield f"{metric} has no label {label}"
    elif "$" not in value:
        values = VALUES.get((metric, label))
        if values is None:
            yield f"it is not known which values {label} of {metric} has"
        else:
            yield from (f"{label} of {metric} is never {each}" for each in re.split(r"\|", value) if each not in values)


def _nodes(expression: Any) -> list[Any]:
    """Return all nodes of an expression."""
    nodes: list[Any] = []
    promql.walk(expression, nodes.append)
    return nodes
