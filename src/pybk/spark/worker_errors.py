"""The errors of Spark's Python workers, as Spark shows them.

Spark sends the text of an exception from a worker to the driver, with its traceback: some twenty lines of Spark's and
pybk's code around the one line that a user needs. Spark leaves the traceback out if an environment variable of the
worker is set when the exception is formatted. The worker ends with it, so the variable concerns no other exception.

A query that needs no more rows, such as that of ``limit``, succeeds and closes the connections of its workers. A worker
notices this wherever it happens to read or write: in a batch, in the end of the stream, or in the reports after it,
when no code of the source runs any more. Spark's daemon, from which workers are forked, prints the traceback of this
error. It prints no other error of a connection, because it gets only errors that leave the worker's main function, and
that function sends what a source raises to the driver. So these tracebacks are left out of the worker's standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import BufferedWriter
from typing import Any, Final, TextIO, TypeVar

from pybk.errors import PybkError
from pybk.spark.worker_process import is_worker

_HIDDEN: Final = "SPARK_HIDE_TRACEBACK"
_DAEMON: Final = os.path.join("pyspark", "daemon.py")

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

    From then on, no traceback is printed in this worker because Spark has closed its connection.
    """
    if is_worker() and sys.__stderr__ is not None:
        _leave_out_closed_connections(sys.__stderr__)
    with one_line_errors():
        yield from values


@cache  # once for each stream, as a worker runs many tasks
def _leave_out_closed_connections(stream: TextIO) -> None:
    """Have a stream drop what Spark's daemon writes while it handles the error of a closed connection.

    The stream itself is changed, because Spark may have wrapped it to log what a worker prints.
    """
    write = stream.write

    def write_others(text: str) -> int:
        return len(text) if _is_closed_connection(sys.exc_info()[1]) else write(text)

    stream.write = write_others  # type: ignore[method-assign]
    sys.unraisablehook = partial(_unraisable, sys.unraisablehook)


def _unraisable(hook: Callable[[sys.UnraisableHookArgs], Any], unraisable: sys.UnraisableHookArgs) -> None:
    """Call a hook, unless what is reported is that the end of a closed connection could not be written.

    Python reports that from 3.13 on, when the worker drops the file of its connection.
    """
    if not (isinstance(unraisable.exc_value, ConnectionError) and isinstance(unraisable.object, BufferedWriter)):
        hook(unraisable)


def _is_closed_connection(error: BaseException | None) -> bool:
    """Return whether an exception that is handled now is one of a connection, which Spark's daemon has caught."""
    if not isinstance(error, ConnectionError) or error.__traceback__ is None:
        return False
    return error.__traceback__.tb_frame.f_code.co_filename.endswith(_DAEMON)
