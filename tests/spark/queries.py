"""Streaming queries, on a busy machine, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.waiting import PROCESS_S

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

LATE = "Python worker failed to connect back"
"""What Spark says when Python takes more than 10 s to start, as it may where much else runs; a query starts again."""


def run_to_end(start: Callable[[], StreamingQuery]) -> StreamingQuery:
    """Start a query, and wait until it has ended; its Python workers alone may take a minute to start where much runs.

    A query that fails to end is stopped, so that the session's next test does not meet it.
    """
    while True:
        query = start()
        try:
            assert query.awaitTermination(int(PROCESS_S)), query.status
        except Exception as error:
            if LATE not in str(error):
                raise
        else:
            return query
        finally:
            query.stop()
