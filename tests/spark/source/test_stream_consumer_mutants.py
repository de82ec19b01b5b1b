"""What a streaming query records of its progress is broken on purpose; a test must notice."""

from __future__ import annotations

from typing import Final

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")
pytest.importorskip("pyarrow", reason="no pyarrow; install the extra spark-test to test Spark")

from tests.spark.sink.test_retention_mutants import Mutant, mutate, run
from tests.spark.source import test_stream_consumer as streams
from tests.spark.source.test_stream_consumer import at_once as at_once  # a fixture
from tests.spark.source.test_stream_consumer import cluster as cluster  # a fixture

pytestmark = pytest.mark.usefixtures("process_of_a_driver")

READER: Final = "pybk.spark.source.stream:StreamReader."

MUTANTS: Final = [
    Mutant(
        "CO1: a micro-batch that is repeated is recorded before it is planned",
        READER + "partitions",
        "self._beginning(start)",
        "self._offset(start)",
        "test_a_micro_batch_that_is_repeated_is_protected",
    ),
    Mutant(
        "CO1: a micro-batch is recorded before it is looked for",
        READER + "latestOffset",
        "self._beginning(start)",
        "self._offset(start)",
        "test_the_record_is_never_ahead_of_the_checkpoint",
    ),
    Mutant(
        "CO2: a micro-batch that is planned is not complete",
        READER + "partitions",
        "entry_ranges = self._on_driver().placed(between(_1, _2), _3)",
        "entry_ranges = self._on_driver().placed(between(_1, _2), _3)\n"
        "if self._consumer is not None:\n    self._consumer.record(_2.finished_ledgers())",
        "test_the_record_is_never_ahead_of_the_checkpoint",
    ),
    Mutant(
        "CO2: what is complete is recorded",
        READER + "commit",
        "self._consumer.record(self._offset(end).finished_ledgers())",
        "pass",
        "test_the_record_is_never_ahead_of_the_checkpoint",
    ),
    Mutant(
        "CO2: what was put off is recorded at the end",
        READER + "stop",
        "self._consumer.close()",
        "pass",
        "test_a_query_that_ends_records_what_was_put_off",
    ),
]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_a_broken_rule_is_noticed(
    mutant: Mutant, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch, mutant)
    with pytest.raises((Exception, pytest.fail.Exception)):  # whatever the test says
        run(getattr(streams, mutant.check), request)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", sorted({mutant.check for mutant in MUTANTS}))
def test_the_checks_pass_where_no_rule_is_broken(name: str, request: pytest.FixtureRequest) -> None:
    run(getattr(streams, name), request)
