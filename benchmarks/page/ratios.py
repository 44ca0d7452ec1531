"""Sections that are alike: tables, each with its heading, and one figure of ratios to a floor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.page.figures import BarFigure, BarPanel, bar_of
from benchmarks.page.results import Stat
from benchmarks.page.text import Section

_OURS: Final = ("zarr", "two-stage", "plain, zarr", "verify", "to ", "local manager")
"""How the names of this package's contenders begin."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What some rounds have found: a heading, text below it, and bars in the section's figure."""

    heading: str
    text: str
    panel: BarPanel


def ratio_section(title: str, words: str, name: str, alt: str, shown: Iterable[Shown]) -> Section:
    """A section with one figure; its words alone where nothing is to be shown.

    Args:
        title: of the section.
        words: what it says before everything.
        name: of the figure.
        alt: what the figure shows, in words.
        shown: in the order of the page.
    """
    found = list(shown)
    if not found:
        return Section(title, (words,))
    figure = BarFigure(name, alt, tuple(one.panel for one in found))
    texts = [text for one in found for text in (f"### {one.heading}", one.text)]
    return Section(title, (words, figure, *texts))


def ratio_panel(
    title: str, stats: Sequence[Stat], floor: str, skipped: Collection[str], axis: str = ""
) -> BarPanel:
    """Bars of ratios to a floor.

    Args:
        title: of the panel.
        stats: in the order of the bars.
        floor: what the ratios are to.
        skipped: contenders that have no bar.
        axis: what one is, in words, where it is not the floor's name.
    """
    bars = [
        bar_of(stat.contender, stat.ratios[floor], is_ours=is_ours(stat.contender))
        for stat in stats
        if stat.contender not in skipped and floor in stat.ratios
    ]
    return BarPanel(title, f"times {axis or floor}", tuple(bars))


def is_ours(contender: str) -> bool:
    """Whether a contender is this package."""
    return contender.startswith(_OURS)
