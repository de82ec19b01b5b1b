"""What ``--help`` imports: nothing that takes long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pybk.admin import VERSION as VERSION_TEXT
from pybk.testing import open_store
from tests.waiting import PROCESS_S

HEAVY = {"asyncio", "cryptography", "crc32c", "kazoo", "lmdb", "numpy", "prometheus_client", "pyarrow", "pyspark"}
HEAVY |= {"ssl", "tabulate", "tqdm", "xxhash", "zmq"}

PROGRAM = """
import contextlib, io, json, sys
from pybk.admin.cli import NOUNS, main, parser_of

def helped(*words):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main([*words, "--help"])
    return sorted(name for name in sys.modules if "." not in name or name.startswith("pybk."))

found = {"": helped()}
for noun in NOUNS:
    for words, _ in parser_of([noun.name]).verbs[noun.name].commands(noun.name):
        found[" ".join(words)] = helped(*words)
print(json.dumps(found))
"""


def test_the_help_of_no_command_imports_what_takes_long() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    found = {command: set(modules) for command, modules in json.loads(run.stdout).items()}
    assert len(found) > 50
    heavy = {command: sorted(HEAVY & modules) for command, modules in found.items() if HEAVY & modules}
    assert heavy == {}
    nouns = {name for name in found[""] if name.startswith("pybk.admin.cli.")}
    shared = {f"pybk.admin.cli.{name}" for name in ("argparse_rows", "command_parser", "output", "time_limit")}
    assert nouns == shared, "the list of commands imports the module of no noun"


VERSION = """
import sys
before = set(sys.modules)
sys.argv = ["pybk", "--version"]
from pybk.admin.command import main
assert main() == 0
print(*sorted(set(sys.modules) - before - {"__future__", "_thread"}))
"""


def test_the_version_is_said_without_imports() -> None:
    run = subprocess.run(
        [sys.executable, "-c", VERSION], capture_output=True, text=True, timeout=PROCESS_S, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    text, imported = run.stdout.splitlines()
    assert text == VERSION_TEXT
    others = [name for name in imported.split() if name.split(".")[0] != "pybk"]
    assert others == [], "what an interpreter has anyway, and pybk"
    assert len(imported.split()) < 10


LOOKING = """
import contextlib, io, sys
from pybk.admin.cli import main

with contextlib.redirect_stdout(io.StringIO()):
    assert main(sys.argv[1:]) == 0
print(*sys.modules)
"""


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("command", [["ledger", "list"], ["store", "status"], ["store", "files"], ["permissions"]])
def test_a_look_at_a_store_imports_nothing_of_clusters(tmp_path: Path, command: list[str]) -> None:
    with open_store(tmp_path) as manager, manager.create_ledger(insecure=True) as writer:
        writer.append(b"entry")
    run = subprocess.run(
        [sys.executable, "-c", LOOKING, *command, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert (HEAVY - {"lmdb", "crc32c", "tabulate", "xxhash"}) & set(run.stdout.split()) == set()
