"""docs/measured.md and its figures, out of the files in results/."""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.page.figures import Bar, Figure, Panel
from benchmarks.page.results import Found, find_results
from benchmarks.page.subjects import GOALS, PLAIN_STREAM, QUESTIONS, SUBJECTS, Row, Spread, Subject

FIGURES_NAME: Final = "measured"
"""Directory of the figures, beside the page."""

STEMS: Final = (
    *dict.fromkeys(subject.stem for subject in SUBJECTS),
    *("growth", "recovery_faults", "recovery_overhead", "planning"),
)
"""Benchmarks that the page is about: names of their scripts, and beginnings of their files."""

_HEAD: Final = """\
# Measurements

Is it faster? Medians of rounds in which both take turns, on two cores that all ranks share. This
package digests all that it writes and verifies all that it reads; torch_dist, FileSystemWriter and
NVRx do neither."""

_YOURS: Final = """\
Times as fast is the median over rounds; more than 1 is in favour of this package. On your
storage, in two minutes:
[`dist-ckpt bench DIR`](cli.md#bench)."""

_METHOD: Final = """\
## How it is measured

`python benchmarks/report.py page` generates this page from the files in `benchmarks/results`;
`benchmarks/README.md` describes each benchmark.

- Seconds and ratios are medians of the rounds, followed by the minimum and maximum in brackets.
  Lower is better, except for GB/s.
- Candidates take turns, three or more in random order; the first round does not count where there
  is a warm-up. A ratio compares two candidates within one round.
- The baseline moves the same bytes in the plainest way, without Megatron-Core. In the plots of
  ratios it is the red line, with seconds behind each ratio; this package is blue.
- All ranks share two cores. Do not compare seconds from different machines: the table below lists
  machine and commit of each run. `load before` is what was left of the run before it."""

_SUMMARY: Final = (
    f"![Seconds to save and load the largest state, lower is better]({FIGURES_NAME}/summary.svg)"
)

_OURS: Final = ("packs", "zarr", "two-stage", "plain, zarr", "verify", "to ", "local manager")
"""How the names of this package's candidates begin."""


def build_page(results: Path) -> tuple[str, list[Figure]]:
    """The page of the files in a directory, and the figures that it shows.

    Raises:
        ResultsError: a file is not what a benchmark writes.
    """
    found = {stem: find_results(results, stem) for stem in STEMS}
    rows = {subject.title: list(subject.rows(found[subject.stem])) for subject in SUBJECTS}
    figures = [
        _figure(subject, rows[subject.title])
        for subject in SUBJECTS
        if subject.figure and rows[subject.title]
    ]
    parts = [_HEAD, *_answers(rows)]
    if panels := _summary_panels(rows[SUBJECTS[0].title]):
        figures.append(Figure("summary", "seconds (lower is better)", panels, None))
        parts.append(_SUMMARY)
    parts.append(_METHOD)
    if missing := [f"`{stem}.py`" for stem in STEMS if not found[stem].lines]:
        parts.append(f"**Not measured yet:** {', '.join(missing)}.")
    parts += [*_runs(found), *_goals(rows)]
    for subject in SUBJECTS:
        parts += _subject(subject, rows[subject.title])
    for stem, make_table in _TABLES.items():
        parts += make_table(found[stem])
    return "\n\n".join(parts) + "\n", figures


def stem_tables(stem: str, found: Found) -> Iterator[str]:
    """The tables of one benchmark, for the screen."""
    for subject in SUBJECTS:
        if subject.stem == stem:
            yield from _subject_table(subject, list(subject.rows(found)))
    if stem in _TABLES:
        yield from _TABLES[stem](found)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """A table; the first columns are aligned at the left, the others at the right."""
    aligned = ["---"] * num_left + ["---:"] * (len(titles) - num_left)
    lines = [titles, aligned, *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _runs(found: Mapping[str, Found]) -> Iterator[str]:
    runs = [run for stem in STEMS for run in found[stem].of_kind("run")]
    if not runs:
        return
    yield "## Where and with what"
    machines = list(dict.fromkeys(map(_machine, runs)))
    yield "\n".join(f"{number}. {text}" for number, text in enumerate(machines, 1))
    rows = [
        [
            f"`{run['command'].partition(' --out ')[0]}`",
            str(run["commit"])[:12],
            str(machines.index(_machine(run)) + 1),
            f"{run['machine']['load_average']:.1f}",
        ]
        for run in runs
    ]
    yield table(("command", "commit", "machine", "load before"), rows)


def _machine(run: Mapping[str, Any]) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items() if number)
    return (
        f"{machine['processor']}, {machine['num_cores']} cores, "
        f"{machine['memory_nbytes'] / 1e9:.0f} GB, kernel {machine['kernel']}; "
        f"Python {run['python']}, {versions}"
    )


