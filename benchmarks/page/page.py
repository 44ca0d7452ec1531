"""The page of all results: its text, and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.page.figures import Figure
from benchmarks.page.goals import ALL_GOALS, goals_section
from benchmarks.page.growth import planning_section, scaling_section, timeline_section
from benchmarks.page.results import GB, Found, find_results
from benchmarks.page.storage import (
    reshard_section,
    save_load_section,
    stores_section,
    tools_section,
    two_stage_section,
)
from benchmarks.page.text import Section, table
from benchmarks.page.training import (
    async_section,
    faults_section,
    local_section,
    recovery_section,
)
from benchmarks.page.words import HEAD

FIGURES_NAME: Final = "measured"
"""Directory of the figures, beside the page."""

STEMS: Final = (
    *("save_load", "two_stage", "reshard", "local_replicated", "async_save", "tools"),
    *("object_stores", "recovery_faults", "recovery_overhead", "scaling", "timeline"),
    *("format2_faults", "local_faults", "scale_model"),
)
"""Benchmarks that the page is about: names of their scripts, and beginnings of their files."""

_NUM_COMMIT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Page:
    """The page, and the figures that it shows."""

    text: str
    figures: tuple[Figure, ...]


def build_page(results: Path) -> Page:
    """The page of the files in a directory; of benchmarks that are not there it says so.

    Raises:
        ResultsError: a file is not what a benchmark writes.
    """
    found = {stem: find_results(results, stem) for stem in STEMS}
    sections = [
        goals_section(found, ALL_GOALS),
        save_load_section(found["save_load"]),
        two_stage_section(found["two_stage"]),
        reshard_section(found["reshard"]),
        local_section(found["local_replicated"]),
        async_section(found["async_save"]),
        tools_section(found["tools"]),
        stores_section(found["object_stores"]),
        recovery_section(found["recovery_faults"], found["recovery_overhead"]),
        scaling_section(found["scaling"]),
        timeline_section(found["timeline"]),
        planning_section(found["scale_model"]),
        faults_section(
            {
                "format 2": found["format2_faults"],
                "local checkpoints": found["local_faults"],
            }
        ),
    ]
    parts = [HEAD, *_missing(found), *_runs(found)]
    for section in sections:
        parts += _section_parts(section)
    figures = tuple(part for s in sections for part in s.parts if not isinstance(part, str))
    return Page("\n\n".join(parts) + "\n", figures)


def _section_parts(section: Section) -> Iterator[str]:
    """Its Markdown; nothing of a section that has but its first words."""
    if len(section.parts) <= 1:
        return
    yield f"## {section.title}"
    for part in section.parts:
        yield part if isinstance(part, str) else _image(part)


def _image(figure: Figure) -> str:
    return f"![{figure.alt}]({FIGURES_NAME}/{figure.name}.svg)"


def _missing(found: Mapping[str, Found]) -> Iterator[str]:
    stems = [stem for stem in STEMS if not found[stem].paths]
    if stems:
        names = ", ".join(f"`{stem}.py`" for stem in stems)
        yield f"**Not measured yet, or its results are not here:** {names}."


def _runs(found: Mapping[str, Found]) -> Iterator[str]:
    """Machines, versions and commands."""
    runs = [(stem, run) for stem in STEMS for run in found[stem].of_kind("run")]
    if not runs:
        return
    yield "## Where and with what"
    yield "\n".join(f"- {text}" for text in _distinct(_machine(run) for _, run in runs))
    yield "\n".join(f"- {text}" for text in _distinct(_versions(run) for _, run in runs))
    rows = [
        [
            f"`{run['command']}`",
            _commit(run),
            f"{run['machine']['load_average']:.1f}",
            _skipped(found[stem]),
        ]
        for stem, run in runs
    ]
    yield table(("command", "commit", "load before", "left out"), rows)


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _machine(run: Mapping[str, Any]) -> str:
    machine = run["machine"]
    memory = f"{machine['memory_nbytes'] / GB:.0f} GB of memory"
    cores = f"{machine['num_cores']} cores"
    return f"{machine['processor']}, {cores}, {memory}, kernel {machine['kernel']}"


def _versions(run: Mapping[str, Any]) -> str:
    versions = [f"{name} {number}" for name, number in run["versions"].items() if number]
    return ", ".join([f"Python {run['python']}", *versions])


def _commit(run: Mapping[str, Any]) -> str:
    changed = " and changes" if run["has_local_changes"] else ""
    return f"{str(run['commit'])[:_NUM_COMMIT_DIGITS]}{changed}"


def _skipped(found: Found) -> str:
    names: Sequence[str] = _distinct(
        f"{line['contender']} ({line['reason']})" for line in found.of_kind("skipped")
    )
    return ", ".join(names) or "-"
