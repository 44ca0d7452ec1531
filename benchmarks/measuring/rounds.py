"""Rounds: every contender in turn, each from the same state of disk, cache and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.contenders.roster import ENTRIES, RAW_PLAIN
from benchmarks.measuring.command_line import Contest, Output
from benchmarks.measuring.disks import drop_cache, fill_cache, fresh, touch_memory, workspace
from benchmarks.measuring.harness import Ranks, alternate
from benchmarks.measuring.timings import Case, Sample, Step, build_table, summarise


def run_saves_and_loads(
    ranks: Ranks, case: Case, place: Path, contest: Contest, output: Output
) -> None:
    """Time every step of a case in one place, and report it."""
    with workspace(place) as directory:
        rounds = _saves_and_loads(ranks, case, directory, contest)
        samples = output.write_samples(case, rounds)
    summaries = summarise(samples)
    output.write_summaries(case, summaries, build_table(case, summaries))


def _saves_and_loads(
    ranks: Ranks, case: Case, directory: Path, contest: Contest
) -> Iterator[Sample]:
    """Time every step of a case in an empty directory.

    The loads read what the last round of saves has left.
    """
    for repetition, name in alternate(contest.names, contest.repetitions + 1):
        seconds, durable = _time_save(ranks, case, directory, name)
        if repetition > 0:
            yield Sample(Step.SAVE, name, repetition, seconds, durable)
    stored = {name: directory / name for name in contest.names if ENTRIES[name].loads}
    for step in case.loads:
        yield from load_rounds(ranks, case, step, stored, contest.repetitions)


def _time_save(ranks: Ranks, case: Case, directory: Path, name: str) -> tuple[float, float | None]:
    """Seconds of one save, and seconds until its files are on the disk."""
    target = fresh(directory, name)
    touch_memory(case.held_nbytes)
    seconds = ranks.step("save", name, target).seconds
    flushing = ranks.step("flush", target).seconds
    if ENTRIES[name].flushes:
        return seconds, seconds
    return seconds, None if name == RAW_PLAIN else seconds + flushing


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
