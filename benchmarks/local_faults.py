"""Damage the files of local checkpoints, kill ranks that save them: is a wrong state ever loaded?

    python benchmarks/local_faults.py --out local_faults.jsonl
    python benchmarks/local_faults.py --smoke

Four ranks, each a node of its own; cliques of two.

Flips and cuts: two saves are on the disks, each shard in two copies. A byte is changed, or a file
cut, in the copy that is read, in both copies, or in both copies of both saves. Then all ranks load:
bit for bit the newest state, the one before, or, where no copy is left, an error on every rank.
Each damaged file is also looked at as ``dist-ckpt verify`` does. A change that goes unnoticed has
to be in padding, by a map of the file that does not come from this package.

Kills: a rank is killed (SIGKILL) at a random moment of a save, every second one asynchronous; one
save is kept. Afterwards nothing under the name of a shard is half-written, the others have not been
told that it was saved unless it was, and new processes load bit for bit this save if every rank's
shard is there, else the one before. The next save works, and removes what is left.

Ends with status 1 at the first thing that must not happen, and says case and seed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.table import Table

from benchmarks.faults.campaign import (
    KILL,
    METHODS,
    SMOKE_SHARE,
    ViolationError,
    build_class_table,
    chance_of,
    reported_violations,
    run_parts,
    violations,
)
from benchmarks.faults.local_damage import (
    Checkpoints,
    Damage,
    complaint,
    draw_cut,
    draw_flip,
    is_detected,
)
from benchmarks.faults.local_kills import NUM_RANKS, Killed, run_kills
from benchmarks.faults.local_worker import (
    PRELOAD,
    KnownStates,
    ThreadManager,
    WorldSpec,
    make_worker,
)
from benchmarks.faults.outcomes import Ending, Outcome
from benchmarks.measuring.command_line import (
    NOWHERE,
    Directory,
    Out,
    Output,
    Seed,
    Smoke,
    TimeoutS,
    open_output,
)
from benchmarks.measuring.harness import Ranks
from dist_ckpt_strategies.comm.base import Communicator
from tests.support.thread_ranks import run_ranks

KIB = 1 << 10
FLIP, CUT = "flip", "cut"
ITERATIONS = (1, 2)

Draw = Callable[[Checkpoints, random.Random, int], Damage]


@dataclass(frozen=True, slots=True)
class FaultClass:
    """What makes cases alike.

    Attributes:
        fault: ``flip``, ``cut`` or ``kill``.
        where: what was damaged, or the save that the kill was in.
        what: the bytes that were hit, or what the kill left on the disks.
        result: what all ranks loaded.
    """

    fault: str
    where: str
    what: str
    result: str


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is asked for."""

    seed: int
    num_flips: int
    num_cuts: int
    num_kills: int
    timeout_s: float


def run_damages(campaign: Campaign, root: Path) -> Iterator[tuple[FaultClass, Counter[str]]]:
    """All flips and cuts. The saves are those of processes; threads load, ten times as fast."""
    spec = WorldSpec(root, 80 * KIB, 2, len(ITERATIONS), campaign.timeout_s)
    make = partial(make_worker, spec)
    kinds: tuple[tuple[str, Draw, int], ...] = (
        (FLIP, draw_flip, campaign.num_flips),
        (CUT, draw_cut, campaign.num_cuts),
    )
    with Ranks(NUM_RANKS, make, timeout_s=3 * campaign.timeout_s, preload=PRELOAD) as ranks:
        for iteration in ITERATIONS:
            ranks.step("save", iteration)
    saved, states = Checkpoints.below(root), KnownStates(spec)

    def load(comm: Communicator) -> Outcome:
        return states.load(ThreadManager(spec, comm), comm.rank)

    for fault, draw, count in kinds:
        chance = chance_of(fault, campaign.seed)
        for number in range(count):
            yield run_damage(load, saved, fault, draw(saved, chance, number))


