"""Makes the Grafana board of pybk's metrics: ``python deploy/grafana/board.py`` writes ``pybk.json`` next to this file.

The board is in Grafana's form for import: a list of panels, each with its place and its expressions. A row is a title
over panels, which stand from left to right, as many as fit into ``COLUMNS``. The variables ``cluster``, ``bookie`` and
``ledger_type`` choose what is shown; ``bookie`` is the label ``store``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

COLUMNS: Final = 24
"""How many columns a board has."""

HEIGHT: Final = 7
"""The height of a panel, in Grafana's units of 30 pixels."""

SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

CLUSTER: Final = 'cluster=~"$cluster"'
BOOKIE: Final = f'{CLUSTER}, store=~"$bookie"'
TYPE: Final = f'{CLUSTER}, ledger_type=~"$ledger_type"'
BOOKIE_TYPE: Final = f'{BOOKIE}, ledger_type=~"$ledger_type"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A panel.

    Attributes:
        title: Its title.
        shows: Its expressions, each with the legend of its series.
        unit: The unit of the values, as Grafana names it.
        kind: ``timeseries``, or ``stat`` for the present values as numbers.
        about: What it means, where the title does not say it.
        width: How many columns it takes.
    """

    title: str
    shows: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    width: int = 8


def rate(metric: str, labels: str, by: str) -> str:
    """Return the expression for the rate of a counter per second, by a label."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def quantile(q: float, metric: str, labels: str, by: str) -> str:
    """Return the expression for a quantile of a histogram, by a label."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', labels, f'{by}, le')})"


def of_auditor(metric: str, own: str = "", by: str = "", labels: str = CLUSTER) -> str:
    """Return the expression for a gauge of the auditor, which one process of each cluster has.

    Args:
        metric: The metric.
        own: Its own labels.
        by: By which of them the values are added up.
        labels: The conditions for its labels.
    """
    once = f"max by ({', '.join(filter(None, ('cluster', own)))}) ({metric}{{{labels}}})"
    return f"sum by ({by}) ({once})" if by else f"sum({once})"


VERDICT: Final = (
    Panel(
        title="Processes by state",
        kind="stat",
        shows=((f"sum by (pybk_state) (pybk_state{{{BOOKIE}}}) > 0", "{{pybk_state}}"),),
    ),
    Panel(
        title="Processes by reason",
        kind="stat",
        about="Why they are not ok; no_spare_bookie is a note.",
        shows=((f"sum by (code) (pybk_health_reason{{{BOOKIE}}})", "{{code}}"),),
    ),
    Panel(
        title="Bookies by status",
        kind="stat",
        shows=((f"{of_auditor('pybk_members', 'state', 'state')} > 0", "{{state}}"),),
    ),
    Panel(
        title="Ledgers with too few copies, by live copies",
        kind="stat",
        shows=((of_auditor("pybk_under_replicated_ledgers", "reason, copies", "copies"), "{{copies}}"),),
    ),
    Panel(
        title="Ledgers that no worker can mend",
        kind="stat",
        shows=(
            (of_auditor("pybk_ledgers_lost"), "lost"),
            (of_auditor("pybk_ledgers_waiting_for_owner"), "waiting for owner"),
            (of_auditor("pybk_ledgers_without_target"), "without target"),
            (of_auditor("pybk_ledgers_stuck"), "stuck"),
        ),
    ),
    Panel(
        title="Repairs are done in",
        kind="stat",
        unit="s",
        width=4,
        about="What is planned and not done, at the rate of the last ten minutes.",
        shows=(
            (
                f"""(max by (cluster) (pybk_repair_planned_bytes{{{CLUSTER}}})
- max by (cluster) (pybk_repair_done_bytes{{{CLUSTER}}}))
/ sum by (cluster) (rate(pybk_repair_copied_bytes_total{{{CLUSTER}}}[10m]))""",
                "{{cluster}}",
            ),
        ),
    ),
    Panel(
        title="Auditors",
        kind="stat",
        width=4,
        about="One for each cluster.",
        shows=((f"sum by (cluster) (pybk_auditor_leader{{{CLUSTER}}})", "{{cluster}}"),),
    ),
    Panel(
        title="Holds and pauses of repairs",
        shows=(
            (f"{of_auditor('pybk_repair_hold', 'reason', 'reason')} > 0", "{{reason}}"),
            (
                f"max by (cluster) (pybk_repair_paused_until_timestamp_seconds{{{CLUSTER}}}) > bool time()",
                "paused {{cluster}}",
            ),
        ),
    ),
)

APPENDS: Final = (
    Panel(
        title="Appends at clients, by type",
        about="Entries that an ack quorum has acknowledged.",
        shows=((rate("pybk_append_client_entries_total", TYPE, "ledger_type"), "{{ledger_type}}"),),
        unit="cps",
    ),
    Panel(
        title="Bytes appended at clients, by type",
        shows=((rate("pybk_append_client_bytes_total", TYPE, "ledger_type"), "{{ledger_type}}"),),
        unit="Bps",
    ),
    Panel(
        title="Appends at clients take",
        shows=tuple(
            (
                quantile(q, "pybk_append_client_latency_seconds", TYPE, "ledger_type"),
                f"{{{{ledger_type}}}} p{q * 100:g}",
            )
            for q in (0.5, 0.99, 0.999)
        ),
        unit="s",
    ),
    Panel(
        title="Appends to stores, by type",
        about="Entries that became durable in bookies and embedded stores.",
        shows=((rate("pybk_appended_entries_total", BOOKIE_TYPE, "ledger_type"), "{{ledger_type}}"),),
        unit="cps",
    ),
    Panel(
        title="Bytes appended to stores, by store",
        shows=((rate("pybk_appended_bytes_total", BOOKIE_TYPE, "store"), "{{store}}"),),
        unit="Bps",
    ),
    Panel(
        title="Appends to stores take",
        shows=tuple(
            (
                quantile(q, "pybk_append_latency_seconds", BOOKIE_TYPE, "ledger_type"),
                f"{{{{ledger_type}}}} p{q * 100:g}",
            )
            for q in (0.5, 0.99, 0.999)
        ),
        unit="s",
    ),
    Panel(
        title="Appends that failed, by error",
        shows=((rate("pybk_append_errors_total", TYPE, "code"), "{{code}}"),),
        unit="cps",
    ),
    Panel(
        title="Places of ensembles that changed, by reason",
        shows=((rate("pybk_ensemble_changes_total", CLUSTER, "reason"), "{{reason}}"),),
        unit="cps",
    ),
    Panel(
        title="Lag of the slowest bookie behind its writers",
        shows=((f"max by (store) (pybk_writer_lag_bytes{{{CLUSTER}}})", "{{store}}"),),
        unit="bytes",
    ),
)

LOGS: Final = (
    Panel(
        title="Records that the slowest subscription has not acknowledged",
        about="Of the logs whose writers a process has.",
        shows=((f"max by (store) (pybk_subscription_lag_records{{{CLUSTER}}})", "{{store}}"),),
    ),
    Panel(
        title="Age of the oldest record that a subscription has not acknowledged",
        shows=((f"time() - min by (store) (pybk_subscription_oldest_timestamp_seconds{{{CLUSTER}}})", "{{store}}"),),
        unit="s",
    ),
)

LOG: Final = (
    Panel(
        title="Syncs of the log take (p99)",
        shows=((quantile(0.99, "pybk_log_sync_seconds", BOOKIE, "store"), "{{store}}"),),
        unit="s",
    ),
    Panel(
        title="Bytes of a commit (median)",
        shows=((quantile(0.5, "pybk_log_commit_bytes", BOOKIE, "store"), "{{store}}"),),
        unit="bytes",
    ),
    Panel(
        title="Turns of the serving thread take (p99)",
        shows=((quantile(0.99, "pybk_bookie_turn_seconds", BOOKIE, "store"), "{{store}}"),),
        unit="s",
    ),
    Panel(
        title="Share of time that the serving thread works",
        shows=((rate("pybk_bookie_turn_seconds_sum", BOOKIE, "store"), "{{store}}"),),
        unit="percentunit",
    ),
    Panel(
        title="Requests to bookies, by operation",
        shows=((rate("pybk_bookie_request_seconds_count", BOOKIE, "op"), "{{op}}"),),
        unit="reqps",
    ),
    Panel(
        title="Requests that bookies refused, by reason",
        shows=((rate("pybk_bookie_rejected_total", BOOKIE, "reason"), "{{reason}}"),),
        unit="reqps",
    ),
)

READS: Final = (
    Panel(
        title="Reads, by tier",
        shows=((rate("pybk_read_entries_total", BOOKIE_TYPE, "tier"), "{{tier}}"),),
        unit="cps",
    ),
    Panel(
        title="Bytes read, by tier",
        shows=((rate("pybk_read_bytes_total", BOOKIE_TYPE, "tier"), "{{tier}}"),),
        unit="Bps",
    ),
    Panel(
        title="Reads take, by tier",
        shows=tuple(
            (quantile(q, "pybk_read_latency_seconds", BOOKIE_TYPE, "tier"), f"{{{{tier}}}} p{q * 100:g}")
            for q in (0.5, 0.99)
        ),
        unit="s",
    ),
    Panel(
        title="Reads that failed, by error",
        shows=((rate("pybk_read_errors_total", BOOKIE_TYPE, "code"), "{{code}}"),),
        unit="cps",
    ),
    Panel(
        title="Copies that reads repaired",
        shows=((rate("pybk_read_repairs_total", BOOKIE, "store"), "{{store}}"),),
        unit="cps",
    ),
    Panel(
        title="Ledgers, by state",
        shows=((of_auditor("pybk_ledgers", "state, ledger_type", "state", TYPE), "{{state}}"),),
    ),
)

TIERS: Final = (
    Panel(
        title="Bytes, by tier and kind",
        shows=((f"sum by (tier, kind) (pybk_tier_bytes{{{BOOKIE}}})", "{{tier}} {{kind}}"),),
        unit="bytes",
    ),
    Panel(
        title="Free bytes of devices",
        shows=((f"min by (store, directory) (pybk_free_bytes{{{BOOKIE}}})", "{{store}} {{directory}}"),),
        unit="bytes",
    ),
    Panel(
        title="Devices are full in",
        about="By the trend of a day; without a value where the space does not shrink.",
        shows=(
            (
                f"""min by (store, directory) (pybk_free_bytes{{{BOOKIE}}}
/ (-deriv(pybk_free_bytes{{{BOOKIE}}}[1d]) > 0))""",
                "{{store}} {{directory}}",
            ),
        ),
        unit="s",
    ),
    Panel(
        title="Bytes that moves and compactions write",
        shows=((rate("pybk_moved_bytes_total", BOOKIE, "tier, reason"), "{{tier}} {{reason}}"),),
        unit="Bps",
    ),
    Panel(
        title="Checkpoints take (p99)",
        shows=((quantile(0.99, "pybk_checkpoint_seconds", BOOKIE, "store"), "{{store}}"),),
        unit="s",
    ),
    Panel(
        title="Bytes of log that an open would read",
        shows=((f"max by (store) (pybk_tail_bytes{{{BOOKIE}}})", "{{store}}"),),
        unit="bytes",
    ),
)

REPAIR: Final = (
    Panel(
        title="Bytes to be copied, by reason",
        shows=((of_auditor("pybk_under_replicated_bytes", "reason, copies", "reason"), "{{reason}}"),),
        unit="bytes",
    ),
    Panel(
        title="Bytes copied, by reason",
        shows=((rate("pybk_repair_copied_bytes_total", BOOKIE, "reason"), "{{reason}}"),),
        unit="Bps",
    ),
    Panel(
        title="Repairs of ledgers, by result",
        shows=((rate("pybk_repair_ledgers_total", BOOKIE, "result"), "{{result}}"),),
        unit="cps",
    ),
    Panel(
        title="Share of the rate that appends leave to copies",
        shows=((f"min by (store) (pybk_repair_throttle_ratio{{{BOOKIE}}})", "{{store}}"),),
        unit="percentunit",
    ),
    Panel(
        title="Surplus copies",
        shows=((f"sum by (store) (pybk_surplus_bytes{{{BOOKIE}}})", "{{store}}"),),
        unit="bytes",
    ),
    Panel(
        title="Misplaced ledgers",
        shows=((of_auditor("pybk_misplaced_ledgers"), "misplaced"),),
    ),
    Panel(
        title="Bytes that scrubs read, by tier",
        shows=((rate("pybk_scrub_bytes_total", BOOKIE_TYPE, "tier"), "{{tier}}"),),
        unit="Bps",
    ),
    Panel(
        title="Damaged records that scrubs found",
        shows=((f"sum by (store, tier) (pybk_scrub_damaged_records_total{{{BOOKIE_TYPE}}})", "{{store}} {{tier}}"),),
    ),
    Panel(
        title="Age of the oldest check, in periods",
        about="Above 1 a check is due, above 2 it is overdue.",
        shows=(
            (
                f"""max by (store, kind) ((time() - pybk_scrub_oldest_timestamp_seconds{{{BOOKIE}}})
/ pybk_scrub_period_seconds{{{BOOKIE}}})""",
                "{{store}} {{kind}}",
            ),
        ),
    ),
)

METADATA: Final = (
    Panel(
        title="Requests to the metadata store take (p99), by operation",
        shows=((quantile(0.99, "pybk_metadata_op_seconds", BOOKIE, "op"), "{{op}}"),),
        unit="s",
    ),
    Panel(
        title="Requests to the metadata store, by result",
        shows=((rate("pybk_metadata_op_seconds_count", BOOKIE, "result"), "{{result}}"),),
        unit="reqps",
    ),
    Panel(
        title="Sessions that were lost",
        shows=((rate("pybk_session_losses_total", BOOKIE, "store"), "{{store}}"),),
        unit="cps",
    ),
    Panel(
        title="Bookies that are registered",
        shows=((f"sum by (cluster) (pybk_registered{{{BOOKIE}}})", "{{cluster}}"),),
    ),
    Panel(
        title="Ledgers in limbo",
        shows=((f"sum by (store) (pybk_limbo_ledgers{{{BOOKIE}}})", "{{store}}"),),
    ),
    Panel(
        title="Seconds since the auditor completed a check",
        shows=(
            (
                f"time() - max by (cluster, check) (pybk_auditor_pass_timestamp_seconds{{{CLUSTER}}})",
                "{{cluster}} {{check}}",
            ),
        ),
        unit="s",
    ),
)

PROCESS: Final = (
    Panel(
        title="Processes, by version and feature level",
        kind="stat",
        shows=((f"count by (version, level) (pybk_build_info{{{BOOKIE}}})", "{{version}}, level {{level}}"),),
    ),
    Panel(
        title="Open since",
        kind="stat",
        shows=((f"time() - max by (store) (pybk_up_since_timestamp_seconds{{{BOOKIE}}})", "{{store}}"),),
        unit="s",
    ),
    Panel(
        title="Bytes appended and not durable yet",
        shows=((f"max by (store) (pybk_outstanding_bytes{{{BOOKIE}}})", "{{store}}"),),
        unit="bytes",
    ),
)

ROWS: Final = (
    ("Verdict", VERDICT),
    ("Appends", APPENDS),
    ("Log and serving thread", LOG),
    ("Subscriptions", LOGS),
    ("Reads and ledgers", READS),
    ("Tiers", TIERS),
    ("Repairs and scrubs", REPAIR),
    ("Metadata store", METADATA),
    ("Processes", PROCESS),
)
"""The rows, from top to bottom: each a title and its panels."""

VARIABLES: Final = (
    ("cluster", "Cluster", "label_values(pybk_build_info, cluster)"),
    ("bookie", "Bookie or store", f"label_values(pybk_build_info{{{CLUSTER}}}, store)"),
    ("ledger_type", "Ledger type", f"label_values(pybk_appended_entries_total{{{CLUSTER}}}, ledger_type)"),
)
"""The variables: each its name, its title and the query for its values."""


def board() -> dict[str, Any]:
    """Return the board as Grafana imports it."""
    return {
        "annotations": {"list": []},
        "editable": True,
        "graphTooltip": 1,
        "panels": list(placed(ROWS)),
        "refresh": "30s",
        "schemaVersion": 39,
        "tags": ["pybk"],
        "templating": {"list": [source_variable(), *(variable(*each) for each in VARIABLES)]},
        "time": {"from": "now-3h", "to": "now"},
        "timezone": "browser",
        "title": "pybk",
        "uid": "pybk",
        "version": 1,
    }


def placed(rows: Iterable[tuple[str, tuple[Panel, ...]]]) -> Iterator[dict[str, Any]]:
    """Yield rows and their panels, each at its place."""
    number, top = 1, 0
    for title, panels in rows:
        yield {
            "collapsed": False,
            "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": top},
            "id": number,
            "panels": [],
            "title": title,
            "type": "row",
        }
        number, top, left = number + 1, top + 1, 0
        for panel in panels:
            if left + panel.width > COLUMNS:
                top, left = top + HEIGHT, 0
            yield panel_json(panel, number, left, top)
            number, left = number + 1, left + panel.width
        top += HEIGHT


def panel_json(panel: Panel, number: int, left: int, top: int) -> dict[str, Any]:
    """Return a panel at its place, as Grafana has it."""
    now = panel.kind == "stat"
    found: dict[str, Any] = {
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "gridPos": {"h": HEIGHT, "w": panel.width, "x": left, "y": top},
        "id": number,
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"} if now else {},
        "targets": [
            {"datasource": SOURCE, "expr": expression, "instant": now, "legendFormat": legend, "refId": chr(65 + place)}
            for place, (expression, legend) in enumerate(panel.shows)
        ],
        "title": panel.title,
        "type": panel.kind,
    }
    if panel.about:
        found["description"] = panel.about
    return found


def source_variable() -> dict[str, Any]:
    """Return the variable that chooses the Prometheus."""
    return {"label": "Prometheus", "name": "datasource", "query": "prometheus", "type": "datasource"}


def variable(name: str, label: str, query: str) -> dict[str, Any]:
    """Return a variable; all values are chosen at first, and stand for series without the label, too."""
    return {
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "datasource": SOURCE,
        "includeAll": True,
        "label": label,
        "multi": True,
        "name": name,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "type": "query",
    }


def text() -> str:
    """Return the board as the text of its file."""
    return json.dumps(board(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("pybk.json").write_text(text(), encoding="utf-8")
