"""The labels and the meaning of each exported metric; ``docs/reference/metrics.md`` lists them as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Exported(NamedTuple):
    """The description of a metric.

    Attributes:
        kind: ``COUNTER``, ``GAUGE`` or ``HISTOGRAM``.
        labels: The names of its labels, except ``store``.
        help: Its meaning, a sentence.
    """

    kind: str
    labels: tuple[str, ...]
    help: str


COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"

_TYPE: Final = ("ledger_type", "tier")

EXPORTED: Final[Mapping[str, Exported]] = {
    # appends, reads and the log
    "appended_entries": Exported(COUNTER, _TYPE, "Entries that became durable."),
    "appended_bytes": Exported(COUNTER, _TYPE, "Encoded bytes of entries that became durable."),
    "append_latency_ns": Exported(HISTOGRAM, _TYPE, "From staging an entry to durable, per entry."),
    "append_client_entries": Exported(COUNTER, _TYPE, "Entries that an ack quorum has acknowledged to a client."),
    "append_client_bytes": Exported(COUNTER, _TYPE, "Encoded bytes of entries that an ack quorum has acknowledged."),
    "append_client_latency_ns": Exported(
        HISTOGRAM, _TYPE, "From staging an entry to the acknowledgement of an ack quorum."
    ),
    "read_entries": Exported(COUNTER, _TYPE, "Entries that were read and verified."),
    "read_bytes": Exported(COUNTER, _TYPE, "Encoded bytes of entries that were read and verified."),
    "read_latency_ns": Exported(HISTOGRAM, _TYPE, "From asking for entries to verified entries, per batch."),
    "append_errors": Exported(
        COUNTER,
        ("ledger_type", "tier", "code"),
        "Entries whose append failed, and calls that were refused, by the class of the error.",
    ),
    "read_errors": Exported(
        COUNTER,
        ("ledger_type", "tier", "code"),
        "Reads of a batch or of an entry that failed, by the class of the error.",
    ),
    "log_sync_ns": Exported(HISTOGRAM, (), "How long it took to write and sync a commit of the log."),
    "log_commit_bytes": Exported(HISTOGRAM, (), "Bytes of a commit of the log."),
    "checkpoint_ns": Exported(HISTOGRAM, (), "How long a checkpoint took that had entries to write."),
    "tier_bytes": Exported(
        GAUGE, ("tier", "kind"), "Bytes of live records in the files of a tier, and of all else in these files."
    ),
    "moved_bytes": Exported(
        COUNTER, ("tier", "reason"), "Bytes of records that a move or a compaction wrote to a tier."
    ),
    "checkpoints": Exported(COUNTER, (), "Checkpoints of the log."),
    "compactions": Exported(COUNTER, (), "Compactions of cold segments."),
    "request_faults": Exported(COUNTER, (), "Requests that a bookie refused because of a defect in it."),
    "member_recoveries": Exported(
        COUNTER, (), "Rights to recover a ledger without its password that a bookie granted."
    ),
    "unsealed_ledgers": Exported(COUNTER, _TYPE, "Readers that found their ledger closed without a seal."),
    # the client of a cluster, and the metadata store
    "ensemble_changes": Exported(
        COUNTER, ("reason",), "Places of ensembles that writers filled anew, by what the bookie before had done."
    ),
    "away_members": Exported(
        COUNTER,
        _TYPE,
        "Members of ensembles of new ledgers that were away or read-only, because too few bookies took entries.",
    ),
    "misplaced_choices": Exported(COUNTER, _TYPE, "Ensembles that were chosen with write sets in too few zones."),
    "writer_lag_bytes": Exported(
        GAUGE,
        (),
        "Confirmed bytes that the slowest bookie of a writer has not acknowledged; the largest value of all writers.",
    ),
    "read_repairs": Exported(COUNTER, (), "Copies that reads found damaged or missing, and sent to bookies again."),
    "metadata_op_ns": Exported(HISTOGRAM, ("op", "result"), "How long the metadata store took for a request."),
    "session_losses": Exported(COUNTER, (), "Sessions with the metadata store that ended without being closed."),
    # logs
    "subscription_lag_records": Exported(
        GAUGE,
        (),
        "Records that the slowest durable subscription has not acknowledged, of logs whose writers are here.",
    ),
    "subscription_oldest_timestamp_ns": Exported(
        GAUGE, (), "Since when the oldest record exists that a subscription has not acknowledged."
    ),
    # the auditor
    "auditor_leader": Exported(GAUGE, (), "Whether this process is the cluster's auditor; the sum over all must be 1."),
    "auditor_pass_timestamp_ns": Exported(GAUGE, ("check",), "When the auditor last completed a check."),
    "auditor_findings": Exported(COUNTER, ("reason",), "Marks that this process published as auditor."),
    "members": Exported(GAUGE, ("state",), "Bookies that belong to the cluster, by status."),
    "repair_hold": Exported(GAUGE, ("reason",), "1 for each reason to hold repairs, 0 for the others."),
    "repair_paused_until_timestamp_ns": Exported(
        GAUGE, (), "When a pause of the repairs ends; 0 if they are not paused."
    ),
    "repair_grace_ns": Exported(GAUGE, (), "How long a bookie may be absent before its copies count as lost."),
    "largest_ensemble": Exported(
        GAUGE, (), "Bookies in the largest ensemble of an open ledger; 0 if all ledgers are closed."
    ),
    "under_replicated_ledgers": Exported(
        GAUGE, ("reason", "copies"), "Ledgers with too few live sound copies of an entry."
    ),
    "under_replicated_bytes": Exported(
        GAUGE, ("reason", "copies"), "Estimated bytes that the repairs of those ledgers copy."
    ),
    "under_replicated_oldest_timestamp_ns": Exported(
        GAUGE,
        ("reason", "copies"),
        "Since when the oldest of those ledgers needs its repair; absent if that is unknown.",
    ),
    "ledgers_lost": Exported(
        GAUGE, (), "Ledgers with entries that have no sound copy, and none that is expected to come back."
    ),
    "ledgers_waiting_for_owner": Exported(GAUGE, (), "Abandoned ledgers that wait for a recovery by their owner."),
    "ledgers_without_target": Exported(GAUGE, (), "Ledgers whose copies no bookie can take."),
    "ledgers_stuck": Exported(GAUGE, (), "Ledgers whose repair failed repeatedly."),
    "misplaced_ledgers": Exported(GAUGE, (), "Ledgers with write sets in too few zones."),
    "ledgers": Exported(GAUGE, ("state", "ledger_type"), "Ledgers of the cluster."),
    "repair_planned_bytes": Exported(
        GAUGE, (), "Estimated bytes that repairs had to copy since the cluster last had all copies."
    ),
    "repair_done_bytes": Exported(GAUGE, (), "Bytes of those that were copied."),
    # the worker
    "repair_copied_bytes": Exported(COUNTER, ("reason",), "Bytes that repairs copied to this bookie."),
    "repair_ledgers": Exported(COUNTER, ("reason", "result"), "Repairs of ledgers that this bookie tried."),
    "repair_throttle_ratio": Exported(GAUGE, (), "Share of the rate that the appends of applications leave to copies."),
    "surplus_bytes": Exported(GAUGE, (), "Bytes of surplus copies that this bookie has found and not dropped yet."),
    # the scrub
    "scrub_bytes": Exported(COUNTER, _TYPE, "Bytes of records, or of their headers, that scrubs have read."),
    "scrub_damaged_records": Exported(
        COUNTER, _TYPE, "Damaged records that scrubs found; one that stays damaged counts again with each check."
    ),
    "scrub_oldest_timestamp_ns": Exported(
        GAUGE, ("kind",), "Since when everything was checked, by kind of check; when checks began if that is later."
    ),
    "scrub_period_ns": Exported(
        GAUGE, ("kind",), "The time within which everything must be checked, by kind of check."
    ),
    # a bookie
    "salvages": Exported(COUNTER, (), "Starts of this bookie with the rest of a damaged store."),
    "bookie_turn_ns": Exported(HISTOGRAM, (), "How long a bookie works on the requests that have arrived together."),
    "bookie_request_ns": Exported(
        HISTOGRAM, ("op",), "From the arrival of a request until it was answered, or began to wait."
    ),
    "bookie_rejected": Exported(COUNTER, ("reason",), "Requests that a bookie did not do, by the status of its reply."),
    "peer_refusals": Exported(
        GAUGE, ("reason",), "Connections and messages of peers that this bookie has refused since its start."
    ),
    "limbo_ledgers": Exported(GAUGE, (), "Ledgers in limbo on this bookie."),
    "sessions": Exported(GAUGE, (), "Sessions that clients have with this bookie."),
    "registered": Exported(GAUGE, (), "Whether this bookie is registered."),
    # the process
    "build_info": Exported(GAUGE, ("version", "level"), "1; the version of pybk, and the feature level that it knows."),
    "up_since_timestamp_ns": Exported(GAUGE, (), "When the manager was opened."),
    # the manager's health
    "state": Exported(GAUGE, ("pybk_state",), "The state of the manager's health: 1 for the one that holds."),
    "health_reason": Exported(GAUGE, ("code",), "1 for each reason, and for each note, in the manager's health."),
    "outstanding_bytes": Exported(GAUGE, (), "Bytes appended and not durable yet."),
    "tail_bytes": Exported(GAUGE, (), "Bytes of log that the next open would read."),
    "free_bytes": Exported(GAUGE, ("directory",), "Free bytes of a device, by the directories of its tiers."),
}


def exported_name(name: str, kind: str) -> str:
    """Return the name under which Prometheus sees a metric."""
    shown = f"pybk_{name.removesuffix('_ns')}_seconds" if name.endswith("_ns") else f"pybk_{name}"
    return f"{shown}_total" if kind == COUNTER else shown
