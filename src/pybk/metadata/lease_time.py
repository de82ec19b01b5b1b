"""The lease time: the time for which a member of a cluster may be silent before its leases end.

A *lease* is a key that the metadata store removes when the session of the process that created it ends. Registrations
of bookies and locks are leases. A session ends at once when its process closes the store, and also when its process
dies on the host of an LMDB store, because the kernel drops its locks. In all other cases (a stopped process, a lost
connection, a lost host) the metadata store waits for the lease time, counted from the last sign of life.

A shorter lease time replaces lost bookies and lock holders sooner. A longer one tolerates longer pauses of a process,
such as a swapped-out host. This module has everything that is derived from the lease time: the defaults of the stores,
the limits, the interval of heartbeats, and the time after which a client that is cut off stops trusting its own leases.
"""

from __future__ import annotations

from typing import Final

from pybk.errors import UsageError

LMDB_LEASE_TIME_S: Final = 5.0
"""The default for the processes of one host, seconds."""

ZOOKEEPER_LEASE_TIME_S: Final = 10.0
"""The default that ZooKeeper is asked for, seconds; it may grant between 2 and 20 of its ticks instead."""

LEASE_TIME_MIN_S: Final = 0.05
LEASE_TIME_MAX_S: Final = 3600.0

_HEARTBEAT_MAX_S: Final = 1.0
_SWEEP_MAX_S: Final = 0.25


def checked_seconds(name: str, seconds: float) -> float:
    """Return a lease time or a call's timeout, or raise UsageError if it is outside the limits.

    Args:
        name: Name of the argument, for the error message.
        seconds: ``LEASE_TIME_MIN_S`` to ``LEASE_TIME_MAX_S``.
    """
    if not LEASE_TIME_MIN_S <= seconds <= LEASE_TIME_MAX_S:
        raise UsageError(f"{name} is {seconds!r}; it takes {LEASE_TIME_MIN_S} to {LEASE_TIME_MAX_S:.0f} seconds")
    return seconds


def heartbeat_interval(lease_time_s: float) -> float:
    """Return the seconds between two heartbeats: five per lease time, so a few may be late or lost."""
    return min(_HEARTBEAT_MAX_S, lease_time_s / 5)


def sweep_interval(lease_time_s: float) -> float:
    """Return the least seconds between two searches for ended sessions, in a store whose clients search."""
    return min(_SWEEP_MAX_S, lease_time_s / 5)


def trusted_after_loss(lease_time_s: float) -> float:
    """Return the seconds for which leases count as alive after their connection was found to be lost.

    ZooKeeper's client notices a lost connection two thirds of the lease time after the last sign of life. The servers
    end the session after the whole lease time, so a third is left.
    """
    return lease_time_s / 3
