"""Mutants are found, drawn, loaded and noticed as they should be."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.__main__ import drawn_names, failing_test, is_judged, judged_equivalent
from tests.mutation.loading import VARIABLE
from tests.mutation.operators import exists, fingerprint, mutated, mutations, parse, path_of, tree_of
from tests.mutation.patterns import PatternError, replace_in
from tests.mutation.targets import GROUPS, draw
from tests.paths import ROOT

NAME = "replication.quorum:Quorum.negatives_needed/arithmetic.0"


def replaced(source: str, old: str, new: str) -> str:
    tree = ast.parse(source)
    replace_in(tree, old, new, what="it")
    return ast.unparse(tree)


@pytest.mark.parametrize(
    ("source", "old", "new", "result"),
    [
        ("a = f(x,\n  y)  # why", "f(x, y)", "f(y, x)", "a = f(y, x)"),
        ("a = 1\nb = 2\nc = 3", "b = 2", "pass", "a = 1\npass\nc = 3"),
        ("if a and b:\n    c()\n    d()", "if a and b: ...", "if a: ...", "if a:\n    c()\n    d()"),
        ("x = f(a, [1])", "f(_1, _2)", "g(_2, _1)", "x = g([1], a)"),
        ("f(1, last=a.b)", "last=a.b", "first=0", "f(1, first=0)"),
        ("f()\ng()", "f()", "pass\nf()", "pass\nf()\ng()"),
    ],
)
def test_a_pattern_is_replaced(source: str, old: str, new: str, result: str) -> None:
    assert replaced(source, old, new) == result


@pytest.mark.parametrize(("source", "places"), [("a = c", 0), ("a = b\nc = b", 2)])
def test_a_pattern_names_one_place(source: str, places: int) -> None:
    with pytest.raises(PatternError, match=f"{places} places"):
        replaced(source, "b", "d")


@pytest.mark.long
def test_the_same_seed_draws_the_same_mutants_of_every_kind_of_code() -> None:
    names = [str(each.name) for each in draw(1, 24)]
    assert names == [str(each.name) for each in draw(1, 24)]
    assert len(set(names)) == 24
    packages = {str(each.name).split(":")[0].split(".")[0] for each in draw(1, 96)}
    assert packages - {"threads"} == {"replication", "bookie", "client", "metadata", "spark"}
    assert sum(name.startswith("replication") for name in names) > 6


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("module", sorted({module for group in GROUPS for module in group.modules}))
def test_each_mutation_has_a_name_of_its_own_and_compiles(module: str) -> None:
    tree = tree_of(module)
    found = mutations(tree)
    assert len({(each.function, each.operator, each.number) for each in found}) == len(found) > 0
    for each in found:
        each.apply()
    compile(ast.fix_missing_locations(tree), module, "exec")


def test_a_mutant_is_loaded_by_processes_that_are_started() -> None:
    ask = "from pybk.replication.quorum import Quorum; print(Quorum(5, 4, 3).negatives_needed)"
    path = os.pathsep.join((str(Path(__file__).with_name("site")), str(ROOT / "src"), str(ROOT)))
    for mutant, result in (("", "2"), (NAME, "0")):
        done = subprocess.run(
            [sys.executable, "-c", ask],
            env={**os.environ, VARIABLE: mutant, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == result


@pytest.mark.sampled(one_in=3, group="runs of pytest")
def test_a_mutant_is_noticed_by_the_tests_of_its_function_alone() -> None:
    """Pytest, which loads modules itself, loads the mutant."""
    noticed = "tests/replication/test_quorum.py::"
    assert failing_test(parse(NAME), "tests/replication/test_quorum.py").startswith(noticed)
    assert failing_test(parse(NAME), "tests/mutation/test_mutation.py::test_a_pattern_names_one_place") == ""


def test_a_mutation_that_no_longer_exists_is_reported() -> None:
    name = parse("replication.quorum:Quorum.negatives_needed/arithmetic.99")
    with pytest.raises(LookupError, match="draw another one"):
        mutated(name, path_of(name.module).read_bytes())


def test_a_mutant_that_is_gone_gives_way_to_another_of_the_same_modules(tmp_path: Path) -> None:
    file = tmp_path / "results"
    gone = "metadata.authenticated_values:unseal/compare.99"
    file.write_text(json.dumps({"seed": 1, "drawn": [NAME, gone]}) + '\n{"a": "result"}\n')
    kept, instead = drawn_names(file, 1, 2)
    assert str(kept) == NAME
    assert exists(instead)
    assert instead.module.startswith("metadata.")
    header, result = file.read_text().splitlines()
    assert json.loads(header) == {"seed": 1, "drawn": [NAME, str(instead)]}
    assert result == '{"a": "result"}'
    assert drawn_names(file, 1, 2) == [kept, instead]


def test_a_mutant_of_a_module_that_is_gone_gives_way_to_another(tmp_path: Path) -> None:
    file = tmp_path / "results"
    gone = "replication.gone:f/compare.0"
    file.write_text(json.dumps({"seed": 1, "drawn": [NAME, gone]}) + "\n")
    assert fingerprint(parse(gone)) == ""
    kept, instead = drawn_names(file, 1, 2)
    assert str(kept) == NAME
    assert exists(instead)


def test_equivalent_mutants_are_recognised_by_the_checksum_of_their_function() -> None:
    """If the function has changed, the argument counts no more."""
    text = Path(__file__).with_name("equivalent.md").read_text()
    assert len(judged_equivalent(text)) == text.count("\n### ") > 0
    now = fingerprint(parse(NAME))
    assert judged_equivalent(f"### `{NAME}` (function {now})\n") == {NAME: now}
    assert is_judged(parse(NAME), {NAME: now})
    assert not is_judged(parse(NAME), {NAME: "0badcafe"})
    assert not is_judged(parse(NAME), {})
