"""Figures as plain values: what is to be drawn, and the digest by which a drawing is known."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from benchmarks.page.results import Spread

_NUM_DIGITS = 4
"""Digits of a figure that count, for the digest too."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; its whisker goes from the least to the greatest value."""

    label: str
    median: float
    low: float
    high: float
    is_ours: bool


@dataclass(frozen=True, slots=True)
class BarPanel:
    """Some bars on one axis; ``mark`` is a value that all are to be seen beside."""

    title: str
    axis: str
    bars: tuple[Bar, ...]
    mark: float | None = 1.0


@dataclass(frozen=True, slots=True)
class BarFigure:
    """Panels of bars, each with an axis of its own."""

    name: str
    alt: str
    panels: tuple[BarPanel, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot: x, median, least and greatest y of each point."""

    label: str
    points: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class CurvePanel:
    """Some lines, on logarithmic axes."""

    title: str
    x_axis: str
    y_axis: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class CurveFigure:
    """Panels of lines."""

    name: str
    alt: str
    panels: tuple[CurvePanel, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """What happened in one place: kind, begin and end of each span, in seconds."""

    label: str
    spans: tuple[tuple[str, float, float], ...]


@dataclass(frozen=True, slots=True)
class TimelinePanel:
    """One call; its lanes are drawn from top to bottom."""

    title: str
    seconds: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class TimelineFigure:
    """Calls, one below the other."""

    name: str
    alt: str
    panels: tuple[TimelinePanel, ...]


Figure = BarFigure | CurveFigure | TimelineFigure


def bar_of(label: str, spread: Spread, *, is_ours: bool) -> Bar:
    """A bar for a spread."""
    median, low, high = map(shortened, (spread.median, spread.low, spread.high))
    return Bar(label, median, low, high, is_ours)


def shortened(value: float) -> float:
    """The value with as many digits as can be seen."""
    return float(f"{value:.{_NUM_DIGITS}g}")


def digest_of(figure: Figure) -> str:
    """Of all that is drawn; it is part of the drawing, which shows whether that is up to date."""
    content = json.dumps([type(figure).__name__, asdict(figure)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
