"""``python -m tests.loss --cuts 10000 --seed 1``: cuts recorded runs, and leaves out each of their syncs.

Runs are killed, too, and what a kill or a cut left is recovered in a run of its own, which is cut again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from tests.loss.campaign import Cut, Failure, Run, room
from tests.loss.covered import COVERED, site_of
from tests.loss.disk import Loss
from tests.loss.recording import why_not
from tests.loss.workloads.every import WORKLOADS

_RUN_CUTS = 250
"""The cuts of one run; then the workload is run anew, with another seed."""
_RECOVERIES = 2
"""How often a run is killed and recovered, and how often it is cut and recovered, per run."""
_RECOVERY_CUTS = 12
"""The cuts of one recovery."""


class Campaign:
    """Cuts runs of all workloads, and counts what was cut.

    Args:
        seed: What is drawn.
        mutant_cuts: How often a run without the syncs of one call site is cut, at most.
    """

    def __init__(self, seed: int, mutant_cuts: int) -> None:
        self._choice = Random(seed)
        self._mutant_cuts = mutant_cuts
        self.done = 0
        self.failures: list[Failure] = []
        self.before: Counter[str] = Counter()
        self.after: Counter[str] = Counter()
        self.needed: dict[str, bool] = {}
        """Call sites, and whether a cut showed that their syncs are needed."""

    def cut(self, run: Run, count: int) -> None:
        """Cut a run: before and after syncs of each call site, and anywhere."""
        cuts: list[Cut] = []
        for call in run.syncs:
            often = self.before[call] > 20 * _RECOVERIES
            cuts += [] if often and run.first else run.cuts_at(call, self._choice, 2)
        cuts += run.random_cuts(self._choice, max(0, count - len(cuts)))
        positions = Counter(cut.position for cut in cuts)
        for call, syncs in run.syncs.items():
            self.before[call] += sum(positions[each] for each in syncs)
            self.after[call] += sum(positions[each + 1] for each in syncs)
        self._note(run.failures(cuts))
        self.done += len(cuts)

    def take(self, run: Run, count: int, *, mutants: bool) -> None:
        """Run a workload, cut it, and cut recoveries of it.

        Args:
            run: The run, which has not begun.
            count: How often it is cut.
            mutants: Whether to leave out syncs, too.
        """
        mutants = mutants and self._mutant_cuts > 0
        try:
            run.work()
        except AssertionError as error:
            self._note_stuck(run, f"not run: {error}", traceback.format_exc())
            return
        self.cut(run, count)
        if mutants:
            self.leave_out(run)
        self.cut_again(run, mutants)

    def cut_again(self, run: Run, mutants: bool) -> None:
        """Cut recoveries: of a run that was killed, and of a cut of one that was not."""
        for kill in [True, False] * _RECOVERIES:
            sync = self._choice.choice(run.syncs[self._choice.choice(list(run.syncs))])
            (cut,) = run.random_cuts(self._choice, 1)
            with room() as path:
                again = Run.of_killed(run.name, run.seed, path, max(sync, 1)) if kill else run.cut_run(cut, path)
                try:
                    again.recover()
                except AssertionError as error:
                    self._note_stuck(again, f"not recovered: {error}", traceback.format_exc())
                    continue
                self.cut(again, _RECOVERY_CUTS)
                if mutants:
                    self.leave_out(again)

    def _note_stuck(self, run: Run, problem: str, trace: str) -> None:
        """Note that a process failed; what it found is what its record left."""
        place = Cut(len(run.records), Loss.NOTHING, 0)
        self._note([run.keep(Failure(run.name, run.seed, place, problem, trace))])

    def _note(self, failures: Iterable[Failure]) -> None:
        for failure in failures:
            self.failures.append(failure)
            print(failure, flush=True)  # noqa: T201

    def leave_out(self, run: Run) -> None:
        """Leave out the syncs of each call site that was not seen to be needed yet."""
        for call in run.syncs:
            if not self.needed.get(call):
                self.needed[call] = run.failure_without(call, self._choice, self._mutant_cuts) is not None

    def report(self) -> bool:
        """Print the call sites; return whether no cut failed, and each site was cut before and after."""
        good = not self.failures
        needed = {site_of(call) for call, seen in self.needed.items() if seen}
        for call in sorted(self.before):
            covered = COVERED.get(site_of(call))
            verdict = f"covered ({covered.reason})" if covered else "not seen to be needed"
            verdict = "needed" if site_of(call) in needed else verdict
            if not self.before[call] or not self.after[call]:
                good, verdict = False, "NOT CUT"
            print(f"{self.before[call]:6} before {self.after[call]:6} after, {verdict}: {call}")  # noqa: T201
        print(  # noqa: T201
            f"{self.done} cuts, {len(self.failures)} failures; {len(self.before)} call sites, "
            f"{sum(self.needed.values())} of them needed"
        )
        return good


def repeat(folder: Path) -> int:
    """Cut the record of a failure again, and check what is left; return 1 if that fails."""
    run, cut = Run.kept(folder)
    run.path.mkdir()
    try:
        failures = list(run.wrong_after([cut]))
    finally:
        shutil.rmtree(run.path)
    for failure in failures:
        print(f"{failure}\n{failure.trace}")  # noqa: T201
    return 1 if failures else 0


def main() -> int:
    """Run a campaign; return 1 if anything was wrong, or a call site was not cut."""
    parser = argparse.ArgumentParser(prog="python -m tests.loss", description=__doc__)
    parser.add_argument("--cuts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated; all by default")
    parser.add_argument("--mutant-cuts", type=int, default=40, help="cuts without the syncs of one call site, at most")
    parser.add_argument("--repeat", type=Path, metavar="DIRECTORY", help="check again what a failure left")
    options = parser.parse_args()
    if options.repeat is not None:
        return repeat(options.repeat)
    if why_not() is not None:
        print(f"nothing can be recorded: {why_not()}")  # noqa: T201
        return 1
    campaign = Campaign(options.seed, options.mutant_cuts)
    try:
        run_all(campaign, options.workloads.split(","), options.cuts, options.seed)
    except KeyboardInterrupt:
        print("interrupted: this is what was cut until then")  # noqa: T201
        campaign.report()
        return 1
    return 0 if campaign.report() else 1


def run_all(campaign: Campaign, names: Sequence[str], cuts: int, seed: int) -> None:
    """Run workloads in turn, each with another seed when its turn comes again, until there were enough cuts."""
    begun, number = time.monotonic(), 0
    while campaign.done < cuts or number < len(names):
        name = names[number % len(names)]
        with room() as path:
            run = Run(name, seed * 1000 + number // len(names), path)
            campaign.take(run, min(_RUN_CUTS, max(1, cuts // len(names))), mutants=number < 2 * len(names))
        number += 1
        print(  # noqa: T201
            f"{campaign.done} cuts of {cuts}, {len(campaign.failures)} failures, "
            f"{time.monotonic() - begun:.0f} s: {name}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
