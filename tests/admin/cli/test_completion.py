"""What completes the commands of pybk in bash and zsh."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from pybk.admin.cli import NOUNS, main
from tests.waiting import PROCESS_S

COMPLETE = """
. "$1"
COMP_WORDS=(pybk "${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
function=$(complete -p pybk | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
"$function" pybk "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
echo "${COMPREPLY[@]}"
"""

ZSH_COMPLETE = """
_describe() { print -rl -- ${(P)2} }
_files() { print paths }
script=$1; shift
words=(pybk "$@"); CURRENT=$#words
source $script
"""


def completion(shell: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell]) == 0
    path = directory / shell
    path.write_text(capsys.readouterr().out, encoding="utf-8")
    return path


def test_bash_completes_nouns_verbs_and_options_without_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = completion("bash", tmp_path, capsys)
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")

    def completed(*words: str) -> list[str]:
        run = subprocess.run(
            [bash, "-c", COMPLETE, "bash", str(script), *words],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
        )
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout.split()

    assert completed("cl") == ["cluster"]
    assert completed("bookie", "dr") == ["drain"]
    assert completed("bookie", "drain", "--wa") == ["--wait"]
    assert completed("cluster", "settings", "s") == ["show", "set"]
    assert {noun.name for noun in NOUNS} <= set(completed(""))
    assert completed("--profile", "dev", "dev", "cor") == ["corrupt"], "the name of a profile is no command"
    assert completed("ledger", "list", "--tier", "") == ["nvme", "ssd", "hdd"]
    assert completed("spark", "tier", "s") == ["ssd"]
    assert completed("bookie", "--adv") == ["--advertise", "--advertise-check"], "of the verb that is meant"
    assert completed("ledger", "list", "") == [], "the shell completes paths then"


def test_zsh_completes_and_describes_all_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = completion("zsh", tmp_path, capsys).read_text(encoding="utf-8")
    assert text.startswith("#compdef pybk")
    for word in ("ok-to-remove", "--accept-loss", "rebuild-index"):
        assert word in text
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("there is no zsh")

    def completed(*words: str) -> list[str]:
        run = subprocess.run(
            [zsh, "-c", ZSH_COMPLETE, "zsh", str(tmp_path / "zsh"), *words],
            env={"PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=PROCESS_S,
        )
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout.splitlines()

    assert "cluster:show the state of a cluster" in "\n".join(completed(""))
    assert "--wait:wait until it can be drained" in "\n".join(completed("bookie", "drain", "--"))
    assert completed("ledger", "list", "--tier", "") == ["nvme", "ssd", "hdd"]
    assert completed("ledger", "list", "") == ["paths"]