def run_damage(
    load: Callable[[Communicator], Outcome], saved: Checkpoints, fault: str, damage: Damage
) -> tuple[FaultClass, Counter[str]]:
    """Damage the files, load, judge; returns the class and what was noticed in how many files."""
    with saved.damaged(damage), violations(fault, damage):
        found = is_detected(saved, damage)
        outcomes = run_ranks(NUM_RANKS, load)
    why = complaint(saved, damage, found, outcomes)
    if why:
        raise ViolationError(fault, why, damage)
    result = _result(outcomes[0], saved.iterations[1])
    counts = Counter(cases=1, detected=sum(found), in_padding=len(found) - sum(found))
    return FaultClass(fault, damage.scope, damage.place, result), counts


def run_all_kills(campaign: Campaign, root: Path) -> Iterator[tuple[FaultClass, Counter[str]]]:
    """All kills, each in a world of its own."""
    spec = WorldSpec(root, 256 * KIB, 4, 1, campaign.timeout_s)
    with violations(KILL, "between two cases"):
        for one in run_kills(spec, chance_of(KILL, campaign.seed), campaign.num_kills):
            if one.complaint:
                raise ViolationError(KILL, one.complaint, one.kill)
            yield _class_of(one), Counter(cases=1)


def _class_of(one: Killed) -> FaultClass:
    result = "this save" if one.loaded == one.kill.attempt.iteration else "the one before"
    return FaultClass(KILL, METHODS[one.kill.attempt.method], one.kill.left, result)


def _result(outcome: Outcome, newest: int) -> str:
    if outcome.ending is Ending.REFUSED:
        return "an error on every rank"
    return "the newest" if outcome.iteration == newest else "the one before"


def build_fault_table(campaign: Campaign, tally: dict[FaultClass, Counter[str]]) -> Table:
    """The classes as a table."""
    return build_class_table(
        f"Local checkpoints under faults, seed {campaign.seed}: no violation",
        ("fault", "in", "hit, or left behind", "all ranks load"),
        ("cases", "noticed", "in padding"),
        (_row(one, tally[one]) for one in sorted(tally, key=str)),
    )


def _row(one: FaultClass, counts: Counter[str]) -> tuple[str, ...]:
    files = (f"{counts[n]:,}" if one.fault != KILL else "" for n in ("detected", "in_padding"))
    return one.fault, one.where, one.what, one.result, f"{counts['cases']:,}", *files


def run_campaign(campaign: Campaign, directory: Path | None, output: Output) -> None:
    """Run everything, and report it.

    Raises:
        ViolationError: something that must never happen did.
    """
    tally: dict[FaultClass, Counter[str]] = {}
    total = campaign.num_flips + campaign.num_cuts + campaign.num_kills
    parts = (partial(run_damages, campaign), partial(run_all_kills, campaign))
    for which, counts in run_parts(parts, total, directory):
        tally.setdefault(which, Counter()).update(counts)
    for which in sorted(tally, key=str):
        output.lines.write("class", which, **tally[which])
    counted = Counter(which.fault for which in tally for _ in range(tally[which]["cases"]))
    output.lines.write("campaign", campaign, violations=0, cases=counted)
    output.console.print(build_fault_table(campaign, tally))


def main(  # noqa: PLR0913 - one parameter for each option
    *,
    flips: Annotated[int, typer.Option(min=0, help="Bytes that are changed.")] = 2000,
    truncations: Annotated[int, typer.Option(min=0, help="Files that are cut.")] = 200,
    kills: Annotated[int, typer.Option(min=0, help="Ranks that are killed in a save.")] = 200,
    seed: Seed = 0,
    directory: Directory = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,
    timeout_s: TimeoutS = 20.0,
) -> None:
    """Damage local checkpoints and kill ranks that save them: is a wrong state ever loaded?"""
    share = SMOKE_SHARE if smoke else 1
    campaign = Campaign(seed, flips // share, truncations // share, kills // share, timeout_s)
    with open_output(out, "local_faults.py") as output, reported_violations(seed, output):
        run_campaign(campaign, directory, output)


if __name__ == "__main__":
    typer.run(main)
