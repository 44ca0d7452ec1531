"""Figures drawn as SVG: the same figure gives the same bytes. The only importer of matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator

from benchmarks.page.figures import (
    BarFigure,
    BarPanel,
    CurveFigure,
    Figure,
    TimelineFigure,
    TimelinePanel,
    digest_of,
)

_WIDTH = 8.0
_BAR, _AROUND, _LEGEND = 0.22, 0.7, 0.5
"""Inches."""
_OURS, _PEER, _MARK = "#1f6fb4", "#b9bec5", "#c0392b"
_CURVES: Final = ("#1f6fb4", "#63a6dd", "#b5622a", "#555b61")
_KINDS: Final[Mapping[str, str]] = {
    "planning": "#8e6bb0",
    "copying": "#e0b13a",
    "waiting for storage": "#a9cfe8",
    "waiting for ranks": "#e8a79d",
    "sending": "#5aa469",
    "reading": "#1f6fb4",
    "writing": "#1f6fb4",
    "flushing": "#16466f",
    "broadcasting": "#5aa469",
    "exchanging": "#5aa469",
    "the rest": "#d9dce0",
}
"""Colours of what happens; the order is that of the legend."""


_SETTINGS: Final[Mapping[str, Any]] = {
    **mpl.rcParamsDefault,
    "backend": "svg",
    "svg.hashsalt": "dist_ckpt_strategies",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}
"""Nothing of the user's, and nothing random."""


def draw(figure: Figure, directory: Path) -> Path:
    """Draw a figure into ``directory``; where it is then."""
    path = directory / f"{figure.name}.svg"
    with plt.rc_context(_SETTINGS):
        canvas = _DRAWERS[type(figure)](figure)
        facts = {"Date": None, "Creator": None, "Description": digest_of(figure)}
        canvas.savefig(path, format="svg", metadata=facts)
        plt.close(canvas)
    return path


def _bars(figure: BarFigure) -> Any:
    heights = [_BAR * len(panel.bars) + _AROUND for panel in figure.panels]
    canvas, axes = plt.subplots(
        len(heights), 1, figsize=(_WIDTH, sum(heights)), squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for panel, axis in zip(figure.panels, axes[:, 0], strict=True):
        _bar_panel(panel, axis)
    return canvas


def _bar_panel(panel: BarPanel, axis: Any) -> None:
    places = range(len(panel.bars))
    medians = [bar.median for bar in panel.bars]
    whiskers = [
        [bar.median - bar.low for bar in panel.bars],
        [bar.high - bar.median for bar in panel.bars],
    ]
    axis.barh(
        places, medians, height=0.7, xerr=whiskers,
        color=[_OURS if bar.is_ours else _PEER for bar in panel.bars],
        error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
    )  # fmt: skip
    axis.set_yticks(places, [bar.label for bar in panel.bars])
    axis.invert_yaxis()
    for place, bar in zip(places, panel.bars, strict=True):
        axis.annotate(
            f"{bar.median:.2f}", (bar.high, place), xytext=(3, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
    if panel.mark is not None:
        axis.axvline(panel.mark, color=_MARK, linewidth=0.8)
    axis.set_xlim(left=0)
    axis.margins(x=0.1)
    axis.set_title(panel.title, loc="left", fontweight="bold")
    axis.set_xlabel(panel.axis)


def _curves(figure: CurveFigure) -> Any:
    canvas, axes = plt.subplots(
        2, -(-len(figure.panels) // 2), figsize=(_WIDTH, 5.0), squeeze=False
    )
    by_column = [axes[n % 2][n // 2] for n in range(len(figure.panels))]
    for panel, axis in zip(figure.panels, by_column, strict=True):
        for number, curve in enumerate(panel.curves):
            xs, medians, lows, highs = zip(*curve.points, strict=True)
            whiskers = [
                [m - low for m, low in zip(medians, lows, strict=True)],
                [high - m for m, high in zip(medians, highs, strict=True)],
            ]
            axis.errorbar(
                xs, medians, yerr=whiskers, label=curve.label, color=_CURVES[number % len(_CURVES)],
                marker="o", markersize=3, linewidth=1.2, elinewidth=0.7,
            )  # fmt: skip
        axis.set_xscale("log", base=10)
        axis.set_yscale("log", base=10)
        ticks = sorted({point[0] for curve in panel.curves for point in curve.points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(_plain_number))
        axis.minorticks_off()
        axis.set_title(panel.title, loc="left", fontweight="bold")
        axis.set_xlabel(panel.x_axis)
        axis.set_ylabel(panel.y_axis)
    by_column[0].legend(frameon=False)
    return canvas


def _plain_number(value: float, _place: int) -> str:
    return f"{value:g}"


def _timelines(figure: TimelineFigure) -> Any:
    heights = [_BAR * len(panel.lanes) + _AROUND for panel in figure.panels]
    canvas, axes = plt.subplots(
        len(heights), 1, figsize=(_WIDTH, sum(heights) + _LEGEND), squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for panel, axis in zip(figure.panels, axes[:, 0], strict=True):
        _timeline_panel(panel, axis)
    shown = {
        kind for panel in figure.panels for lane in panel.lanes for kind, _, _ in lane.spans
    }  # fmt: skip
    handles = [Patch(color=colour, label=kind) for kind, colour in _KINDS.items() if kind in shown]
    canvas.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    return canvas


def _timeline_panel(panel: TimelinePanel, axis: Any) -> None:
    for place, lane in enumerate(panel.lanes):
        for kind in dict.fromkeys(kind for kind, _, _ in lane.spans):
            spans = [(begin, end - begin) for k, begin, end in lane.spans if k == kind]
            axis.broken_barh(spans, (place - 0.38, 0.76), facecolors=_KINDS[kind], linewidth=0)
    axis.set_yticks(range(len(panel.lanes)), [lane.label for lane in panel.lanes])
    axis.set_ylim(len(panel.lanes) - 0.4, -0.6)
    axis.set_xlim(0, panel.seconds)
    axis.set_title(panel.title, loc="left", fontweight="bold")
    axis.set_xlabel("seconds")


_DRAWERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    BarFigure: _bars,
    CurveFigure: _curves,
    TimelineFigure: _timelines,
}
