"""The verbs ``init``, ``probe`` and ``destroy`` of ``pybk cluster``."""

from __future__ import annotations

import argparse

from pybk import manager as handles
from pybk import operations
from pybk.admin.cli.clusters import manager_of, url_of
from pybk.admin.cli.command_parser import secret_needed
from pybk.admin.cli.given_secrets import secret_of
from pybk.admin.cli.output import confirm, counted, print_result
from pybk.credentials import CLUSTER_SECRET
from pybk.errors import MetadataError, UsageError


def init(parsed: argparse.Namespace) -> int:
    """Run ``pybk cluster init``."""
    url, secret = url_of(parsed), secret_of(parsed)
    if secret is None and not parsed.insecure:
        raise UsageError(
            f"a cluster takes a secret, such as 32 random bytes: --cluster-secret-file FILE or {CLUSTER_SECRET}; or, "
            "on one host whose processes all trust each other, --insecure"
        )
    with secret_needed():
        try:
            metadata, _ = handles.connect.open_cluster(url, secret, create=False)
            made = False
        except MetadataError as error:
            if type(error) is not MetadataError:  # as a store that cannot be reached, or another secret
                raise
            metadata, _ = handles.connect.open_cluster(url, secret, create=True)
            made = True
    with metadata:
        cluster_id = metadata.cluster_id.hex()
    return print_result(
        parsed,
        {"cluster": cluster_id, "made": made},
        f"cluster {cluster_id} {'is made' if made else 'was there already'}",
    )


def destroy(parsed: argparse.Namespace) -> int:
    """Run ``pybk cluster destroy``."""
    with manager_of(parsed) as manager:
        ledgers = sum(1 for _ in manager.list_ledgers())
        names = [each.name for each in operations.ClusterAdmin(manager).bookies()]
        cluster_id = manager.store_id.hex()
    what = f"cluster {cluster_id} with {counted(ledgers, 'ledger')} and {counted(len(names), 'bookie')}"
    if parsed.dry_run:
        return print_result(
            parsed,
            {"cluster": cluster_id, "ledgers": ledgers, "bookies": names, "deleted": 0},
            f"{what} would be deleted; the files of its bookies would stay",
        )
    confirm(parsed, cluster_id, f"{what} is deleted for good; the files of its bookies stay")
    with secret_needed():
        deleted = operations.destroy_metadata(parsed.path, cluster_id, cluster_secret=secret_of(parsed))
    return print_result(
        parsed,
        {"cluster": cluster_id, "ledgers": ledgers, "bookies": names, "deleted": deleted},
        f"{what} is deleted, {counted(deleted, 'value')}; the contents of its bookies' directories can be removed",
    )
