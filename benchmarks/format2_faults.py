"""Damage the files of a format 2 checkpoint, kill ranks that save one: is anything wrong loaded?

    python benchmarks/format2_faults.py --flips 10000 --kills 300 --out format2_faults.jsonl
    python benchmarks/format2_faults.py --smoke

Damage: four ranks have saved; one process loads all of it, after a byte of some file is changed, or
a file is cut, deleted, made longer, or swapped with another. It has to get every bit that was
saved, or an error that names a damaged file; and where it need not notice, for a reason that is
listed, ``dist-ckpt verify`` has to, but for what has no meaning.

Kills: a rank is killed (SIGKILL) at a random moment of a save, every second one asynchronous. Then
the others end in time, and have not been told that it was saved unless it was; new processes load
the checkpoint before, bit for bit, and this one if it has its marker; without that it is refused as
incomplete. ``dist-ckpt prune`` leaves the newest complete one alone.

Ends with status 1 at the first thing that must not happen, and says case and seed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import torch
import torch.distributed as dist
import typer
from rich.table import Table
from torch.distributed import HashStore  # type: ignore[attr-defined]  # bound at run time

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
from benchmarks.faults.format2_damage import (
    Damage,
    Fault,
    Files,
    Kind,
    draw_flip,
    draw_other,
    is_named,
)
from benchmarks.faults.format2_kills import Killed, run_kills
from benchmarks.faults.format2_worker import NUM_WRITERS, PRELOAD, Loader, Spec, make_worker
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
from dist_ckpt_strategies.formats.scan import scan, verify

OTHER = "other"
ITERATION = 1
_ROWS = 1024
_DETECTED = "an error that names it"
_VERIFY_SHARE = 10
"""Every so many damages that a load has noticed are shown to ``dist-ckpt verify`` too."""

Draw = Callable[[Files, random.Random, int], Damage]


@dataclass(frozen=True, slots=True)
class FaultClass:
    """What makes cases alike.

    Attributes:
        fault: what was done.
        what: the bytes or the file that was hit; the save that the kill was in.
        result: what a load came to.
        why: it need not have noticed; what a kill left on the disk.
    """

    fault: str
    what: str
    result: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is asked for."""

    seed: int
    num_flips: int
    num_others: int
    num_kills: int
    timeout_s: float


def run_damages(campaign: Campaign, root: Path) -> Iterator[FaultClass]:
    """All damage. The checkpoint is of four processes; this one loads it, as a world of one."""
    spec = Spec(root, _ROWS, campaign.timeout_s)
    make = partial(make_worker, spec)
    with Ranks(NUM_WRITERS, make, timeout_s=3 * campaign.timeout_s, preload=PRELOAD) as ranks:
        ranks.step("save", ITERATION)
    files = Files.below(spec.directory(ITERATION))
    kinds: tuple[tuple[str, Draw, int], ...] = (
        (Fault.FLIP, draw_flip, campaign.num_flips),
        (OTHER, draw_other, campaign.num_others),
    )
    with _world_of_one():
        loader = Loader(spec, 0, 1)

        def load() -> Outcome:
            return loader.load(ITERATION, files.root)

        for fault, draw, count in kinds:
            chance = chance_of(fault, campaign.seed)
            for number in range(count):
                yield run_damage(load, files, draw(files, chance, number))


@contextmanager
def _world_of_one() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_damage(load: Callable[[], Outcome], files: Files, damage: Damage) -> FaultClass:
    """Damage files, load, judge.

    Raises:
        ViolationError: what came back is not what was saved, or nobody was told what is damaged.
    """
    with files.damaged(damage), violations(damage.fault, damage):
        outcome = load()
        why = _complaint(files, damage, outcome)
        passed = files.why_passed(damage) if not why and outcome.ending is Ending.LOADED else ""
        if not why and (passed or damage.number % _VERIFY_SHARE == 0):
            why = _unverified(files, damage)
    if why:
        raise ViolationError(damage.fault, why, damage)
    result = "what was saved" if passed else _DETECTED
    return FaultClass(damage.fault, damage.kind, result, passed)


