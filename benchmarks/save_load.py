"""Save and load one GPT-like state with every contender in turn, beside the physical floor.

    python benchmarks/save_load.py --out save_load.jsonl
    python benchmarks/save_load.py --smoke

Two ranks, alternating contenders, medians. A save is timed twice: as the contender does it, and
until its files are on the disk (for those that leave that to the kernel, an fsync of all their files
is added). A load fills tensors that are already there: contenders that return new ones pay
for the copy. Every load is checked. The first round of each step is not counted.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

# As a script, Python looks for modules beside this file only; the package is one level up.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import typer
import xxhash
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contenders import ENTRIES, RAW_FLUSHED, RAW_PLAIN, Tensors
from benchmarks.disks import (
    drop_cache,
    file_system,
    fill_cache,
    flush_share,
    retire,
    settle,
    workspace,
)
from benchmarks.gpt_state import GB, GptSize, build_shards, gpt_size
from benchmarks.harness import (
    RankContext,
    Ranks,
    alternate,
    join_gloo,
    median,
    paired_ratio,
)
from benchmarks.records import JsonLines, run_facts

_NUM_RANKS = 2
_MEMORY = frozenset({"tmpfs", "ramfs"})
_SMOKE = GptSize(num_layers=2, hidden=32, vocabulary=64)


class Step(StrEnum):
    """What is timed."""

    SAVE = "save"
    LOAD_WARM = "load warm"
    LOAD_COLD = "load cold"


@dataclass(frozen=True, slots=True)
class Case:
    """One size on one file system.

    Attributes:
        file_system: its type.
        nbytes: of all shards together.
        num_arrays: in the state dict.
    """

    file_system: str
    nbytes: int
    num_arrays: int

    @property
    def steps(self) -> tuple[Step, ...]:
        """What is timed here; what lies in memory has no cold load."""
        if self.file_system in _MEMORY:
            return (Step.SAVE, Step.LOAD_WARM)
        return tuple(Step)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing.

    Attributes:
        step: what was timed.
        contender: whose.
        repetition: which of the alternating rounds.
        seconds: first rank's start to last rank's end.
        durable_seconds: of a save, until the files are on the disk; else None.
    """

    step: Step
    contender: str
    repetition: int
    seconds: float
    durable_seconds: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """What the samples of one contender and step amount to.

    Attributes:
        step: what was timed.
        contender: whose.
        num_samples: how many.
        seconds: median.
        ratio: median of the ratios to the floor of the same round: one plain stream per rank.
        durable_seconds: median, of saves.
        durable_ratio: to the floor that flushes.
    """

    step: Step
    contender: str
    num_samples: int
    seconds: float
    ratio: float
    durable_seconds: float | None
    durable_ratio: float | None


class Worker:
    """One rank: holds the shards, and every contender over the same shards."""

    def __init__(self, context: RankContext, size: GptSize, names: Sequence[str]) -> None:
        join_gloo(context)
        torch.set_num_threads(1)
        self._context = context
        self._shards = build_shards(size, context.global_rank, context.num_ranks)
        self._digests = {shard.key: _digest(shard.tensor) for shard in self._shards}
        self._contenders = {name: ENTRIES[name].make(self._shards) for name in names}
        self._loaded: Tensors = {}

    def nbytes(self) -> int:
        """Of this rank's shards."""
        return sum(shard.tensor.nbytes for shard in self._shards)

    def save(self, name: str, directory: Path) -> None:
        """Let the contender save. Timed."""
        self._contenders[name].save(directory)

    def flush(self, directory: Path) -> None:
        """Flush this rank's share of the files in ``directory``. Timed."""
        flush_share(directory, self._context.global_rank, self._context.num_ranks)

    def clear(self) -> None:
        """Overwrite the shards, so that a load that does nothing is found out."""
        for shard in self._shards:
            shard.tensor.zero_()

    def load(self, name: str, directory: Path) -> None:
        """Let the contender load, and see to it that the data is in the shards. Timed."""
        loaded = self._contenders[name].load(directory)
        for shard in self._shards:
            tensor = loaded[shard.key]
            if tensor.data_ptr() != shard.tensor.data_ptr():
                shard.tensor.copy_(tensor)

    def check(self, name: str) -> None:
        """Compare the shards with what was saved.

        Raises:
            ValueError: a shard differs.
        """
        for shard in self._shards:
            if _digest(shard.tensor) != self._digests[shard.key]:
                raise ValueError(f"{shard.key}: {name} loaded other values than were saved")


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.view(-1).view(torch.uint8).numpy())


def run_case(
    ranks: Ranks, case: Case, directory: Path, names: Sequence[str], repetitions: int
) -> Iterator[Sample]:
    """Time every step of one case in ``directory``, which is left with the last checkpoints."""
    yield from _run_saves(ranks, case, directory, names, repetitions)
    loading = [name for name in names if ENTRIES[name].loads]
    for step in case.steps[1:]:
        for repetition, name in alternate(loading, repetitions + 1):
            settle(case.nbytes)
            target = directory / name
            fill_cache(target) if step is Step.LOAD_WARM else drop_cache(target)
            ranks.step("clear")
            seconds = ranks.step("load", name, target).seconds
            ranks.step("check", name)
            if repetition > 0:
                yield Sample(step, name, repetition, seconds, None)


