"""Tables of Spark's catalog: their creation together with a write is refused, because they could not be read.

Spark keeps no options of a table for a Python source, so a table that ``saveAsTable``, ``writeTo(...).create()`` or
``CREATE TABLE ... AS SELECT`` makes does not know its cluster. Spark calls the source to write as for any other write.
It shows in one thing alone: the write is an execution within that of the command which creates the table.
"""

from __future__ import annotations

from typing import Final

from pyspark import TaskContext

from pybk.errors import IllegalOperationError

_EXECUTION: Final = "spark.sql.execution.id"
_ROOT: Final = "spark.sql.execution.root.id"
_STREAM: Final = "sql.streaming.queryId"


def refuse_new_table() -> None:
    """Raise an error if this task writes for a command that creates a table.

    Within a micro-batch (``foreachBatch``) every write is an execution within another, so nothing is refused there.

    Raises:
        IllegalOperationError: It does.
    """
    context = TaskContext.get()
    if context is None or context.getLocalProperty(_STREAM):
        return
    root = context.getLocalProperty(_ROOT)
    if root and context.getLocalProperty(_EXECUTION) != root:
        raise IllegalOperationError(
            "a table of format pybk cannot be created together with rows, because Spark keeps no options of it to read "
            'them: write with .mode("append").save(), and read with a temporary view or spark.read'
        )
