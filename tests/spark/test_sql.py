"""SQL over sources of pybk: tables, views, and what Spark records of the options in a statement."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

pytest.importorskip("pyspark", reason="no pyspark; install the extra spark-test to test Spark")

from tests.docs.walkthrough import DOCS
from tests.spark.clusters import CONF, Driver, driver
from tests.spark.secret_files import secret_file
from tests.storage.real_store import open_quick
from tests.waiting import wait_until

pytestmark = pytest.mark.sampled(one_in=6, using="local")

PASSWORD = b"the password of all ledgers here"
ENTRIES = 3000


class Place:
    """A store with one ledger, and the files of a session that reads it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "events").mkdir()
        self.options = {"path": str(directory / "store"), "passwordFile": secret_file(directory / "given", PASSWORD)}
        with open_quick(directory / "store") as manager, manager.create_ledger(password=PASSWORD) as writer:
            writer.append_many([b"x" * 1000] * ENTRIES)

    def logged(self) -> str:
        """Return the event log and the log of the driver."""
        files = [path for path in (self.directory / "events").rglob("*") if path.is_file()]
        return "".join(path.read_text(errors="replace") for path in [*files, self.directory / "driver.log"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("sql"))


@pytest.fixture(scope="module")
def local(place: Place) -> Iterator[Driver]:
    conf = {
        **CONF,
        "spark.ui.enabled": "false",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{place.directory}/events",
        "spark.sql.warehouse.dir": str(place.directory / "warehouse"),
    }
    with driver(place.directory, ORDERS_PASSWORD=PASSWORD.decode()) as found:
        found.ask("begin", master="local[2]", conf=conf, bookies=None)
        found.ask("sql", statement="CREATE TABLE entries (entry_id BIGINT, payload BINARY) USING pybk")
        yield found
        found.ask("end")


def recorded(local: Driver, place: Place) -> str:
    """Return what Spark has recorded up to now; events come in order."""
    name = f"mark_{uuid4().hex}"
    local.ask("sql", statement=f"CREATE TEMPORARY VIEW {name} AS SELECT 1")
    wait_until(lambda: name in place.logged())
    return place.logged()


FORMS = {
    "CREATE TEMPORARY VIEW": "CREATE TEMPORARY VIEW {table} USING pybk OPTIONS (path '/x', {name} '{value}')",
    "CREATE TABLE": "CREATE TABLE {table} (payload BINARY) USING pybk OPTIONS (path '/x', {name} '{value}')",
    "CREATE TABLE AS SELECT": "CREATE TABLE {table} USING pybk OPTIONS ({name} '{value}') AS SELECT X'00' AS payload",
    "SELECT": "SELECT * FROM entries WITH (path = '/x', ledger = '0', {name} = '{value}')",
    "INSERT": "INSERT INTO entries WITH (metadataUri = 'lmdb:///x', {name} = '{value}') VALUES (1, X'00')",
}


def values_in(local: Driver, form: str) -> tuple[str, str]:
    """Run a statement with a password as an option, by its name and by a misspelt one; return the two values."""
    values = f"hush-{uuid4().hex}", f"hush-{uuid4().hex}"
    for name, value in zip(("password", "pass_word"), values, strict=True):
        local.ask("sql", statement=form.format(table=f"t_{uuid4().hex}", name=name, value=value))
    return values


@pytest.mark.parametrize("form", FORMS)
def test_what_spark_records_of_a_secret_in_a_statement(local: Driver, place: Place, form: str) -> None:
    """As the page says: none by the name of an option for one, and one by another name in some forms."""
    named, misspelt = values_in(local, FORMS[form])
    logged = recorded(local, place)
    row = re.search(rf"^\| `{form} …` \| (\w+) \| (\w+) \|", (DOCS / "howto/spark.md").read_text(), re.MULTILINE)
    assert row is not None, "the page has the form"
    assert ({True: "yes", False: "no"}[named in logged], {True: "yes", False: "no"}[misspelt in logged]) == row.groups()


def test_a_setting_of_spark_redacts_every_option_of_a_view(local: Driver, place: Place) -> None:
    [name, value] = re.search(r"`(spark\.sql\.redaction\.\S+)=(\S+)`", (DOCS / "howto/spark.md").read_text()).groups()  # type: ignore[union-attr]
    local.ask("set_conf", setting=name, value=value)
    values = values_in(local, FORMS["CREATE TEMPORARY VIEW"])
    local.ask("set_conf", setting=name, value="(?i)url")  # Spark's default
    logged = recorded(local, place)
    assert [value for value in values if value in logged] == []


def test_a_table_takes_options_with_each_use(local: Driver, place: Place) -> None:
    options = ", ".join(f"{name} = '{value}'" for name, value in {**place.options, "ledger": "0"}.items())
    counted = local.ask("sql", statement=f"SELECT count(entry_id) AS n FROM entries WITH ({options})")
    assert counted == f"[Row(n={ENTRIES})]"
    without = local.ask("sql", statement="SELECT * FROM entries")
    assert "UsageError: give either path" in without
    bare = local.ask("sql", statement=f"CREATE TABLE bare USING pybk OPTIONS ({options.replace(' =', '')})")
    assert "declare its columns" in bare


def test_an_option_names_a_variable_of_the_environment(local: Driver, place: Place) -> None:
    where = f"path = '{place.options['path']}', ledger = '0'"
    found = local.ask(
        "sql", statement=f"SELECT count(*) AS n FROM entries WITH ({where}, passwordVariable = 'ORDERS_PASSWORD')"
    )
    assert found == f"[Row(n={ENTRIES})]"
    missing = local.ask("sql", statement=f"SELECT * FROM entries WITH ({where}, passwordVariable = 'NO_PASSWORD')")
    assert "NO_PASSWORD has no secret in this process" in missing.splitlines()[0]


def test_a_query_that_needs_a_few_rows_prints_no_traceback(local: Driver, place: Place) -> None:
    options = {**place.options, "ledger": "0", "batchBytes": "100k", "entriesPerPartition": "1500"}
    before = len(local.log.read_text())
    for _ in range(5):
        assert local.ask("first_rows", options=options, count=5) == 5
    assert local.ask("sql", statement="SELECT 1") == "[Row(1=1)]"
    assert local.ask("first_rows", options=options, count=ENTRIES + 1) == ENTRIES
    assert "Traceback" not in local.log.read_text()[before:]


def test_an_option_of_batches_is_refused_by_a_stream(local: Driver, place: Place) -> None:
    """Spark has an error of its own if the reader of a stream cannot be made."""
    error = local.ask("stream_error", options={**place.options, "ledger": "0", "startEntry": "1"})
    assert "UsageError: option startEntry is not one of a streaming read" in error
    assert "Traceback" not in error
