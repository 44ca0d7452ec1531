"""Sections of the page about files: saves, loads, groups of replicas, layouts, tools, stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.page.figures import BarFigure, BarPanel, Figure, bar_of
from benchmarks.page.results import (
    IN_MEMORY,
    Case,
    Found,
    Line,
    Stat,
    spread_of,
    summarise_rounds,
    with_longest,
)
from benchmarks.page.text import (
    Section,
    case_text,
    mib_text,
    ratio_text,
    seconds_cell,
    stats_table,
    table,
)
from benchmarks.page.words import RESHARD, SAVE_LOAD, STORES, TOOLS, TWO_STAGE

TORCH_DIST: Final = "torch_dist"
WRITE, WRITE_FLUSHED = "raw write", "raw write+fsync"
READ_SHARES, SEND_SHARES, GROUP_FLOOR = "raw read", "gloo exchange", "floor"
_OF_FLOOR, _OF_PEER = "of the floor", "of torch_dist"
_OURS: Final = ("zarr", "two-stage", "plain, zarr", "verify", "to ")

SAVE_STEPS: Final[Mapping[str, str]] = {
    "save": WRITE,
    "durable save": WRITE_FLUSHED,
    "load cold": WRITE_FLUSHED,
    "load warm": WRITE_FLUSHED,
}
"""What is shown of saves and loads, and the floor of each."""


def save_load_stats(found: Found, case: Case, step: str) -> list[Stat]:
    """Those of one step; ``durable save`` counts the seconds until all is on the disk."""
    if step == "durable save":
        samples = found.samples(case, "save")
        return summarise_rounds(samples, (WRITE_FLUSHED, TORCH_DIST), _durable_seconds)
    return summarise_rounds(found.samples(case, step), (SAVE_STEPS[step], TORCH_DIST))


def save_load_section(found: Found) -> Section:
    """Saves and loads of a state, by everyone."""
    parts: list[str | Figure] = [SAVE_LOAD]
    for case in found.cases():
        steps = [step for step in _steps_of(case) if save_load_stats(found, case, step)]
        of_case = {step: save_load_stats(found, case, step) for step in steps}
        parts += [f"### {case_text(case)}", _save_load_figure(case, of_case)]
        for step, stats in of_case.items():
            floors = {SAVE_STEPS[step]: _OF_FLOOR, TORCH_DIST: _OF_PEER}
            parts += [f"**{step}**", stats_table(stats, floors)]
    return Section("Saves and loads", tuple(parts))


def two_stage_section(found: Found) -> Section:
    """Loads by ranks that all want everything."""
    parts: list[str | Figure] = [TWO_STAGE]
    panels = []
    for case in found.cases():
        samples = with_longest(found.samples(case), (READ_SHARES, SEND_SHARES), GROUP_FLOOR)
        stats = summarise_rounds(samples, (GROUP_FLOOR, "fully parallel"))
        title = f"{case_text(case)}, {samples[-1]['step']}"
        floors = {GROUP_FLOOR: _OF_FLOOR, "fully parallel": "of fully parallel"}
        parts += [f"### {title}", stats_table(stats, floors)]
        skipped = (READ_SHARES, SEND_SHARES, GROUP_FLOOR)
        panels.append(_panel(title, stats, GROUP_FLOOR, skipped))
    if panels:
        alt = "loads by replicas, as ratios to the floor"
        parts.insert(1, BarFigure("two_stage", alt, tuple(panels)))
    return Section("Two-stage loads", tuple(parts))


def reshard_section(found: Found) -> Section:
    """Loads in another layout than the one that was saved."""
    parts: list[str | Figure] = [RESHARD]
    panels = []
    for case in found.cases():
        fields: dict[str, Any] = dict(case)
        for step in _present_steps(found, case):
            samples = found.samples(case, step)
            stats = summarise_rounds(samples, (READ_SHARES, TORCH_DIST))
            title = f"{fields['move']}, {case_text(case)}, {step}"
            parts += [f"### {title}", _reshard_table(stats, samples)]
            panels.append(_panel(title, stats, READ_SHARES, (READ_SHARES,)))
    if panels:
        alt = "loads in another layout, as ratios to the floor"
        parts.insert(1, BarFigure("reshard", alt, tuple(panels)))
    return Section("Loads in another layout", tuple(parts))


def tools_section(found: Found) -> Section:
    """Verify and convert."""
    parts: list[str | Figure] = [TOOLS]
    panels = []
    for case in found.cases():
        fields: dict[str, Any] = dict(case)
        for step in _present_steps(found, case):
            samples = found.samples(case, step)
            stats = summarise_rounds(samples, ("raw read", "raw copy"))
            where = f"from {fields['source']}, {case_text(case)}, {step}"
            parts += [f"### {where}", _tools_table(stats, samples)]
            panels.append(_panel(where, stats, "raw read", ("raw read",)))
    if panels:
        alt = "verify and convert, as ratios to a plain read of the same files"
        parts.insert(1, BarFigure("tools", alt, tuple(panels)))
    return Section("Verify and convert", tuple(parts))


def stores_section(found: Found) -> Section:
    """Saves and loads in an object store on the same machine."""
    parts: list[str | Figure] = [STORES]
    panels = []
    for case in found.cases():
        for step in _present_steps(found, case):
            stats = summarise_rounds(found.samples(case, step), ("tensorstore put", "boto3 put"))
            title = f"{case_text(case)}, {step}"
            floors = {"tensorstore put": "of tensorstore put", "boto3 put": "of boto3 put"}
            parts += [f"### {title}", stats_table(stats, floors)]
            panels.append(_panel(title, stats, "tensorstore put", ("tensorstore put",)))
    if panels:
        alt = "saves and loads in an object store, as ratios to plain objects"
        parts.insert(1, BarFigure("object_stores", alt, tuple(panels)))
    return Section("Object stores", tuple(parts))


def is_ours(contender: str) -> bool:
    """Whether a contender is this package."""
    return contender.startswith(_OURS) or contender == "local manager"


def _panel(title: str, stats: Sequence[Stat], floor: str, skipped: Sequence[str]) -> BarPanel:
    bars = [
        bar_of(stat.contender, stat.ratios[floor], is_ours=is_ours(stat.contender))
        for stat in stats
        if stat.contender not in skipped and floor in stat.ratios
    ]
    axis = "one plain read" if floor == WRITE_FLUSHED and title.startswith("load") else floor
    return BarPanel(title, f"times {axis}", tuple(bars))


def _save_load_figure(case: Case, of_case: Mapping[str, Sequence[Stat]]) -> BarFigure:
    fields: dict[str, Any] = dict(case)
    panels = [
        _panel(step, stats, SAVE_STEPS[step], (WRITE, WRITE_FLUSHED))
        for step, stats in of_case.items()
    ]
    size = f"{fields['nbytes'] / 10**9:.1f}".replace(".", "_")
    alt = f"saves and loads of {case_text(case)}, as ratios to the floor"
    return BarFigure(f"save_load_{fields['file_system']}_{size}_gb", alt, tuple(panels))


def _steps_of(case: Case) -> Iterator[str]:
    in_memory = dict(case)["file_system"] in IN_MEMORY
    for step in SAVE_STEPS:
        if not (in_memory and step in {"durable save", "load cold"}):
            yield step


def _present_steps(found: Found, case: Case) -> list[str]:
    return list(dict.fromkeys(str(line["step"]) for line in found.samples(case)))


def _reshard_table(stats: Sequence[Stat], samples: Sequence[Line]) -> str:
    titles = ["contender", "seconds", _OF_FLOOR, _OF_PEER, "read by calls", "from the device"]
    rows = []
    for stat in stats:
        own = [line["values"] for line in samples if line["contender"] == stat.contender]
        counts = [spread_of([v[name] for v in own]).median for name in _COUNTS]
        rows.append(
            [
                stat.contender,
                seconds_cell(stat.seconds),
                *(_median(stat, floor) for floor in (READ_SHARES, TORCH_DIST)),
                *map(ratio_text, counts),
            ]
        )
    return table(titles, rows)


_COUNTS = ("read_by_calls", "read_from_device")


def _tools_table(stats: Sequence[Stat], samples: Sequence[Line]) -> str:
    titles = ["contender", "seconds", "GB/s", "of raw read", "of raw copy", "peak memory"]
    rows = []
    for stat in stats:
        own = [line["values"] for line in samples if line["contender"] == stat.contender]
        speed = spread_of([values["nbytes_per_second"] for values in own]).median
        rows.append(
            [
                stat.contender,
                seconds_cell(stat.seconds),
                f"{speed / 10**9:.2f}",
                *(_median(stat, floor) for floor in ("raw read", "raw copy")),
                mib_text(max(values["peak_nbytes"] for values in own)),
            ]
        )
    return table(titles, rows)


def _median(stat: Stat, floor: str) -> str:
    return ratio_text(stat.ratios[floor].median) if floor in stat.ratios else "-"


def _durable_seconds(line: Line) -> float | None:
    durable = line["durable_seconds"]
    return None if durable is None else float(durable)
