"""Event-sourced applications on write-ahead logs: needs ``pip install "pybk[eventsourcing]"``.

Set ``PERSISTENCE_MODULE=pybk.adapters.eventsourcing`` in the environment of an application of the library
``eventsourcing``. See ``docs/howto/eventsourcing.md``.
"""

from __future__ import annotations

from pybk.adapters.eventsourcing.factory import PybkFactory
from pybk.adapters.eventsourcing.recorders import (
    PybkAggregateRecorder,
    PybkApplicationRecorder,
    PybkProcessRecorder,
    PybkSubscription,
    PybkTrackingRecorder,
)

__all__ = [
    "PybkAggregateRecorder",
    "PybkApplicationRecorder",
    "PybkFactory",
    "PybkProcessRecorder",
    "PybkSubscription",
    "PybkTrackingRecorder",
]