def _run_saves(
    ranks: Ranks, case: Case, directory: Path, names: Sequence[str], repetitions: int
) -> Iterator[Sample]:
    for repetition, name in alternate(names, repetitions + 1):
        target = directory / name
        if target.exists():
            retire(target, directory / "attic")
        target.mkdir()
        settle(case.nbytes)
        seconds = ranks.step("save", name, target).seconds
        durable: float | None = seconds
        if name == RAW_PLAIN:
            durable = None
        elif not ENTRIES[name].flushes:
            durable = seconds + ranks.step("flush", target).seconds
        if repetition > 0:
            yield Sample(Step.SAVE, name, repetition, seconds, durable)


def summarise(samples: Sequence[Sample]) -> list[Summary]:
    """One summary for each step and contender, in the order in which they first appear."""
    seen = list(dict.fromkeys((sample.step, sample.contender) for sample in samples))
    return [_summary(step, name, samples) for step, name in seen]


def _summary(step: Step, name: str, samples: Sequence[Sample]) -> Summary:
    floor = RAW_PLAIN if step is Step.SAVE else RAW_FLUSHED
    seconds = _times(samples, step, name)
    durable = _durable_times(samples, step, name)
    return Summary(
        step,
        name,
        len(seconds),
        median(seconds),
        paired_ratio(seconds, _times(samples, step, floor)),
        median(durable) if durable else None,
        paired_ratio(durable, _durable_times(samples, step, RAW_FLUSHED)) if durable else None,
    )


def _of(samples: Sequence[Sample], step: Step, name: str) -> list[Sample]:
    chosen = [s for s in samples if s.step is step and s.contender == name]
    return sorted(chosen, key=lambda sample: sample.repetition)


def _times(samples: Sequence[Sample], step: Step, name: str) -> list[float]:
    return [sample.seconds for sample in _of(samples, step, name)]


def _durable_times(samples: Sequence[Sample], step: Step, name: str) -> list[float]:
    chosen = _of(samples, step, name)
    return [s.durable_seconds for s in chosen if s.durable_seconds is not None]


def build_table(case: Case, summaries: Sequence[Summary]) -> Table:
    """The case as a table: seconds, and the ratio to the floor of the same step."""
    table = Table(
        title=f"{case.nbytes / GB:.2g} GB, {case.num_arrays} arrays, {_NUM_RANKS} ranks, "
        f"{case.file_system}: median seconds (ratio to the plain stream)"
    )
    table.add_column("contender")
    for title in ("save, as it is", "save, durable", *case.steps[1:]):
        table.add_column(title, justify="right")
    table.add_column("flushes by itself", justify="center")
    by_step = {(summary.step, summary.contender): summary for summary in summaries}
    for name in dict.fromkeys(summary.contender for summary in summaries):
        save = by_step[Step.SAVE, name]
        loads = [by_step.get((step, name)) for step in case.steps[1:]]
        table.add_row(
            name,
            _cell(save.seconds, save.ratio),
            _cell(save.durable_seconds, save.durable_ratio),
            *(_cell(load.seconds, load.ratio) if load else "-" for load in loads),
            "yes" if ENTRIES[name].flushes else "no",
        )
    return table


def _cell(seconds: float | None, ratio: float | None) -> str:
    if seconds is None or ratio is None:
        return "-"
    return f"{seconds:.3f} ({ratio:.2f})"


def _require_known(contenders: Sequence[str]) -> list[str]:
    unknown = sorted(set(contenders) - set(ENTRIES))
    if unknown:
        known = ", ".join(ENTRIES)
        raise typer.BadParameter(f"contender {unknown[0]!r} is none of: {known}")
    chosen = set(contenders or ENTRIES) | {RAW_FLUSHED, RAW_PLAIN}
    return [name for name in ENTRIES if name in chosen]


def _stop(_signal: int, _frame: object) -> NoReturn:
    """Leave through every ``finally``, so that nothing stays behind."""
    raise SystemExit(128 + _signal)


def main(  # noqa: PLR0913 - one parameter for each option
    *,
    size: Annotated[list[float], typer.Option(help="GB of all ranks together.")] = [0.5, 1.0],  # noqa: B006 - typer's way
    directory: Annotated[
        list[Path] | None,
        typer.Option(help="Where to write. [default: the temporary directory and /dev/shm]"),
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Only these, beside the floors.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 7,
    out: Annotated[Path | None, typer.Option(help="JSON lines go here.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Toy size: does everything run?")] = False,
    timeout_s: Annotated[float, typer.Option(help="Longest wait for one step.")] = 300.0,
) -> None:
    """Save and load one GPT-like state with every contender in turn."""
    signal.signal(signal.SIGTERM, _stop)
    sizes = [_SMOKE] if smoke else [gpt_size(int(nbytes * GB)) for nbytes in size]
    places = directory or [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - a tmpfs
    console = Console()
    with ExitStack() as stack:
        lines = JsonLines(stack.enter_context((out or Path("/dev/null")).open("w")))
        lines.write("run", run_facts(["python", "benchmarks/save_load.py", *sys.argv[1:]]))
        names = []
        for name in _require_known(contender or []):
            if ENTRIES[name].is_installed:
                names.append(name)
            else:
                note = f"{ENTRIES[name].package} is not installed"
                lines.write("skipped", {"contender": name, "reason": note})
                console.print(f"{name}: skipped, {note}")
        for one in sizes:
            _run_size(one, places, names, 1 if smoke else repetitions, timeout_s, lines, console)


if __name__ == "__main__":
    typer.run(main)
