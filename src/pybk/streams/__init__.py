"""Logs, write-ahead logs, subscriptions and blobs, built on ledgers."""

from pybk.deferral import deferred

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pybk.streams import list_rebuild as list_rebuild
    from pybk.streams import sweep as sweep
    from pybk.streams.group_members import LogMember as LogMember
    from pybk.streams.log_record import wal_records as wal_records
    from pybk.streams.record_reader import RecordReader as RecordReader
    from pybk.streams.wal_checkpoint import CheckpointWriter as CheckpointWriter
    from pybk.streams.wal_checkpoint import WalCheckpoint as WalCheckpoint
    from pybk.streams.wal_follower import WalFollower as WalFollower
else:
    __getattr__ = deferred(
        __name__,
        {
            "group_members": "LogMember",
            "list_rebuild": "list_rebuild",
            "log_record": "wal_records",
            "record_reader": "RecordReader",
            "sweep": "sweep",
            "wal_checkpoint": "CheckpointWriter WalCheckpoint",
            "wal_follower": "WalFollower",
        },
    )
