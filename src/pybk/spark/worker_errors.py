"""The errors of Spark's Python workers, as Spark shows them.

Spark sends the text of an exception from a worker to the driver, with its traceback: some twenty lines of Spark's and
pybk's code around the one line that a user needs. Spark leaves the traceback out if an environment variable of the
worker is set when the exception is formatted. The worker ends with it, so the variable concerns no other exception.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from pybk.errors import PybkError

_HIDDEN: Final = "SPARK_HIDE_TRACEBACK"
_WORKERS: Final = ("pyspark.", "pybk.spark.executors.daemon")
"""The beginnings of the names of modules that Spark runs as processes of workers."""

T = TypeVar("T")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Show an error of pybk that ends this worker as one line; in other processes this does nothing.

    Other exceptions keep their tracebacks, because they are defects.
    """
    try:
        yield
    except PybkError:
        if is_worker():
            os.environ[_HIDDEN] = "1"
        raise


def with_one_line_errors(values: Iterator[T]) -> Iterator[T]:
    """Yield values of a generator, whose errors are shown as one line.

    A query that needs no more rows, such as that of ``limit``, closes the connection of its workers. They end by an
    exception then, whose traceback Spark's daemon of workers would print though the query succeeds.
    """
    try:
        with one_line_errors():
            yield from values
    except GeneratorExit as end:
        if isinstance(end.__context__, ConnectionError) and is_worker():
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # until this process ends
        raise


def is_worker() -> bool:
    """Return whether this process is a Python worker of Spark, or was forked by Spark's daemon of workers."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith(_WORKERS)
