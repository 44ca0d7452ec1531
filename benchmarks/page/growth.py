"""Sections of the page about how it grows, and where the time of one call goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from benchmarks.page.figures import (
    Curve,
    CurveFigure,
    CurvePanel,
    Figure,
    Lane,
    TimelineFigure,
    TimelinePanel,
    shortened,
)
from benchmarks.page.results import GB, Case, Found, Line, Stat
from benchmarks.page.storage import SAVE_STEPS, TORCH_DIST, save_load_stats
from benchmarks.page.text import Section, count_text, mib_text, table
from benchmarks.page.words import PLANNING, SCALING, TIMELINES

_MB = 10**6
_STEPS: Final = ("durable save", "load cold", "load warm")


class _Sweep:
    """One thing that grows: its name, its title, and its value in a case."""

    def __init__(self, name: str, title: str, value: Callable[[Mapping[str, Any]], float]) -> None:
        self.name = name
        self.title = title
        self.value = value

    def cases(self, found: Found) -> list[Case]:
        """Those in which it grows, from the least on."""
        own = [case for case in found.cases() if dict(case)["sweep"] == self.name]
        return sorted(own, key=lambda case: self.value(dict(case)))


_SWEEPS: Final = (
    _Sweep("bytes", "MB", lambda case: round(float(case["nbytes"]) / _MB)),
    _Sweep("arrays", "arrays", lambda case: float(case["num_arrays"])),
    _Sweep("ranks", "ranks", lambda case: float(case["num_ranks"])),
)


def scaling_section(found: Found) -> Section:
    """Seconds over bytes, arrays and ranks."""
    parts: list[str | Figure] = [SCALING]
    panels = []
    for sweep in _SWEEPS:
        cases = sweep.cases(found)
        if not cases:
            continue
        for step in _STEPS:
            panel = _scaling_panel(found, sweep, cases, step)
            if panel is not None:
                parts += [
                    f"### {step}, more {sweep.name}",
                    _scaling_table(found, sweep, cases, step),
                ]
                if step != "load warm":
                    panels.append(panel)
    if panels:
        alt = "seconds of saves and loads over bytes, arrays and ranks"
        parts.insert(1, CurveFigure("scaling", alt, tuple(panels)))
    return Section("Scaling", tuple(parts))


def timeline_section(found: Found) -> Section:
    """What each rank did when, in one save and in one two-stage load."""
    parts: list[str | Figure] = []
    for call in dict.fromkeys(str(line["call"]) for line in found.of_kind("timeline")):
        lines = [line for line in found.of_kind("timeline") if line["call"] == call]
        name = "timeline_" + call.replace(", ", "_").replace(" ", "_").replace("-", "_")
        figure = TimelineFigure(name, f"timeline of {call}", (_timeline_panel(call, lines),))
        parts += [f"### {call}", figure, _timeline_table(lines)]
    if parts:
        parts.insert(0, TIMELINES)
    return Section("Timelines", tuple(parts))


def planning_section(found: Found) -> Section:
    """What a rank spends on the plan of a two-stage load."""
    lines = found.of_kind("cost")
    if not lines:
        return Section("Planning", ())
    rows = [
        [
            str(line["case"]["shape"]),
            f"{line['case']['num_ranks']:,}",
            f"{line['case']['shards_per_rank']:,}",
            f"{line['seconds']:.2f}",
            mib_text(line["memory_nbytes"]),
            mib_text(line["gathered_nbytes"]),
        ]
        for line in lines
    ]
    titles = ("shards", "ranks", "shards each", "seconds", "memory", "metadata")
    return Section("Planning", (PLANNING, table(titles, rows)))


def _scaling_panel(
    found: Found, sweep: _Sweep, cases: Sequence[Case], step: str
) -> CurvePanel | None:
    points: dict[str, list[tuple[float, float, float, float]]] = {}
    for case in cases:
        for stat in save_load_stats(found, case, step):
            at = sweep.value(dict(case))
            points.setdefault(stat.contender, []).append(_point(at, stat))
    if not points:
        return None
    floor = SAVE_STEPS[step]
    names = sorted(points, key=lambda name: (name == floor, name == TORCH_DIST, name))
    curves = tuple(Curve(name, tuple(points[name])) for name in names)
    return CurvePanel(f"{step}, more {sweep.name}", sweep.title, "seconds", curves)


def _point(at: float, stat: Stat) -> tuple[float, float, float, float]:
    spread = stat.seconds
    return (at, shortened(spread.median), shortened(spread.low), shortened(spread.high))


def _scaling_table(found: Found, sweep: _Sweep, cases: Sequence[Case], step: str) -> str:
    by_case = [{s.contender: s for s in save_load_stats(found, case, step)} for case in cases]
    names = sorted({name for stats in by_case for name in stats})
    titles = [
        f"{name} {'MB' if sweep.name == 'bytes' else sweep.name}"
        for name in (f"{sweep.value(dict(case)):,g}" for case in cases)
    ]
    rows = [
        [
            name,
            *(f"{stats[name].seconds.median:.3f}" if name in stats else "-" for stats in by_case),
        ]
        for name in names
    ]
    return table(["median seconds", *titles], rows)


def _timeline_panel(call: str, lines: Sequence[Line]) -> TimelinePanel:
    seconds = max(float(line["seconds"]) for line in lines)
    lanes = []
    for line in sorted(lines, key=lambda line: int(line["rank"])):
        for lane in dict.fromkeys(str(span["lane"]) for span in line["spans"]):
            spans = tuple(
                (str(span["kind"]), shortened(span["begin"]), shortened(span["end"]))
                for span in line["spans"]
                if span["lane"] == lane
            )
            lanes.append(Lane(f"rank {line['rank']}, {lane}", spans))
    case = lines[0]["case"]
    size = f"{case['nbytes'] / GB:.2g} GB, {count_text(case['num_ranks'], 'rank')}"
    return TimelinePanel(f"{call}: {size}, {case['file_system']}", shortened(seconds), tuple(lanes))


def _timeline_table(lines: Sequence[Line]) -> str:
    """Seconds of each kind, for each rank."""
    kinds = list(dict.fromkeys(kind for line in lines for kind in line["totals"]))
    rows = [
        [
            f"rank {line['rank']}",
            *(f"{line['totals'].get(kind, 0.0):.3f}" for kind in kinds),
            f"{line['seconds']:.3f}",
        ]
        for line in sorted(lines, key=lambda line: int(line["rank"]))
    ]
    return table(["seconds", *kinds, "the call"], rows)
