"""Sections of the page about files: saves, loads, groups of replicas, layouts, tools, stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.contenders.roster import (
    BOTO3_PUT,
    COPY_FILES,
    PARALLEL,
    RAW_FLUSHED,
    RAW_PLAIN,
    RAW_PUT,
    READ_FILES,
    READ_SHARES,
    SEND_SHARES,
)
from benchmarks.page.figures import BarFigure, Figure
from benchmarks.page.ratios import Shown, ratio_panel, ratio_section
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
GROUP_FLOOR: Final = "floor"
_GROUP_PARTS: Final = (READ_SHARES, SEND_SHARES)
_OF_FLOOR, _OF_PEER = "of the floor", "of torch_dist"

SAVE_STEPS: Final[Mapping[str, str]] = {
    "save": RAW_PLAIN,
    "durable save": RAW_FLUSHED,
    "load cold": RAW_FLUSHED,
    "load warm": RAW_FLUSHED,
}
"""What is shown of saves and loads, and the floor of each."""


def save_load_stats(found: Found, case: Case, step: str) -> list[Stat]:
    """Those of one step; ``durable save`` counts the seconds until all is on the disk."""
    if step == "durable save":
        samples = found.samples(case, "save")
        return summarise_rounds(samples, (RAW_FLUSHED, TORCH_DIST), _durable_seconds)
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
    alt = "loads by replicas, as ratios to the floor"
    return ratio_section("Two-stage loads", TWO_STAGE, "two_stage", alt, _two_stage(found))


def two_stage_stats(found: Found, case: Case) -> list[Stat]:
    """Those of ranks that want everything; the floor of a round is the longer of its two parts."""
    samples = with_longest(found.samples(case), _GROUP_PARTS, GROUP_FLOOR)
    return summarise_rounds(samples, (GROUP_FLOOR, PARALLEL))


def _two_stage(found: Found) -> Iterator[Shown]:
    for case in found.cases():
        stats = two_stage_stats(found, case)
        title = f"{case_text(case)}, {found.samples(case)[-1]['step']}"
        floors = {GROUP_FLOOR: _OF_FLOOR, PARALLEL: f"of {PARALLEL}"}
        panel = ratio_panel(title, stats, GROUP_FLOOR, (*_GROUP_PARTS, GROUP_FLOOR))
        yield Shown(title, stats_table(stats, floors), panel)


def reshard_section(found: Found) -> Section:
    """Loads in another layout than the one that was saved."""
    alt = "loads in another layout, as ratios to the floor"
    return ratio_section("Loads in another layout", RESHARD, "reshard", alt, _reshard(found))


def _reshard(found: Found) -> Iterator[Shown]:
    for case, step in found.cases_and_steps():
        samples = found.samples(case, step)
        stats = summarise_rounds(samples, (READ_SHARES, TORCH_DIST))
        title = f"{dict(case)['move']}, {case_text(case)}, {step}"
        panel = ratio_panel(title, stats, READ_SHARES, (READ_SHARES,))
        yield Shown(title, _reshard_table(stats, samples), panel)


def tools_section(found: Found) -> Section:
    """Verify and convert."""
    alt = "verify and convert, as ratios to a plain read of the same files"
    return ratio_section("Verify and convert", TOOLS, "tools", alt, _tools(found))


def _tools(found: Found) -> Iterator[Shown]:
    for case, step in found.cases_and_steps():
        samples = found.samples(case, step)
        stats = summarise_rounds(samples, (READ_FILES, COPY_FILES))
        title = f"from {dict(case)['source']}, {case_text(case)}, {step}"
        panel = ratio_panel(title, stats, READ_FILES, (READ_FILES,))
        yield Shown(title, _tools_table(stats, samples), panel)


def stores_section(found: Found) -> Section:
    """Saves and loads in an object store on the same machine."""
    alt = "saves and loads in an object store, as ratios to plain objects"
    return ratio_section("Object stores", STORES, "object_stores", alt, _stores(found))


def _stores(found: Found) -> Iterator[Shown]:
    for case, step in found.cases_and_steps():
        stats = summarise_rounds(found.samples(case, step), (RAW_PUT, BOTO3_PUT))
        title = f"{case_text(case)}, {step}"
        floors = {name: f"of {name}" for name in (RAW_PUT, BOTO3_PUT)}
        panel = ratio_panel(title, stats, RAW_PUT, (RAW_PUT,))
        yield Shown(title, stats_table(stats, floors), panel)


def _save_load_figure(case: Case, of_case: Mapping[str, Sequence[Stat]]) -> BarFigure:
    fields: dict[str, Any] = dict(case)
    panels = [
        ratio_panel(
            step,
            stats,
            SAVE_STEPS[step],
            (RAW_PLAIN, RAW_FLUSHED),
            "one plain read" if step.startswith("load") else "",
        )
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
                *(_median(stat, floor) for floor in (READ_FILES, COPY_FILES)),
                mib_text(max(values["peak_nbytes"] for values in own)),
            ]
        )
    return table(titles, rows)


def _median(stat: Stat, floor: str) -> str:
    return ratio_text(stat.ratios[floor].median) if floor in stat.ratios else "-"


def _durable_seconds(line: Line) -> float | None:
    durable = line["durable_seconds"]
    return None if durable is None else float(durable)
