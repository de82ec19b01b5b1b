"""A campaign of drawn mutants: ``python -m tests.mutation --seed S --count N [--seeds N] [--resume FILE]``.

Each mutant is run against the unit tests of its module and, if it is of a machine, against seeds of the simulator until
one notices. With ``--resume`` each result is written to a file at once, and what the file knows is not run again; those
that survived continue at the seed where they stopped, with ``--again`` after the unit tests were run once more. Mutants
of the file whose place in the library is gone are replaced by others that are drawn from the same modules.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests import sampling
from tests.mutation.loading import VARIABLE
from tests.mutation.operators import Name, exists, fingerprint, mutations, parse, tree_of
from tests.mutation.targets import another, draw, group_of
from tests.paths import ROOT

EQUIVALENT = Path(__file__).with_name("equivalent.md")
SEEDS_MAX = 20_000
SLICE = 2_000
TEST_SECONDS = 30
"""A mutant that keeps one test busy for so long hangs: without mutants no test of these takes a third of it."""
FILE_SECONDS = 600
"""A mutant hangs as well if it keeps the tests of one file busy for so long, though each of them ends."""

Result = dict[str, Any]


def _environment(name: Name) -> dict[str, str]:
    path = os.pathsep.join((str(Path(__file__).with_name("site")), str(ROOT / "src"), str(ROOT)))
    return {
        **os.environ,
        VARIABLE: str(name),
        sampling.VARIABLE: sampling.EVERYTHING,
        "PYTHONPATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _unit_tests(name: Name, tests: tuple[str, ...]) -> str:
    """Run tests with a mutant; return which one failed, and failed again, or nothing."""
    for test in tests:
        failed = failing_test(name, test)
        if failed and failing_test(name, failed):
            return failed
    return ""


def failing_test(name: Name, test: str) -> str:
    """Return the first test of a file or directory that fails with a mutant, or nothing."""
    # What hangs may hang again when it is torn down, so the process ends at the first time-out.
    plugins = ("-p", "no:randomly", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={TEST_SECONDS}")
    # With pytest's own loader of modules, which has the package's as well, no mutant would be loaded.
    loading = "--assert=plain"
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-v", *plugins, loading, "--tb=line", "-rfE", test],
        cwd=ROOT,
        env=_environment(name),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=FILE_SECONDS)
    except subprocess.TimeoutExpired:
        return test
    finally:
        _end_group(process)
    if not process.returncode:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    begun = re.findall(r"^(tests/\S+::\S+)", output, re.MULTILINE)
    return failed[1] if failed else begun[-1] if begun else test


def _end_group(process: subprocess.Popen[str]) -> None:
    """End a process and all that it started: what hangs may have left bookies behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _simulator(name: Name, first: int, count: int) -> str:
    """Run seeds with a mutant; return the one that failed and how, or nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.simulating", str(first), str(count)],
        cwd=ROOT,
        env=_environment(name),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stdout.strip() or (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        return f"seed {said}"
    return ""


def _judge(name: Name, old: Result | None, seeds: int, *, again: bool) -> Result:
    """Run what has not been run of a mutant, until something notices."""
    group = group_of(name.module)
    result: Result = {
        "mutant": str(name),
        "of": fingerprint(name),
        "killed_by": "",
        "seeds": old["seeds"] if old else 0,
    }
    if old is None or again:
        result["killed_by"] = _unit_tests(name, group.modules[name.module])
    while group.simulated and not result["killed_by"] and result["seeds"] < seeds:
        count = min(SLICE, seeds - result["seeds"])
        result["killed_by"] = _simulator(name, result["seeds"], count)
        result["seeds"] += count
    return result


def drawn_names(file: Path | None, seed: int, count: int) -> list[Name]:
    """Draw mutants, or return those that a file says were drawn: what is drawn from a seed changes with the library."""
    if file is None:
        return [each.name for each in draw(seed, count)]
    if not file.exists():
        names = [str(each.name) for each in draw(seed, count)]
        file.write_text(json.dumps({"seed": seed, "drawn": names}) + "\n")
    with file.open() as lines:
        header = json.loads(next(lines))
    if (header["seed"], len(header["drawn"])) != (seed, count):
        raise SystemExit(f"{file} has {len(header['drawn'])} mutants of seed {header['seed']}: ask for these")
    drawn = [parse(name) for name in header["drawn"]]
    for at, name in enumerate(drawn):
        if not exists(name):
            drawn[at] = another(seed, name, drawn)
            print(f"{name} is gone; {drawn[at]} takes its place", flush=True)
    if list(map(str, drawn)) != header["drawn"]:
        header["drawn"] = list(map(str, drawn))
        file.write_text("\n".join([json.dumps(header), *file.read_text().splitlines()[1:], ""]))
    return drawn


def _load(file: Path | None) -> dict[str, Result]:
    """Return the newest results that are about functions as they are now."""
    if file is None:
        return {}
    results = {line["mutant"]: line for line in map(json.loads, file.read_text().splitlines()[1:])}
    return {name: line for name, line in results.items() if line["of"] == fingerprint(parse(name))}


def describe(name: Name) -> str:
    """Return where a mutant is, and what it changes."""
    wanted = (name.function, name.operator, name.number)
    for each in mutations(tree_of(name.module)):
        if (each.function, each.operator, each.number) == wanted:
            line = getattr(each.old, "lineno", "?")
            old, new = (ast.unparse(ast.fix_missing_locations(node)).splitlines()[0] for node in (each.old, each.new))
            return f"{name}  line {line}: {old}  ->  {new}"
    return f"{name}  (gone)"


def judged_equivalent(text: str) -> dict[str, str]:
    """Return the mutants that a text judges equivalent, each with the checksum of the function that it argues about."""
    return dict(re.findall(r"^### `(\S+)` \(function (\w+)\)$", text, re.MULTILINE))


def is_judged(name: Name, judged: dict[str, str]) -> bool:
    """Return whether a mutant was judged equivalent, and its function is still the one that was judged."""
    return judged.get(str(name), "") == fingerprint(name)


def _summary(names: list[Name], results: dict[str, Result]) -> None:
    judged = judged_equivalent(EQUIVALENT.read_text())
    counts: Counter[str] = Counter()
    for name in names:
        result = results.get(str(name))
        if result is None:
            how = "not run"
        elif result["killed_by"]:
            how = "killed by the simulator" if result["killed_by"].startswith("seed ") else "killed by unit tests"
        else:
            how = "judged equivalent" if is_judged(name, judged) else "survived"
            print(f"{how} ({result['seeds']} seeds): {describe(name)}")
        counts[how] += 1
    print(", ".join(f"{how}: {count}" for how, count in sorted(counts.items())))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Run drawn mutants.")
    parser.add_argument("--seed", type=int, default=1, help="what the mutants are drawn from (default 1)")
    parser.add_argument("--count", type=int, default=200, help="how many are drawn (default 200)")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="seeds of the simulator (default 20000)")
    parser.add_argument("--resume", type=Path, help="a file with one result per line, read and added to")
    parser.add_argument("--again", action="store_true", help="run survivors through the unit tests once more")
    parser.add_argument("--list", action="store_true", help="print the mutants and what is known of them, run nothing")
    parser.add_argument("--only", default="", help="mutants whose names contain this")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.count} mutants", flush=True)
    drawn = drawn_names(arguments.resume, arguments.seed, arguments.count)
    names = [name for name in drawn if arguments.only in str(name)]
    results = _load(arguments.resume)
    judged = judged_equivalent(EQUIVALENT.read_text())
    for name in names:
        old = results.get(str(name))
        if arguments.list:
            print(describe(name), "" if old is None else old["killed_by"] or f"survived {old['seeds']} seeds")
            continue
        seeds = 0 if is_judged(name, judged) else arguments.seeds
        complete = old is not None and (old["seeds"] >= seeds or not group_of(name.module).simulated)
        if old is not None and (old["killed_by"] or (complete and not arguments.again)):
            continue
        result = results[str(name)] = _judge(name, old, seeds, again=arguments.again)
        print(describe(name), "--", result["killed_by"] or f"survived {result['seeds']} seeds", flush=True)
        if arguments.resume is not None:
            with arguments.resume.open("a") as file:
                file.write(json.dumps(result) + "\n")
    _summary(names, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