def _complaint(files: Files, damage: Damage, outcome: Outcome) -> str | None:
    match outcome.ending:
        case Ending.REFUSED:
            is_told = is_named(files, damage, outcome.text)
            return None if is_told else f"the error does not name the file: {outcome.text}"
        case Ending.LOADED:
            return None if files.may_pass(damage) else "a load did not notice"
        case _:
            return f"something else was loaded: {outcome}"


def _unverified(files: Files, damage: Damage) -> str | None:
    """Whether ``dist-ckpt verify`` should have noticed and has not, or the other way round."""
    findings = verify(scan(files.root))
    named = {finding.path for finding in findings}
    is_meaningless = files.is_same(damage) or set(damage.names) == {Kind.SAVE}
    if is_meaningless:
        return f"dist-ckpt verify complains: {findings}" if findings else None
    return None if named & set(damage.names) else f"dist-ckpt verify does not say so: {findings}"


def run_all_kills(campaign: Campaign, root: Path) -> Iterator[FaultClass]:
    """All kills, each in a world of its own."""
    spec = Spec(root, _ROWS, campaign.timeout_s)
    with violations(KILL, "between two cases"):
        for one in run_kills(spec, chance_of(KILL, campaign.seed), campaign.num_kills):
            if one.complaint:
                raise ViolationError(KILL, one.complaint, one.kill)
            yield _class_of(one)


def _class_of(one: Killed) -> FaultClass:
    result = "this save" if one.loaded == one.kill.attempt.iteration else "the one before"
    return FaultClass(KILL, METHODS[one.kill.attempt.method], result, one.kill.left)


def build_fault_table(campaign: Campaign, tally: Counter[FaultClass]) -> Table:
    """The classes as a table."""
    return build_class_table(
        f"Format 2 under faults, seed {campaign.seed}: no violation",
        ("fault", "of", "a load brings", "why, or what is left"),
        ("cases",),
        (
            (one.fault, one.what, one.result, one.why, f"{tally[one]:,}")
            for one in sorted(tally, key=str)
        ),
    )


def run_campaign(campaign: Campaign, directory: Path | None, output: Output) -> None:
    """Run everything, and report it.

    Raises:
        ViolationError: something that must never happen did.
    """
    tally: Counter[FaultClass] = Counter()
    total = campaign.num_flips + campaign.num_others + campaign.num_kills
    parts = (partial(run_damages, campaign), partial(run_all_kills, campaign))
    tally.update(run_parts(parts, total, directory))
    for which in sorted(tally, key=str):
        output.lines.write("class", which, cases=tally[which])
    counted: Counter[str] = Counter()
    for which, cases in tally.items():
        counted[which.fault] += cases
    output.lines.write("campaign", campaign, violations=0, cases=counted)
    output.console.print(build_fault_table(campaign, tally))


def main(  # noqa: PLR0913 - one parameter for each option
    *,
    flips: Annotated[int, typer.Option(min=0, help="Bytes that are changed.")] = 10_000,
    others: Annotated[int, typer.Option(min=0, help="Files damaged in other ways.")] = 2000,
    kills: Annotated[int, typer.Option(min=0, help="Ranks that are killed in a save.")] = 300,
    seed: Seed = 0,
    directory: Directory = None,
    out: Out = NOWHERE,
    smoke: Smoke = False,
    timeout_s: TimeoutS = 20.0,
) -> None:
    """Damage format 2 checkpoints and kill ranks that save them: is anything wrong ever loaded?"""
    share = SMOKE_SHARE if smoke else 1
    campaign = Campaign(seed, flips // share, others // share, kills // share, timeout_s)
    with open_output(out, "format2_faults.py") as output, reported_violations(seed, output):
        run_campaign(campaign, directory, output)


if __name__ == "__main__":
    typer.run(main)
