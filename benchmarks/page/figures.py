"""Bar charts of the page as plain values, drawn as SVG: the same figure gives the same bytes."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.page.subjects import Spread

_NUM_DIGITS = 4
_WIDTH, _BAR, _AROUND = 8.0, 0.2, 0.5
"""Inches."""

_OURS, _PEER, _BASELINE = "#1f6fb4", "#b9bec5", "#c0392b"
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.hashsalt": "dist_ckpt_strategies",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar; its whisker goes from the least to the greatest value."""

    label: str
    median: float
    low: float
    high: float
    text: str
    is_ours: bool

    @classmethod
    def of(cls, label: str, spread: Spread, text: str, *, is_ours: bool) -> Self:
        """A bar with as many digits as can be seen, and text behind it."""
        values = (spread.median, spread.low, spread.high)
        median, low, high = (float(f"{value:.{_NUM_DIGITS}g}") for value in values)
        return cls(label, median, low, high, text, is_ours)


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars below one title."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """Panels below each other, all with the same scale."""

    name: str
    axis: str
    panels: tuple[Panel, ...]
    baseline: float | None

    @property
    def digest(self) -> str:
        """Of all that is drawn; the drawing has it, which shows whether it is up to date."""
        content = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def draw(figure: Figure, directory: Path) -> None:
    """Draw a figure into a directory.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415 - not all who run the benchmarks have it

    mpl.use("svg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    path = directory / f"{figure.name}.svg"
    heights = [_BAR * len(panel.bars) + _AROUND for panel in figure.panels]
    defaults: dict[Any, Any] = dict(mpl.rcParamsDefault)
    with plt.rc_context({**defaults, "backend": "svg", **_SETTINGS}):
        canvas, axes = plt.subplots(
            len(heights),
            figsize=(_WIDTH, sum(heights)),
            squeeze=False,
            sharex=True,
            gridspec_kw={"height_ratios": heights},
        )
        for panel, axis in zip(figure.panels, axes[:, 0], strict=True):
            _draw_panel(panel, axis, figure.baseline)
        axes[-1, 0].set_xlim(left=0)
        axes[-1, 0].set_xlabel(figure.axis)
        values = {"Date": None, "Creator": None, "Description": figure.digest}
        canvas.savefig(path, format="svg", metadata=values)
        plt.close(canvas)


def _draw_panel(panel: Panel, axis: Any, baseline: float | None) -> None:
    places = range(len(panel.bars))
    whiskers = [
        [bar.median - bar.low for bar in panel.bars],
        [bar.high - bar.median for bar in panel.bars],
    ]
    drawn = axis.barh(
        places,
        [bar.median for bar in panel.bars],
        height=0.7,
        xerr=whiskers,
        color=[_OURS if bar.is_ours else _PEER for bar in panel.bars],
        error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
    )
    axis.set_yticks(places, [bar.label for bar in panel.bars])
    axis.invert_yaxis()
    texts = axis.bar_label(drawn, [bar.text for bar in panel.bars], padding=3)
    for text in texts:
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    if baseline is not None:
        axis.axvline(baseline, color=_BASELINE, linewidth=0.8, zorder=0)
    axis.margins(x=0.2)
    axis.set_title(panel.title, loc="left", fontweight="bold")
