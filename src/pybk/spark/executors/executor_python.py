"""The errors of jobs whose executors run a Python that does not fit, in one line.

Spark compares the minor versions of Python of the driver and of each worker, and a worker imports pybk when it gets a
task. What fails there comes back to the driver as text, between some forty lines of the JVM's and PySpark's calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pybk.errors import IllegalOperationError

_VERSIONS: Final = re.compile(r"Python in worker has different version: (\S+) than that in driver: ([\d.]+)")
_MISSING: Final = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


@contextmanager
def one_line_for_other_pythons() -> Iterator[None]:
    """Replace an error of Spark by one line if the Python of executors is the reason.

    Only for jobs whose tasks call nothing but pybk: a module that is missing is taken for one that pybk needs.

    Raises:
        IllegalOperationError: The executors run another minor version of Python than the driver, or their Python has
            not all modules.
    """
    try:
        yield
    except Exception as error:
        reason = other_python(str(error))
        if reason is None:
            raise
        raise IllegalOperationError(reason) from None  # Spark's log has the rest


def other_python(text: str) -> str | None:
    """Return what is wrong with the Python of executors according to an error of Spark; None if that is not it."""
    if found := _VERSIONS.search(text):
        worker, driver = found.groups()
        return (
            f"executors run Python {worker} and this driver Python {driver}: set PYSPARK_PYTHON to a Python {driver} "
            f"that all hosts have, or run the driver with Python {worker}"
        )
    if found := _MISSING.search(text):
        return (
            f"the Python of an executor has no module {found[1]}: install pybk with its extra spark on all hosts, or "
            "send it with --py-files or --archives, and set PYSPARK_PYTHON to that Python"
        )
    return None
