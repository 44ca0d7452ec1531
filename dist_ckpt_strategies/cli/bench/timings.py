"""What the timings of saves and loads amount to, as a table and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from dist_ckpt_strategies.cli.bench.task import FLOOR, STEPS
from dist_ckpt_strategies.cli.demo.events import StepTimed
from dist_ckpt_strategies.cli.text import bytes_text


@dataclass(frozen=True, slots=True)
class Timing:
    """What the timings of one step of one contender amount to.

    Attributes:
        step: SAVE or LOAD.
        contender: whose.
        seconds: median over the rounds.
        shortest: seconds.
        longest: seconds.
        nbytes_per_second: of all ranks together, at the median.
        floor_ratio: median, over the rounds, of the ratio to the floor of the same round.
    """

    step: str
    contender: str
    seconds: float
    shortest: float
    longest: float
    nbytes_per_second: float
    floor_ratio: float


def summarise(timed: Sequence[StepTimed], contenders: Sequence[str]) -> list[Timing]:
    """One for each step and contender, from the rounds that count."""
    counted = [one for one in timed if one.repetition > 0]
    return [_summary(counted, step, name) for step in STEPS for name in contenders]


def build_table(title: str, timings: Sequence[Timing]) -> Table:
    """A section for each step."""
    table = Table(title=title, title_justify="left")
    for name in ("step", "who"):
        table.add_column(name, no_wrap=True)
    for name in ("seconds", "from - to", "per second", "of the floor"):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for one in timings:
        if last not in {"", one.step}:
            table.add_section()
        table.add_row(
            "" if one.step == last else one.step,
            one.contender,
            f"{one.seconds:.3f}",
            f"{one.shortest:.3f} - {one.longest:.3f}",
            bytes_text(round(one.nbytes_per_second)),
            f"{one.floor_ratio:.2f}",
        )
        last = one.step
    return table


def _summary(timed: Sequence[StepTimed], step: str, name: str) -> Timing:
    own = _by_round(timed, step, name)
    floor = _by_round(timed, step, FLOOR)
    seconds = [one.seconds for one in own]
    median = statistics.median(seconds)
    ratios = [a.seconds / b.seconds for a, b in zip(own, floor, strict=True)]
    return Timing(
        step,
        name,
        median,
        min(seconds),
        max(seconds),
        own[0].nbytes / median,
        statistics.median(ratios),
    )


def _by_round(timed: Sequence[StepTimed], step: str, name: str) -> list[StepTimed]:
    own = [one for one in timed if (one.step, one.contender) == (step, name)]
    return sorted(own, key=lambda one: one.repetition)
