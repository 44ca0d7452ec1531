"""Samples of saves and loads, and what they amount to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from rich.table import Table

from benchmarks.contenders.roster import ENTRIES, RAW_FLUSHED, RAW_PLAIN
from benchmarks.measuring.gpt_state import GB
from benchmarks.measuring.harness import paired_ratio

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


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
        nbytes: of the state dict, all parts together, once.
        num_arrays: in the state dict.
        num_ranks: how many processes there are.
        num_replicas: how often they hold the state dict between them.
    """

    file_system: str
    nbytes: int
    num_arrays: int
    num_ranks: int
    num_replicas: int = 1

    def __str__(self) -> str:
        """For the title of a table."""
        return (
            f"{self.nbytes / GB:.2g} GB, {self.num_arrays} arrays, {self.num_ranks} ranks, "
            f"{self.file_system}"
        )

    @property
    def held_nbytes(self) -> int:
        """What all ranks hold together."""
        return self.nbytes * self.num_replicas

    @property
    def loads(self) -> tuple[Step, ...]:
        """The loads that are timed here; what lies in memory has no cold one."""
        warm_only = self.file_system in _IN_MEMORY
        return (Step.LOAD_WARM,) if warm_only else (Step.LOAD_WARM, Step.LOAD_COLD)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timing.

    Attributes:
        step: what was timed.
        contender: whose.
        repetition: which of the alternating rounds.
        seconds: first rank's start to last rank's end.
        durable_seconds: of a save, until its files are on the disk; None of other steps, and of
            the floor that leaves this to the kernel.
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
        ratio: median, over the rounds, of the ratio to one plain stream per rank.
        durable_seconds: median, of saves.
        durable_ratio: as ``ratio``, to the stream that is flushed.
    """

    step: Step
    contender: str
    num_samples: int
    seconds: float
    ratio: float
    durable_seconds: float | None
    durable_ratio: float | None


def summarise(samples: Sequence[Sample]) -> list[Summary]:
    """One summary for each step and contender, in the order of the steps and of the table."""
    chosen: dict[tuple[Step, str], list[Sample]] = {}
    for sample in sorted(samples, key=lambda s: s.repetition):
        chosen.setdefault((sample.step, sample.contender), []).append(sample)
    keys = [(step, name) for step in Step for name in ENTRIES if (step, name) in chosen]
    return [_summary(chosen, step, name) for step, name in keys]


def build_table(case: Case, summaries: Sequence[Summary]) -> Table:
    """The case as a table: seconds, and the ratio to the floor of the same step."""
    table = Table(title=f"{case}: median seconds (ratio to one stream per rank)")
    table.add_column("contender")
    for title in ("save", "durable save", *case.loads):
        table.add_column(title, justify="right")
    table.add_column("flushes", justify="center")
    by_step = {(summary.step, summary.contender): summary for summary in summaries}
    for name in dict.fromkeys(summary.contender for summary in summaries):
        save = by_step[Step.SAVE, name]
        loads = [by_step.get((step, name)) for step in case.loads]
        table.add_row(
            name,
            _cell(save.seconds, save.ratio),
            _cell(save.durable_seconds, save.durable_ratio),
            *(_cell(load.seconds, load.ratio) if load else "-" for load in loads),
            "yes" if ENTRIES[name].flushes else "no",
        )
    return table


def _summary(samples: Mapping[tuple[Step, str], list[Sample]], step: Step, name: str) -> Summary:
    own = samples[step, name]
    floor = samples[step, RAW_PLAIN if step is Step.SAVE else RAW_FLUSHED]
    durable = _durable_seconds(own)
    return Summary(
        step,
        name,
        len(own),
        median(_seconds(own)),
        paired_ratio(_seconds(own), _seconds(floor)),
        median(durable) if durable else None,
        paired_ratio(durable, _durable_seconds(samples[step, RAW_FLUSHED])) if durable else None,
    )


def _seconds(samples: Sequence[Sample]) -> list[float]:
    return [sample.seconds for sample in samples]


def _durable_seconds(samples: Sequence[Sample]) -> list[float]:
    return [sample.durable_seconds for sample in samples if sample.durable_seconds is not None]


def _cell(seconds: float | None, ratio: float | None) -> str:
    if seconds is None or ratio is None:
        return "-"
    return f"{seconds:.3f} ({ratio:.2f})"
