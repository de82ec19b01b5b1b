"""The reader of a streaming query that cannot begin, which raises the error when Spark first calls it.

PySpark 4.3 has a defect: an error while the reader is made is replaced by "cannot access local variable 'reader'".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

from pybk.errors import without_frames
from pybk.spark.worker_errors import one_line_errors

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit

    from pybk.errors import PybkError


class RefusedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Raises an error in each call of Spark.

    Args:
        error: The error.
    """

    def __init__(self, error: PybkError) -> None:
        self._error = without_frames(error)

    @one_line_errors()
    def _refuse(self) -> NoReturn:
        raise without_frames(self._error)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Raise the error."""
        self._refuse()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Raise the error."""
        self._refuse()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Raise the error."""
        self._refuse()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Raise the error."""
        self._refuse()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Raise the error."""
        self._refuse()

    def read(self, partition: InputPartition) -> Any:
        """Raise the error."""
        self._refuse()
