"""Pieces of the page: tables and cells, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.page.figures import Figure
from benchmarks.page.results import GB, Case, Spread, Stat

_MIB = 1 << 20
_LEAST_DIGITS_FROM = 10


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page: a title, paragraphs and tables, and the figures among them."""

    title: str
    parts: tuple[str | Figure, ...]


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is aligned at the left, the others at the right."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def seconds_cell(spread: Spread) -> str:
    """Such as ``0.395 (0.37-0.45)``: the median, and from the least to the greatest."""
    return f"{_seconds(spread.median)} ({_seconds(spread.low)}-{_seconds(spread.high)})"


def ratio_cell(spread: Spread | None) -> str:
    """Such as ``1.01 (0.93-1.20)``; a dash where there is nothing to compare with."""
    if spread is None:
        return "-"
    return f"{ratio_text(spread.median)} ({ratio_text(spread.low)}-{ratio_text(spread.high)})"


def ratio_text(value: float) -> str:
    """Two digits behind the point, or one from ten on."""
    return f"{value:.1f}" if value >= _LEAST_DIGITS_FROM else f"{value:.2f}"


def stats_table(stats: Sequence[Stat], floors: Mapping[str, str]) -> str:
    """Contenders with their seconds and ratios.

    Args:
        stats: in the order of the rows.
        floors: those that all are compared with, and the titles of their columns.
    """
    shown = [name for name in floors if any(name in stat.ratios for stat in stats)]
    titles = ["contender", "seconds", *(floors[name] for name in shown), "rounds"]
    rows = [
        [
            stat.contender,
            seconds_cell(stat.seconds),
            *(ratio_cell(stat.ratios.get(name)) for name in shown),
            str(stat.num_rounds),
        ]
        for stat in stats
    ]
    return table(titles, rows)


def case_text(case: Case) -> str:
    """Such as ``0.49 GB, 291 arrays, 2 ranks, ext4``."""
    fields: dict[str, Any] = dict(case)
    return (
        f"{fields['nbytes'] / GB:.2g} GB, {fields['num_arrays']} arrays, "
        f"{count_text(fields['num_ranks'], 'rank')}, {fields['file_system']}"
    )


def mib_text(nbytes: float) -> str:
    """Such as ``312 MiB`` and ``0.2 MiB``."""
    digits = 0 if nbytes >= _LEAST_DIGITS_FROM * _MIB else 1
    return f"{nbytes / _MIB:,.{digits}f} MiB"


def count_text(count: int, name: str) -> str:
    """Such as ``1 rank`` and ``2 ranks``."""
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= _LEAST_DIGITS_FROM else f"{value:.3f}"
