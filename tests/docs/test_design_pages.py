"""The pages about the design: programs run as printed, and the commands of campaigns exist with their options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pybk.healing.rebalance import MOVED_MAX, MOVES_MAX, TOLERANCE
from pybk.replication.placement import FULL_ABOVE, STEPS_MAX
from pybk.replication.recovery import RETRY_FOR_NS
from pybk.replication.writer import REVIVE_NS, REVIVE_NS_MAX
from tests.docs.operating import Hosts, blocks
from tests.paths import ROOT
from tests.waiting import PROCESS_S

COMMAND = re.compile(r"\bpython -m ((?:tests|bench)[\w.]*)((?: [^`#\n|]+)?)")
OUTPUT = re.compile(r"\bmake ([a-z-]+)(?: |`|$)")


def test_a_machine_is_tested_and_a_rule_is_broken_as_the_page_says(tmp_path: Path) -> None:
    assert len([each for each in blocks("design/simulator.md") if each.language == "python"]) == 2
    Hosts(tmp_path, {}).follow("design/simulator.md")


def named() -> list[tuple[str, tuple[str, ...]]]:
    """Return the modules that the pages have run as programs, with their options."""
    texts = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("design/simulator.md", "design/proofs.md")]
    texts += [(ROOT / "docs" / "admin" / "capacity.md").read_text(encoding="utf-8")]
    found = {
        (match[1], tuple(re.findall(r"--[a-z-]+", match[2]))) for text in texts for match in COMMAND.finditer(text)
    }
    return sorted(found)


@pytest.mark.parametrize(("module", "options"), named(), ids=[" ".join((name, *options)) for name, options in named()])
def test_the_commands_of_campaigns_exist(module: str, options: tuple[str, ...]) -> None:
    path = ROOT / Path(*module.split("."))
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    source = file.read_text(encoding="utf-8")
    assert '__name__ == "__main__"' in source
    for option in options:
        assert f'"{option}"' in source, option


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_the_campaign_of_flipped_bits_is_a_run_of_pytest() -> None:
    command = [sys.executable, "-m", "tests.storage.test_bitflips", "--collect-only", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PROCESS_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_any_bit_of_files_with_entries" in done.stdout


def test_the_targets_of_make_exist() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("design/simulator.md", "design/proofs.md"):
        assert set(OUTPUT.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))) <= made, name


def test_the_tests_that_the_pages_name_exist() -> None:
    text = (ROOT / "docs" / "design" / "proofs.md").read_text(encoding="utf-8")
    for name in set(re.findall(r"`((?:tests|tools|deploy)/[\w/.-]+)", text)):
        assert (ROOT / name).exists(), name


def test_the_numbers_of_the_rules_are_those_of_the_code() -> None:
    text = " ".join((ROOT / "docs" / "design" / "replication.md").read_text(encoding="utf-8").split())
    for stated in (
        f"and {REVIVE_NS // 10**9} s later, then after pauses that double to {REVIVE_NS_MAX // (60 * 10**9)} min",
        f"until none is left or {STEPS_MAX:,} were tried".replace(",", " "),
        f"would be filled beyond {FULL_ABOVE * 100:.0f} % by them",
        f"at most {MOVED_MAX * 100:.0f} % of the bytes of all copies, and at most {MOVES_MAX:,} copies",
        f"is more than {TOLERANCE * 100:.0f} % of its capacity away",
        f"again, for {RETRY_FOR_NS // 10**9} s from the first round without progress",
    ):
        assert stated in text, stated
