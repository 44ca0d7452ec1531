"""``dist-ckpt demo --chaos``: ranks fail, are killed and hang at every point of a step.

Four ranks, two replicas of two shards, train a small GPT with dropout. After every fault the step
is run again from the memory of the healthy ranks; at the end all has to be as in a run without a
fault, to the bit: weights, moments, random numbers, and every loss that any rank ever computed.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from dist_ckpt_strategies.cli.chaos.faults import InjectedFault, Kind, Point, every_fault
from dist_ckpt_strategies.cli.chaos.job import (
    JobOptions,
    Outcome,
    differences,
    recovery_seconds,
    run_job,
)
from dist_ckpt_strategies.cli.chaos.task import ChaosTask

_SEED = 5
_RANKS = (0, 3)
_TIMEOUT_S = 900.0
_SPARE_PAUSE_S = 3.5
_STEPS_AFTER = 3
_STATUS_FAILED = 1
_STATUS_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Scene:
    """Faults of one job, and how its ranks are started.

    Attributes:
        name: a column, or a line, of what is shown.
        faults: in the order of their steps.
        num_spares: processes that wait to take over a rank.
        save_every: steps between two checkpoints on the disk; 0: none.
        pause_s: before each fault.
    """

    name: str
    faults: tuple[InjectedFault, ...]
    num_spares: int = 0
    save_every: int = 0
    pause_s: float = 0.0


def _lost(number: int, step: int, point: Point, *global_ranks: int) -> InjectedFault:
    return InjectedFault(number, step, point, Kind.KILL, global_ranks)


WHOLE_REPLICA = Scene("a whole replica", (_lost(0, 7, Point.BACKWARD, 0, 1),), save_every=5)
BOTH_HOLDERS = Scene(
    "both holders of a shard", (_lost(0, 8, Point.AFTER_VOTE, 0, 2),), save_every=5
)
SINGLE = (
    Scene("exception", every_fault([Kind.EXCEPTION], _RANKS)),
    Scene("SIGKILL, new process", every_fault([Kind.KILL], _RANKS)),
    Scene("SIGKILL, spare", every_fault([Kind.KILL], _RANKS), 1, pause_s=_SPARE_PAUSE_S),
    Scene("SIGSTOP, new process", every_fault([Kind.STOP], _RANKS)),
    Scene("SIGSTOP, spare", every_fault([Kind.STOP], _RANKS), 1, pause_s=_SPARE_PAUSE_S),
)
SEVERAL = (WHOLE_REPLICA, BOTH_HOLDERS)


@dataclass(frozen=True, slots=True)
class Played:
    """What a scene came to.

    Attributes:
        scene: the scene.
        seconds: by fault, until all ranks were in a step again; None: never.
        source: where the state of the last recovery was from.
        wrong: what is not as in the run without a fault.
    """

    scene: Scene
    seconds: Mapping[int, float | None]
    source: str
    wrong: tuple[str, ...]


def run_chaos_demo(
    console: Console, single: Sequence[Scene] = SINGLE, several: Sequence[Scene] = SEVERAL
) -> int:
    """Play all scenes; 0 if nothing was lost in any, else what was has been shown.

    Args:
        console: where progress and the tables are shown.
        single: scenes in which one rank fails at a time.
        several: scenes in which several do at once.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="dist-ckpt-chaos-") as scratch:
            played = _play_all(console, Path(scratch), [*single, *several])
    except KeyboardInterrupt:
        console.print("[bold red]Interrupted.[/] All ranks have been stopped.")
        return _STATUS_INTERRUPTED
    console.print()
    if single:
        console.print(_single_table(played[: len(single)]))
    if several:
        console.print(_several_table(played[len(single) :]))
    wrong = [f"{one.scene.name}: {text}" for one in played for text in one.wrong]
    for text in wrong:
        console.print(text, markup=False, highlight=False)
    num_faults = sum(len(one.scene.faults) for one in played)
    if wrong:
        console.print("[bold red]The demonstration failed.[/]")
        return _STATUS_FAILED
    console.print(
        f"[bold green]{num_faults} faults, nothing lost:[/] weights, moments, random numbers and "
        "every loss of all ranks are those of the run without a fault, bit for bit."
    )
    return 0


