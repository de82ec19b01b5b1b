"""Operations of pybk as spans of the OpenTelemetry SDK."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pybk import LedgerManager, StoreConfig
from pybk.admin.service_log import JsonFormatter
from pybk.errors import NoSuchLedgerError
from pybk.spans import operation
from pybk.testing import TestCluster, small_config
from tests.paths import ROOT
from tests.waiting import PROCESS_S

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pybk.adapters.opentelemetry import on_span

TRACER = trace.get_tracer("of a test")


@pytest.fixture(scope="module")
def of_this_process() -> InMemorySpanExporter:
    """The exporter of this process, which takes one provider alone."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def exporter(of_this_process: InMemorySpanExporter) -> InMemorySpanExporter:
    of_this_process.clear()
    return of_this_process


def config() -> StoreConfig:
    return replace(small_config(), on_span=on_span)


def ended(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """Return the finished spans by name; each name occurs once."""
    spans = exporter.get_finished_spans()
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None
    return span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    context = span.get_span_context()
    assert context is not None
    return context.span_id


def test_spans_of_a_thread_have_its_current_span_as_parent(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    with (
        LedgerManager.open(tmp_path / "data", config=config()) as manager,
        TRACER.start_as_current_span("request") as request,
    ):
        with manager.create_ledger(insecure=True, ledger_type="orders") as writer:
            writer.append_many([b"one", b"two"])
        with manager.open_ledger(writer.ledger_id) as reader:
            assert len(list(reader)) == 2
        assert trace.get_current_span() is request
    spans = ended(exporter)
    of_request = {name for name, span in spans.items() if span.parent and parent_of(span) == id_of(spans["request"])}
    assert of_request == {f"pybk.ledger.{each}" for each in ("create", "append", "close", "open", "read")}
    assert parent_of(spans["pybk.ledger.recover"]) == id_of(spans["pybk.ledger.open"])
    assert [spans[f"pybk.manager.{each}"].parent for each in ("open", "close")] == [None, None]
    appended = spans["pybk.ledger.append"]
    assert appended.attributes is not None
    assert (appended.attributes["pybk.entries"], appended.attributes["pybk.ledger_type"]) == (2, "orders")
    for span in spans.values():
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time


def test_spans_of_tasks_have_the_current_span_of_their_task_as_parent(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    async def request(manager: LedgerManager, number: int) -> int:
        with TRACER.start_as_current_span(f"request {number}") as span:
            async with manager.create_ledger_async(insecure=True) as writer:
                await asyncio.gather(*(writer.append_async(b"x") for _ in range(3)))
            assert trace.get_current_span() is span
        return writer.ledger_id

    async def requests(manager: LedgerManager) -> list[int]:
        return await asyncio.gather(*(request(manager, number) for number in range(4)))

    with LedgerManager.open(tmp_path / "data", config=config()) as manager:
        ledgers = asyncio.run(requests(manager))
    spans = exporter.get_finished_spans()
    for number, ledger_id in enumerate(ledgers):
        [of_request] = [span for span in spans if span.name == f"request {number}"]
        parts = [span for span in spans if span.parent and parent_of(span) == id_of(of_request)]
        assert {span.name for span in parts} == {f"pybk.ledger.{each}" for each in ("create", "append", "close")}
        assert {(span.attributes or {})["pybk.ledger_id"] for span in parts} == {ledger_id}


def test_a_cluster_shows_its_requests_to_the_metadata_store(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    with TestCluster(tmp_path) as cluster:
        client = cluster.connect(config())
        exporter.clear()
        with TRACER.start_as_current_span("request"), client.create_ledger(password=b"p") as writer:
            writer.append(b"x")
        client.close()
    spans = exporter.get_finished_spans()
    [created] = [span for span in spans if span.name == "pybk.ledger.create"]
    requests = [span for span in spans if span.parent and parent_of(span) == id_of(created)]
    assert "pybk.metadata.create" in {span.name for span in requests}
    assert all(span.name.startswith("pybk.metadata.") for span in requests)


def test_an_error_is_the_status_of_its_span(tmp_path: Path, exporter: InMemorySpanExporter) -> None:
    with LedgerManager.open(tmp_path / "data", config=config()) as manager, pytest.raises(NoSuchLedgerError):
        manager.open_ledger(7)
    failed = ended(exporter)["pybk.ledger.open"]
    assert failed.status.status_code is trace.StatusCode.ERROR
    assert (failed.status.description or "").startswith("NoSuchLedgerError: ledger 7 ")
    assert [event.name for event in failed.events] == ["exception"]


def test_lines_of_the_log_have_the_ids_of_the_span(exporter: InMemorySpanExporter) -> None:
    record = logging.LogRecord("pybk.x", logging.WARNING, "", 1, "a line", None, None)
    with operation(on_span, "pybk.ledger.open"):
        line = json.loads(JsonFormatter().format(record))
    context = ended(exporter)["pybk.ledger.open"].context
    assert line["trace_id"] == f"{context.trace_id:032x}"
    assert line["span_id"] == f"{context.span_id:016x}"


@pytest.mark.sampled(one_in=6, group="documents")
def test_the_programs_of_the_document_run(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "howto" / "tracing.md").read_text(encoding="utf-8")
    traced, lines, of_bookies = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    [shown] = re.findall(r"^```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    def output_of(program: str) -> list[str]:
        run = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
            check=False,
        )
        assert (run.returncode, run.stderr) == (0, "")
        # The store checks entries in the background, whenever the machine is slow enough for that.
        return [line for line in run.stdout.splitlines() if not line.startswith("pybk.store.scrub_part")]

    printed, told = output_of(traced), shown.splitlines()
    assert sorted(printed) == sorted(told)
    assert (printed[0], printed[-1]) == (told[0], told[-1])
    names = [line.split(" ")[0] for line in output_of(lines)]
    assert sorted(names) == sorted(line.split(",")[0] for line in told if line.startswith("pybk."))
    ended = "on_span('pybk.bookie.start', 1, {}).end(2, {}, None); provider.shutdown()"
    assert any('"name": "pybk.bookie.start"' in line for line in output_of(of_bookies + ended))


def test_without_an_sdk_there_are_no_ids_and_no_harm(tmp_path: Path) -> None:
    program = (
        "from pybk import LedgerManager, StoreConfig\n"
        "from pybk.adapters.opentelemetry import on_span\n"
        "with LedgerManager.open('data', config=StoreConfig(on_span=on_span)) as manager:\n"
        "    manager.create_ledger(insecure=True).append(b'x')\n"
        "span = on_span('pybk.ledger.open', 1, {})\n"
        "span.end(2, {}, None)\n"
        "print([span.trace_id, span.span_id])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "['', '']\n", "")
