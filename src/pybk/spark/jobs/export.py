"""Export of ledgers to Parquet files, which data lakes read and ``import_`` turns into ledgers again."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pybk.credentials import CredentialSources
from pybk.errors import CorruptError, UsageError
from pybk.spark.connection import connection
from pybk.spark.jobs.export_layout import ENTRIES_DIRECTORY, LEDGERS, LEDGERS_DIRECTORY, row_of
from pybk.spark.jobs.formats import register_source
from pybk.spark.jobs.ledgers import StoreOrUrl, selected_ledgers, where_of
from pybk.spark.jobs.spreading import context_of, shown_jobs
from pybk.spark.jobs.transfer import TransferHeader, plan_transfer
from pybk.spark.options import BATCH_BYTES, Positions, SourceOptions
from pybk.spark.source.planning import ranges_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pybk.credentials import Secret
    from pybk.spark.connection import StoreOrCluster


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        export_id: The unique id of this export, by which an import recognises ledgers that it has made before.
        ledgers: Ids of the exported ledgers.
        entries: The number of their entries.
        bytes: Their payload bytes.
        not_opened: Ids of ledgers left out because they have another password.
        open: Ids of ledgers left out because they are not closed.
        failed: Ids of ledgers left out for other reasons, each with the reason.
    """

    export_id: str
    ledgers: tuple[int, ...]
    entries: int
    bytes: int
    not_opened: tuple[int, ...]
    open: tuple[int, ...]
    failed: tuple[tuple[int, str], ...]


def export(
    spark: SparkSession,
    where: StoreOrUrl,
    directory: str,
    *,
    cluster_secret: bytes | Secret | None = None,
    password: bytes | Secret | None = None,
    secret: bytes | Secret | None = None,
    ledgers: Iterable[int] | None = None,
    ledger_type: str | None = None,
    open_too: bool = False,
    mode: str = "errorifexists",
    quiet: bool = False,
) -> Exported:
    """Write ledgers to Parquet files, one row per entry in ``entries`` and one row per ledger in ``ledgers``.

    Args:
        spark: The session whose executors read and write.
        where: A store's directory, or a cluster's metadata URL.
        directory: The target: any path to which Spark can write.
        cluster_secret: The secret of the cluster.
        password: The password of the ledgers; None stands for the empty one.
        secret: The secret of ledgers that have one. If both are given, each ledger takes its own.
        ledgers: Ids of the ledgers to export; None for all.
        ledger_type: Export only ledgers of this type.
        open_too: Also export ledgers that are not closed, up to their last add confirmed.
        mode: ``"errorifexists"`` or ``"overwrite"``, as in Spark.
        quiet: Do not show progress.

    Raises:
        NoSuchLedgerError: A ledger of ``ledgers`` does not exist.
        UsageError: The mode is unknown, or the directory ``ledgers`` exists and ``mode`` is not ``"overwrite"``.
        CorruptError: Not every entry was read, so the export is incomplete.
        PybkError: The store or cluster cannot be opened.

    Durability: ``ledgers`` is written last, and ``"overwrite"`` deletes it first, so it exists only if all entries
        were written.
    """
    if mode not in ("errorifexists", "overwrite"):
        raise UsageError(f"mode is {mode!r:.100}; an export takes 'errorifexists' or 'overwrite'")
    place = where_of(where, cluster_secret)
    given = CredentialSources.of(password, secret)
    found = connection(place)
    export_id = secrets.token_hex(16)
    wanted = partial(selected_ledgers, place, None if ledgers is None else tuple(ledgers), ledger_type)
    plan = plan_transfer(found, given.read(), wanted, open_too=open_too)
    entries = sum(header.entries for header in plan.headers)
    with shown_jobs(spark, f"pybk: export {place}", quiet=quiet):
        to, last = (f"{directory.rstrip('/')}/{name}" for name in (ENTRIES_DIRECTORY, LEDGERS_DIRECTORY))
        _delete_table(spark, last, overwrite=mode == "overwrite")
        options = _options(place, given, plan.headers)
        spark.read.format(register_source(spark, options)).load().write.mode(mode).parquet(to)
        written = spark.read.parquet(to).count()
        if written != entries:
            raise CorruptError(f"{to} has {written} entries of {entries}; the export is not complete: export again")
        table = spark.createDataFrame([row_of(export_id, *each) for each in plan.ledgers], LEDGERS)
        table.coalesce(1).write.mode(mode).parquet(last)
    return Exported(
        export_id=export_id,
        ledgers=tuple(header.ledger_id for header in plan.headers),
        entries=entries,
        bytes=sum(header.length for header in plan.headers),
        not_opened=tuple(plan.not_opened),
        open=tuple(plan.still_open),
        failed=tuple(plan.failed),
    )


def _delete_table(spark: SparkSession, table: str, *, overwrite: bool) -> None:
    """Delete the table ``ledgers`` of an earlier export, with which an unfinished new export would look complete."""
    context = context_of(spark)
    assert context._jvm is not None, "a context that runs has a JVM"
    path = context._jvm.org.apache.hadoop.fs.Path(table)
    files = path.getFileSystem(context._jsc.hadoopConfiguration())
    if not files.exists(path):
        return
    if not overwrite:
        raise UsageError(f"{table} already exists: export to another directory, or overwrite it")
    files.delete(path, True)


def _options(where: StoreOrCluster, given: CredentialSources, headers: Sequence[TransferHeader]) -> SourceOptions:
    """Return options that read exactly the entries of the headers."""
    ids = [header.ledger_id for header in headers if header.entries]
    return SourceOptions(
        where=where,
        given=given,
        ledgers=ranges_of(ids) or ((0, -1),),
        ledger_type=None,
        payload=True,
        include_metadata=False,
        start_entry=0,
        end_entry=None,
        starting=Positions(),
        ending=Positions(entries={header.ledger_id: header.entries - 1 for header in headers if header.entries}),
        entries_per_partition=None,
        max_entries=None,
        batch_bytes=BATCH_BYTES,
        fail_on_data_loss=True,
        require_seal=False,
        allow_missing=True,
        raw=True,
        max_entries_per_trigger=None,
        max_bytes_per_trigger=None,
        consumer=None,
    )