def _play_all(console: Console, scratch: Path, scenes: Sequence[Scene]) -> list[Played]:
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("faults"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    references: dict[int, Outcome] = {}
    played = []
    with progress:
        for number, scene in enumerate(scenes):
            began = time.monotonic()
            num_steps = scene.faults[-1].step + _STEPS_AFTER
            if num_steps not in references:
                line = progress.add_task("without a fault", total=None)
                task = ChaosTask(scratch / f"reference{num_steps}", num_steps, _SEED)
                references[num_steps] = run_job(task, JobOptions(timeout_s=_TIMEOUT_S))
                progress.update(line, total=1, completed=1, visible=False)
            line = progress.add_task(scene.name, total=len(scene.faults))
            directory = scratch / str(number)
            watch = partial(_advance, progress, line)
            one = _play(scene, directory, references[num_steps], watch)
            watch(len(scene.faults))
            played.append(one)
            if not console.is_terminal:
                seconds = time.monotonic() - began
                console.print(f"{scene.name:<32} {seconds:6.1f} s", highlight=False)
    return played


def _advance(progress: Progress, line: TaskID, num_done: int) -> None:
    progress.update(line, completed=num_done)


def _play(
    scene: Scene, directory: Path, reference: Outcome, watch: Callable[[int], None]
) -> Played:
    num_steps = scene.faults[-1].step + _STEPS_AFTER
    task = ChaosTask(directory, num_steps, _SEED, scene.faults, scene.save_every, scene.pause_s)
    outcome = run_job(task, JobOptions(scene.num_spares, _TIMEOUT_S), watch)
    wrong = differences(outcome, reference)
    seconds = recovery_seconds(outcome, scene.faults)
    wrong += [
        f"fault {fault.number} ({fault.point}) did not happen"
        for fault in scene.faults
        if fault.number not in seconds
    ]
    loaded = [event["source"] for event in outcome.events if event["event"] == "loaded"]
    return Played(scene, seconds, loaded[-1] if loaded else "nowhere", tuple(wrong))


def _single_table(played: Sequence[Played]) -> Table:
    ranks = " and ".join(map(str, _RANKS))
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title=f"One rank fails: seconds until all are in a step again (ranks {ranks})",
    )
    table.caption = "SIGSTOP: from its detection on. A new process has to import torch first."
    table.add_column("at", no_wrap=True)
    for one in played:
        table.add_column(one.scene.name.replace(", ", "\n"), justify="right", no_wrap=True)
    for point in Point:
        table.add_row(point, *(_cell(one, point) for one in played))
    table.add_section()
    table.add_row("median", *(_median(one) for one in played))
    table.add_row("bit-identical", *(_answer(one) for one in played))
    return table


def _several_table(played: Sequence[Played]) -> Table:
    table = Table(
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title="Two ranks are killed at once",
    )
    for name in ("killed", "seconds", "the state comes from", "bit-identical"):
        table.add_column(name, no_wrap=True)
    for one in played:
        table.add_row(one.scene.name, _median(one), one.source, _answer(one))
    return table


def _cell(one: Played, point: Point) -> str:
    of_point = [fault for fault in one.scene.faults if fault.point is point]
    by_rank = sorted(of_point, key=lambda fault: fault.global_ranks)
    return " / ".join(_seconds(one.seconds.get(fault.number)) for fault in by_rank)


def _seconds(seconds: float | None) -> str:
    return "[red]never[/]" if seconds is None else f"{seconds:.2f}"


def _median(one: Played) -> str:
    known = [seconds for seconds in one.seconds.values() if seconds is not None]
    return f"{statistics.median(known):.2f}" if known else ""


def _answer(one: Played) -> str:
    return "[red]NO[/]" if one.wrong else "[green]yes[/]"