def _answers(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    lines = []
    for question in QUESTIONS:
        of_stem = [r for s in SUBJECTS if s.stem == question.stem for r in rows[s.title]]
        if pair := question.rows(of_stem):
            ours, theirs = pair
            times = 1 / ours.ratios[question.theirs].median
            seconds = [_number(row.seconds.median) for row in pair]
            lines.append([question.text, f"{times:.2g}", *seconds, theirs.candidate])
    if lines:
        yield table(("", "times as fast", "this package, s", "other, s", "other"), lines)
        yield _YOURS


def _goals(rows: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    shown = []
    for goal in GOALS:
        of_stem = [r for s in SUBJECTS if s.stem == goal.stem for r in rows[s.title]]
        values = goal.values(of_stem)
        if values:
            num_met = sum(value <= goal.limit for value, _ in values)
            met = f"{num_met} of {len(values)}"
            met = met if num_met == len(values) else f"**{met}**"
            spans = map(_span, zip(*values, strict=True))
            shown.append([goal.text, _number(goal.limit), *spans, met])
    if shown:
        yield "## Goals"
        yield (
            "What this project aims at. Bold: not met in every case that was measured. The first "
            "table compares with others."
        )
        yield table(("goal", "at most", "measured", "seconds", "met in"), shown)


def _span(values: Sequence[float]) -> str:
    low, high = _number(min(values)), _number(max(values))
    return low if low == high else f"{low} to {high}"


def _subject(subject: Subject, rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    yield f"## {subject.title}"
    yield f"{subject.words} Samples: `benchmarks/results/{subject.stem}.jsonl`."
    if subject.figure:
        yield f"![{subject.title}, ratios to the baseline]({FIGURES_NAME}/{subject.stem}.svg)"
    yield from _subject_table(subject, rows)


def _subject_table(subject: Subject, rows: Sequence[Row]) -> Iterator[str]:
    peers = [subject.peer] if subject.peer else []
    titles = ["case", "candidate", "seconds", "of the baseline", *(f"of {peer}" for peer in peers)]
    cells = [
        [
            row.label,
            row.candidate,
            _spread(row.seconds),
            _ratio(row, subject.baseline, PLAIN_STREAM),
            *(_ratio(row, peer) for peer in peers),
            *map(_number, row.more.values()),
        ]
        for row in rows
    ]
    if cells:
        yield table([*titles, *(title for title, *_ in subject.more)], cells, num_left=2)


def _ratio(row: Row, *baselines: str) -> str:
    found = next((row.ratios[name] for name in baselines if name in row.ratios), None)
    return "-" if found is None else _spread(found)


def _spread(spread: Spread) -> str:
    return f"{_number(spread.median)} ({_number(spread.low)}-{_number(spread.high)})"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 2 - math.floor(math.log10(abs(value))) if value else 2
    return f"{value:,.{max(0, min(3, digits))}f}"


def _figure(subject: Subject, rows: Sequence[Row]) -> Figure:
    bars = []
    for row in rows:
        ratio = row.ratios.get(subject.baseline) or row.ratios.get(PLAIN_STREAM)
        if ratio is not None and ratio != Spread(1.0, 1.0, 1.0):
            bars.append((row, ratio))
    axis = "times the baseline (lower is better)"
    return Figure(subject.stem, axis, _panels(bars, with_seconds=True), baseline=1.0)


def _summary_panels(rows: Sequence[Row]) -> tuple[Panel, ...]:
    """Save and load of the largest state on a disk, in seconds."""
    on_disk = [row for row in rows if row.step in {"durable save", "load cold"}]
    largest = max((row.fields["nbytes"] for row in on_disk), default=0)
    return _panels([(r, r.seconds) for r in on_disk if r.fields["nbytes"] == largest])


def _panels(
    values: Iterable[tuple[Row, Spread]], *, with_seconds: bool = False
) -> tuple[Panel, ...]:
    """One for each case and step."""
    panels: dict[str, list[Bar]] = {}
    for row, spread in values:
        name = row.candidate
        text = _number(spread.median)
        text += f"  ({_number(row.seconds.median)} s)" if with_seconds else ""
        bar = Bar.of(name, spread, text, is_ours=name.startswith(_OURS))
        panels.setdefault(row.label, []).append(bar)
    return tuple(Panel(title, tuple(bars)) for title, bars in panels.items())


_RECOVERY: Final = (
    "Four ranks train under `dist-ckpt run`. Seconds run from the fault, or for `SIGSTOP` and "
    "`stuck` from its detection, until the last rank trains again. After every fault, weights, "
    "moments, random numbers and losses are compared bit for bit with a run without faults. "
    "Faults are 2 to 4 steps apart, so a spare is often still starting when the next rank is "
    "killed; with `--steps-apart 300` it is ready."
)


def _recovery_tables(faults: Found) -> Iterator[str]:
    groups: dict[tuple[str, int], list[float]] = {}
    for line in faults.of_kind("recovery"):
        key = str(line["fault"]["kind"]), int(line["num_spares"])
        groups.setdefault(key, []).append(float(line["seconds"]))
    rows = []
    for (kind, spares), seconds in sorted(groups.items()):
        ordered = sorted(seconds)
        ninety = ordered[min(len(ordered) - 1, math.floor(0.9 * len(ordered)))]
        cells = map(_number, (statistics.median(ordered), ninety, ordered[-1]))
        rows.append([kind, str(spares), str(len(seconds)), *cells])
    if rows:
        yield "## Recovery"
        yield _RECOVERY
        yield table(("fault", "spares", "faults", "median s", "90 % s", "longest s"), rows)
    rows = [
        [f"{line['faults']:,} faults in training", str(line["seed"]), str(line["violations"])]
        for line in faults.of_kind("campaign")
    ]
    rows += [
        [f"stopped: {line['why']}", str(line["seed"]), "1"] for line in faults.of_kind("violation")
    ]
    if rows:
        yield "A violation is a state or loss that is not that of a run without faults, or a hang."
        yield table(("campaign", "seed", "violations"), rows)


def _overhead_table(overhead: Found) -> Iterator[str]:
    added = {(line["num_ranks"], line["candidate"]): line for line in overhead.of_kind("summary")}
    rows = []
    for line in overhead.of_kind("rounds"):
        which = line["num_ranks"], line["candidate"]
        ms = _number(statistics.median(line["ms_per_step"]))
        row = [f"{which[0]} ranks: {which[1]}", ms, "-", "-", "-"]
        if more := added.get(which):
            cpu_ms = _number(more["cpu_ms_per_rank_step"])
            row[2:] = _number(more["ms_per_step"]), f"{100 * more['share']:.2f} %", cpu_ms
        rows.append(row)
    if rows:
        times = ("ms per step", "added", "of a step of 0.5 s", "added CPU ms per rank")
        yield table(("without faults", *times), rows)


_GROWTH: Final = (
    "Each rank holds 16 MiB, rows of 64 arrays; of each figure the most of any rank. Calls include "
    "those of gloo's sockets. Only the memory differs from run to run. Samples: "
    "`benchmarks/results/growth.jsonl`."
)


def _growth_table(found: Found) -> Iterator[str]:
    rows = []
    lines = sorted(
        found.of_kind("growth"),
        key=lambda line: (line["call"] == "load", line["candidate"], line["num_ranks"]),
    )
    for line in lines:
        most = line["most"]
        moved = most["written_nbytes"] if line["call"] == "save" else most["read_nbytes"]
        calls = most["write_calls"] + most["read_calls"]
        rows.append(
            [
                line["call"],
                line["candidate"],
                str(line["num_ranks"]),
                str(most["files"]),
                f"{moved / (1 << 20):.1f}",
                f"{calls:,}",
                str(most["collectives"]),
                f"{most['peak_nbytes'] / (1 << 20):.1f}",
            ]
        )
    if rows:
        yield "## Growth with the ranks"
        yield _GROWTH
        titles = ("call", "candidate", "ranks", "files", "MiB moved per rank")
        more = ("read and write calls", "collectives", "memory, MiB")
        yield table((*titles, *more), rows, num_left=2)


def _planning_table(found: Found) -> Iterator[str]:
    rows = [
        [
            line["planner"],
            f"{line['job']['num_ranks']:,}",
            f"{line['job']['num_arrays']:,}",
            f"{line['num_shards']:,}",
            f"{line['cpu_seconds']:.2f}",
            f"{line['memory_nbytes'] / (1 << 20):,.0f}",
        ]
        for line in found.of_kind("planning")
    ]
    if rows:
        yield "## Planning"
        yield "Cost per rank of computing a plan from the shards that all ranks describe."
        yield table(("plan", "ranks", "arrays", "shards", "CPU s", "memory, MiB"), rows)


_TABLES: Final[Mapping[str, Callable[[Found], Iterator[str]]]] = {
    "growth": _growth_table,
    "recovery_faults": _recovery_tables,
    "recovery_overhead": _overhead_table,
    "planning": _planning_table,
}
