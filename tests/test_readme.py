"""What the README promises at first sight."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pybk.credentials import write_new_secret
from tests.paths import ROOT
from tests.spark import clusters
from tests.waiting import PROCESS_S

README = (ROOT / "README.md").read_text(encoding="utf-8")


def make_secret(directory: Path) -> None:
    """Do what the README has its readers do first."""
    for name in re.findall(r"`pybk secret new ([a-z-]+)`", README):
        write_new_secret(str(directory / name))


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def output_of(program: str, directory: Path) -> str:
    """Run a program in a directory, without errors or warnings; return what it prints."""
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=directory, capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def test_the_program_runs_as_pasted_and_prints_what_is_said(tmp_path: Path) -> None:
    program = tmp_path / "pasted.py"
    program.write_text(blocks("python")[0], encoding="utf-8")
    make_secret(tmp_path)
    run = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == blocks("text")[0]
    assert (tmp_path / "data").is_dir()


def test_the_example_is_the_same_program() -> None:
    text = (ROOT / "examples" / "quickstart.py").read_text(encoding="utf-8")
    assert text.partition('"""\n\n')[2] == blocks("python")[0]


def test_the_two_commands_stand_at_the_top() -> None:
    first = blocks("sh")[0]
    assert README.index("make demo") < 400
    targets = re.findall(r"^([\w-]+): \$\(VENV\)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"^make (\w+)", first, re.MULTILINE)
    assert named == ["demo", "test"]
    assert set(named) <= set(targets)


def test_the_commands_exist() -> None:
    """The console script of the project's metadata knows what the README names."""
    entry = re.search(r"^ +pybk = ([\w.]+):(\w+)$", (ROOT / "setup.cfg").read_text(encoding="utf-8"), re.MULTILINE)
    assert entry is not None
    program = f"import sys; from {entry[1]} import {entry[2]}; sys.exit({entry[2]}())"
    run = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert run.returncode == 0, run.stderr
    named = set(re.findall(r"(?:`|^)pybk ([a-z-]+)", README, re.MULTILINE))
    assert named == {
        "backup",
        "bookie",
        "cluster",
        "console",
        "dev",
        "ledger",
        "permissions",
        "secret",
        "spark",
        "store",
    }
    assert [name for name in named if not re.search(rf"\b{name}\b", run.stdout)] == []


def test_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert len(links) > 5
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.sampled(one_in=6, group="documents")
def test_the_cluster_of_the_readme_runs_as_pasted_and_again(tmp_path: Path) -> None:
    make_secret(tmp_path)
    for _ in range(2):
        output_of(blocks("python")[1], tmp_path)


@pytest.mark.sampled(one_in=6, group="documents")
def test_the_write_ahead_log_of_the_readme_is_there_again(tmp_path: Path) -> None:
    make_secret(tmp_path)
    printed = [output_of(blocks("python")[2], tmp_path) for _ in range(2)]
    assert printed == ["durable: 1\n", "again: 1 b'set a 1'\ndurable: 2\n"]


@pytest.mark.sampled(one_in=6, group="documents")
@pytest.mark.parametrize("document", ["blobs.md", "streams.md"])
def test_the_programs_of_a_document_run_as_pasted(document: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "concepts" / document).read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert programs
    for program in programs * 2:
        output_of(program, tmp_path)


@pytest.mark.sampled(one_in=6, group="documents")
def test_the_event_sourced_program_remembers_what_it_did(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "howto" / "eventsourcing.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for events in (3, 6):
        assert output_of(program, tmp_path) == f"events so far: {events}\n"


@pytest.mark.sampled(one_in=6, group="documents")
def test_the_program_for_spark_runs_as_pasted(tmp_path: Path) -> None:
    make_secret(tmp_path)
    (tmp_path / "pasted.py").write_text(blocks("python")[3], encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "pasted.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
        env=clusters.environment(tmp_path),
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"\| +0\| *ann\| *3 apples\| *20", run.stdout), run.stdout
