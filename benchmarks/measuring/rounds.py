"""Rounds of loads: every contender in turn, each from the same state of cache and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.measuring.disks import drop_cache, fill_cache, touch_memory
from benchmarks.measuring.harness import Ranks, alternate
from benchmarks.measuring.timings import Case, Sample, Step


def load_rounds(
    ranks: Ranks, case: Case, step: Step, stored: Mapping[str, Path], repetitions: int
) -> Iterator[Sample]:
    """Time one kind of load, and check each; the first round, of all, is not counted.

    Args:
        ranks: those who load.
        case: what they load.
        step: LOAD_WARM or LOAD_COLD.
        stored: for each contender, in the order of the first round, what it is to load.
        repetitions: rounds that count.
    """
    for repetition, name in alternate(list(stored), repetitions + 1):
        seconds = _time_load(ranks, case, step, stored[name], name)
        if repetition > 0:
            yield Sample(step, name, repetition, seconds, None)


def _time_load(ranks: Ranks, case: Case, step: Step, directory: Path, name: str) -> float:
    ranks.step("clear", name)
    touch_memory(case.held_nbytes)
    if step is Step.LOAD_COLD:
        drop_cache(directory)
    else:
        fill_cache(directory)
    seconds = ranks.step("load", name, directory).seconds
    ranks.step("check", name)
    return seconds
