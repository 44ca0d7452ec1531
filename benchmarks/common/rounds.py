"""Rounds: every candidate in turn, each from the same state of disk, cache and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.common.command_line import Comparison, Output
from benchmarks.common.disks import drop_cache, fill_cache, fresh, touch_memory, workspace
from benchmarks.common.processes import Ranks

RAW_PLAIN = "raw write"
SECONDS, DURABLE_SECONDS = "seconds", "durable_seconds"
LEFT_TO_THE_KERNEL = frozenset({RAW_PLAIN, "torch.save", "safetensors"})
"""Candidates whose files need not be on the disk when their ``save`` returns."""

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
    """One run of one candidate.

    Attributes:
        step: what was timed.
        candidate: whose.
        repetition: which of the alternating rounds.
        values: by name. ``SECONDS`` are from the first rank's start to the last rank's end,
            ``DURABLE_SECONDS`` those until all files are on the disk.
    """

    step: str
    candidate: str
    repetition: int
    values: Mapping[str, float]


def alternate(names: Sequence[str], repetitions: int) -> Iterator[tuple[int, str]]:
    """Every name once per repetition, forwards and backwards in turn; counting starts at 0.

    What the machine does meanwhile, and what each leaves behind for the next, then falls on all.
    """
    for repetition in range(repetitions):
        for name in names if repetition % 2 == 0 else reversed(names):
            yield repetition, name


def run_saves_and_loads(
    ranks: Ranks, case: Case, place: Path, comparison: Comparison, output: Output
) -> None:
    """Time every step of a case in one place. Loads read what the last round of saves has left."""
    with workspace(place) as directory:
        output.write_samples(case, _saves(ranks, case, directory, comparison))
        stored = {name: directory / name for name in comparison.names if name != RAW_PLAIN}
        for step in case.loads:
            output.write_samples(
                case, load_rounds(ranks, case, step, stored, comparison.repetitions)
            )


def _saves(ranks: Ranks, case: Case, directory: Path, comparison: Comparison) -> Iterator[Sample]:
    for repetition, name in alternate(comparison.names, comparison.repetitions + 1):
        target = fresh(directory, name)
        touch_memory(case.held_nbytes)
        seconds = ranks.step("save", name, target).seconds
        flushing = ranks.step("flush", target).seconds
        values = {SECONDS: seconds}
        if name != RAW_PLAIN:
            values[DURABLE_SECONDS] = seconds + flushing * (name in LEFT_TO_THE_KERNEL)
        if repetition > 0:
            yield Sample(Step.SAVE, name, repetition, values)


def load_rounds(
    ranks: Ranks, case: Case, step: Step, stored: Mapping[str, Path], repetitions: int
) -> Iterator[Sample]:
    """Time one kind of load, and check each; the first round, of all, is not counted.

    Args:
        ranks: those who load.
        case: what they load.
        step: LOAD_WARM or LOAD_COLD.
        stored: for each candidate, in the order of the first round, what it is to load.
        repetitions: measured rounds.
    """
    for repetition, name in alternate(list(stored), repetitions + 1):
        ranks.step("clear", name)
        touch_memory(case.held_nbytes)
        if step is Step.LOAD_COLD:
            drop_cache(stored[name])
        else:
            fill_cache(stored[name])
        seconds = ranks.step("load", name, stored[name]).seconds
        ranks.step("check", name)
        if repetition > 0:
            yield Sample(step, name, repetition, {SECONDS: seconds})
