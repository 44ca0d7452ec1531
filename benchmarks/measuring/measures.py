"""Samples of several numbers each, what they amount to, and their table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from rich.table import Table

from benchmarks.measuring.harness import paired_ratio

SECONDS: Final = "seconds"


@dataclass(frozen=True, slots=True)
class Measure:
    """One run of one contender.

    Attributes:
        step: what was measured.
        contender: whose.
        repetition: which of the alternating rounds.
        values: by name, ``SECONDS`` among them.
    """

    step: str
    contender: str
    repetition: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MeasureSummary:
    """What the measures of one contender and step amount to.

    Attributes:
        step: what was measured.
        contender: whose.
        num_samples: how many.
        medians: of each value.
        maxima: of each value.
        ratios: for each contender that others are compared with, and that did the same step: the
            median, over the rounds, of the ratio of the seconds to its seconds.
    """

    step: str
    contender: str
    num_samples: int
    medians: Mapping[str, float]
    maxima: Mapping[str, float]
    ratios: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its title, and what it shows of a summary."""

    title: str
    cell: Callable[[MeasureSummary], str]


def summarise_measures(
    measures: Sequence[Measure], names: Sequence[str], floors: Sequence[str]
) -> list[MeasureSummary]:
    """One summary for each step and contender; steps in the order in which they were measured.

    Args:
        measures: of all rounds that count.
        names: contenders in the order of the table.
        floors: contenders that others are compared with.
    """
    found: dict[tuple[str, str], list[Measure]] = defaultdict(list)
    for measure in measures:
        found[measure.step, measure.contender].append(measure)
    return [
        MeasureSummary(
            step,
            name,
            len(own),
            {value: median(_values(own, value)) for value in own[0].values},
            {value: max(_values(own, value)) for value in own[0].values},
            {
                floor: paired_ratio(_values(own, SECONDS), _values(found[step, floor], SECONDS))
                for floor in floors
                if (step, floor) in found
            },
        )
        for step in dict.fromkeys(measure.step for measure in measures)
        for name in names
        if (own := found.get((step, name)))
    ]


def build_measure_table(
    title: str, summaries: Sequence[MeasureSummary], columns: Sequence[Column]
) -> Table:
    """The summaries as a table, a section for each step."""
    table = Table(title=title)
    for name in ("step", "contender"):
        table.add_column(name, no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right")
    last = None
    for summary in summaries:
        if last not in {None, summary.step}:
            table.add_section()
        first = "" if summary.step == last else summary.step
        last = summary.step
        table.add_row(first, summary.contender, *(column.cell(summary) for column in columns))
    return table


def seconds_column(title: str = "seconds", name: str = SECONDS) -> Column:
    """The median of some seconds."""
    return Column(title, lambda summary: f"{summary.medians[name]:.3f}")


def ratio_column(floor: str) -> Column:
    """The median ratio to a floor."""
    return Column(f"of {floor}", lambda summary: ratio_text(summary.ratios.get(floor)))


def ratio_text(ratio: float | None) -> str:
    """A ratio, or a dash where there is nothing to compare with."""
    return "-" if ratio is None else f"{ratio:.2f}"


def _values(measures: Sequence[Measure], name: str) -> list[float]:
    ordered = sorted(measures, key=lambda measure: measure.repetition)
    return [measure.values[name] for measure in ordered]
