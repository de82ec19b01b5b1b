"""The programs of the pages on concepts run as pasted, and print what the pages show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.test_readme import output_of

CONCEPTS = ROOT / "docs" / "concepts"
HAVE_PROGRAMS = ("ensembles.md", "entries.md", "ledgers.md", "logs.md", "tiers.md")


@pytest.mark.sampled(one_in=6, group="documents")
@pytest.mark.parametrize("page", HAVE_PROGRAMS)
def test_a_program_prints_what_the_page_shows(page: str, tmp_path: Path) -> None:
    text = (CONCEPTS / page).read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == text.count("```python") == text.count("```text") == 1
    for program, output in examples:
        assert output_of(program, tmp_path) == output


def test_every_program_is_run() -> None:
    elsewhere = {"blobs.md", "lifecycle.md", "streams.md"}  # tests.test_readme, tests.test_signals
    having = {page.name for page in CONCEPTS.glob("*.md") if "```python" in page.read_text(encoding="utf-8")}
    assert having == {*HAVE_PROGRAMS, *elsewhere}


def test_terms_are_sorted_and_each_leads_somewhere() -> None:
    text = (CONCEPTS / "glossary.md").read_text(encoding="utf-8")
    [glossary] = re.findall(r"^```{glossary}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    terms = re.findall(r"^(\S.*)$", glossary, re.MULTILINE)
    assert len(terms) > 60
    assert terms == sorted(terms, key=str.casefold)
    named = {term.partition(" <")[2].rstrip(">") or term for term in re.findall(r"{term}`([^`]+)`", text)}
    assert named <= set(terms)
