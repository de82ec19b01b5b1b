"""What a new process imports until its first durable append, and what it imports later, however little is left."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT
from tests.waiting import PROCESS_S

MODULES_MAX = {"ledger": 59, "log": 70}
"""Modules of pybk that a first append may import, by what it appends to."""

UNUSED = [
    "argparse",
    "asyncio",
    "cryptography",
    "ctypes.util",
    "email",
    "numpy",
    "platform",
    "socket",
    "ssl",
    "subprocess",
    "tqdm",
    "urllib",
    "zmq",
    "pybk.client",
    "pybk.health",
    "pybk.metadata",
    "pybk.replication",
    "pybk.storage.repair.rebuild",
    "pybk.transport",
]

APPEND = """
import json, sys

def loaded():
    return sorted(sys.modules)

from pybk import DigestType, LedgerManager

with LedgerManager.open(sys.argv[1]) as manager:
    options = {"digest_type": DigestType.XXH3, "insecure": True}
    if sys.argv[2] == "ledger":
        writer = manager.create_ledger(**options)
    else:
        from pybk import WriteAheadLog
        writer = WriteAheadLog.open(manager, "orders", **options)
    with writer:
        writer.append(b"x")
        before = loaded()
after = loaded()
print(json.dumps([before, after]))
"""


def run(program: str, *arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("kind", ["ledger", "log"])
def test_a_first_append_imports_what_it_uses(tmp_path: Path, kind: str) -> None:
    for _ in ("a new directory", "one that has entries, which the open replays"):
        before, after = json.loads(run(APPEND, tmp_path / "store", kind))
        names = set(before)
        unused = [name for name in UNUSED if name in names]
        assert unused == []
        own = {name for name in names if name.split(".")[0] == "pybk"}
        assert len(own) <= MODULES_MAX[kind], sorted(own)
        late = [name for name in after if name not in names]
        assert late == [], "what a close needs is there, because an import may find no descriptor"


def test_late_names_are_those_that_type_checkers_see() -> None:
    found = 0
    for path in (ROOT / "src" / "pybk").rglob("__init__.py"):
        text = path.read_text(encoding="utf-8")
        if "deferred(" not in text or path.parent.name == "pybk":
            continue
        package = ".".join(path.parent.relative_to(ROOT / "src").parts)
        tree = ast.parse(text)
        seen = {
            alias.name: "the module" if node.module == package else node.module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            if alias.asname is not None  # the mark of a name that a package has for others
        }
        tables: list[dict[str, str]] = [
            ast.literal_eval(node.args[1])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "deferred"
        ]
        late = {
            name: "the module" if name == module else f"{package}.{module}"
            for module, names in tables[0].items()
            for name in names.split()
        }
        assert late == seen, path
        found += 1
    assert found > 3


EXHAUSTED = """
import os, resource, sys
from pybk import DigestType, LedgerManager

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
manager = LedgerManager.open(sys.argv[1])
writer = manager.create_ledger(digest_type=DigestType.XXH3, insecure=True)
writer.append(b"x")
taken = []
while True:
    try:
        taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        break
late = {"numpy", "pybk.storage.compaction.checkpoint", "pybk.manager.ledger_reader", "pybk.health"}
assert not late & set(sys.modules)
manager.checkpoint()
with manager.open_ledger(writer.ledger_id, recover=False) as reader:
    print([entry.payload for entry in reader.read_unconfirmed(0, 0)])
print(manager.health().state)
writer.close()
for fd in taken:
    os.close(fd)
manager.close()
"""


def test_a_process_without_a_descriptor_imports_what_it_needs(tmp_path: Path) -> None:
    assert run(EXHAUSTED, tmp_path / "store") == "[b'x']\nok\n"


FORKED = """
import os, sys, threading
from pybk import deferral
import pybk.storage.io.failures

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tabnanny":
            begun.set()
            forking.wait(0.2)
        return None

begun, forking = threading.Event(), threading.Event()
sys.meta_path.insert(0, Finder())
late = deferral.LateModule("tabnanny")
thread = threading.Thread(target=lambda: late.check)
thread.start()
begun.wait()
child = os.fork()
if child == 0:
    import tabnanny
    os._exit(0)
forking.set()
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_imports_what_another_thread_was_importing() -> None:
    assert run(FORKED) == "0\n"


def test_a_late_module_is_what_it_stands_for() -> None:
    from pybk import deferral

    late: Any = deferral.LateModule("string")
    assert late.ascii_letters is __import__("string").ascii_letters
    with pytest.raises(AttributeError):
        _ = late.nothing_of_the_kind
    with pytest.raises(AttributeError):
        _ = late.__wrapped__
