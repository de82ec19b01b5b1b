"""The shared parts of the commands over clusters: how they connect, and how they show marks."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pybk import manager as handles
from pybk import operations
from pybk.admin.cli.command_parser import CLUSTER, is_url, secret_needed
from pybk.admin.cli.given_secrets import secret_of
from pybk.errors import UsageError

if TYPE_CHECKING:
    from pybk.manager.ledger_manager import LedgerManager
    from pybk.metadata.cluster import ClusterMetadata
    from pybk.metadata.underreplication import UnderReplicatedLedger
    from pybk.operations.cluster_admin import ClusterAdmin


def person_of(parsed: argparse.Namespace) -> str:
    """Return the name of the person who gives the command: ``--by``, or the user."""
    if parsed.by is not None:
        return str(parsed.by)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a process in a container may have a user without a name
        return "pybk"


def url_of(parsed: argparse.Namespace) -> str:
    """Return the URL of the cluster; raises UsageError if PATH is a directory."""
    if not is_url(parsed.path):
        raise UsageError(f"{parsed.path} is not a metadata URL; PATH takes {CLUSTER}")
    return str(parsed.path)


def opened_manager(parsed: argparse.Namespace, *, read_only: bool = False) -> LedgerManager:
    """Open the store or the cluster that PATH names."""
    if not is_url(parsed.path):
        return handles.LedgerManager.open(parsed.path, read_only=read_only)
    with secret_needed():
        return handles.LedgerManager.connect(parsed.path, cluster_secret=secret_of(parsed))


def manager_of(parsed: argparse.Namespace) -> LedgerManager:
    """Connect to the cluster that PATH names; raises UsageError if PATH is a directory."""
    url_of(parsed)
    return opened_manager(parsed)


def metadata_of(parsed: argparse.Namespace) -> ClusterMetadata:
    """Open the metadata of the cluster that PATH names."""
    with secret_needed():
        return handles.connect.open_cluster(url_of(parsed), secret_of(parsed), create=False)[0]


@contextmanager
def admin_of(parsed: argparse.Namespace) -> Iterator[ClusterAdmin]:
    """Administer the cluster that PATH names, until the end of the block."""
    with manager_of(parsed) as manager:
        yield operations.ClusterAdmin(manager)


def mark_as_json(mark: UnderReplicatedLedger) -> dict[str, Any]:
    """Return a mark as JSON output has it."""
    return {
        "ledger": mark.ledger_id,
        "bookie": mark.bookie.bookie_id,
        "instance": mark.bookie.instance.hex(),
        "first_entry": mark.first_entry_id,
        "reason": mark.reason,
        "state": mark.state,
        "since_ns": mark.since_ns,
        "bytes": mark.size_bytes,
        "tries": mark.tries,
        "error": mark.error,
        "target": mark.target,
    }
