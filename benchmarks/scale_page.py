"""Put the figures of results/scale_planners.jsonl and results/startup.jsonl into docs/scale.md.

python benchmarks/scale_page.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from benchmarks.measuring.records import ROOT
from benchmarks.page.results import Found, Line, find_results
from benchmarks.page.text import table

PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results"
PLANNERS, STARTUP = "scale_planners", "startup"

_GB = 10**9
_MIB = 1 << 20


def tables(planners: Found, startup: Found) -> dict[str, str]:
    """Every table of the page, by the name that it has there."""
    (sheet,) = planners.of_kind("sheet")
    (node,) = planners.of_kind("node times")
    return {
        "job": table(("of the checkpoint", ""), list(_sheet_rows(sheet))),
        "planners": table(
            ("plan", "ranks", "CPU s", "µs per item", "memory MiB", "gathered MiB", "steps"),
            [_planner_row(line) for line in planners.of_kind("planner")],
        ),
        "times": table(
            ("storage, GB/s", "save, s", "load, each rank alone, s", "two-stage load, s"),
            [_time_row(line) for line in planners.of_kind("times")],
        ),
        "nodes": table(("without shared storage", ""), list(_node_rows(node))),
        "startup": table(
            ("command", "median s", "least", "most", "wanted"),
            [_start_row(line) for line in startup.of_kind("summary")],
        ),
        "machine": _machine(planners),
    }


def page_with(page: str, found: Mapping[str, str]) -> str:
    """The page with other tables.

    Raises:
        ValueError: it has no place for one of them.
    """
    for name, text in found.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        page, count = place.subn(partial(_filled, text), page)
        if count != 1:
            raise ValueError(f"{PAGE}: {count} places for the table {name!r}, expected 1")
    return page


def _filled(text: str, place: re.Match[str]) -> str:
    return place[1] + text + place[2]


def _sheet_rows(sheet: Line) -> Iterator[Sequence[str]]:
    yield "parameters", f"{sheet['num_parameters'] / 1e12:.3f} trillion"
    yield "bytes written", f"{sheet['nbytes'] / 1e12:.2f} TB"
    yield "arrays", f"{sheet['num_arrays']:,}"
    yield "shards that ranks describe, replicas included", f"{sheet['num_shards']:,}"
    yield "files of format 1: chunks, metadata", _files(sheet, "num_files_1")
    yield "files of format 2: chunks, metadata", _files(sheet, "num_files_2")
    yield "manifest of format 2", f"{sheet['manifest_nbytes'] / 1e6:,.0f} MB"
    most, mean = sheet["most_written_nbytes"], sheet["mean_written_nbytes"]
    yield "written by a rank, mean and most", f"{mean / _GB:.2f} and {most / _GB:.2f} GB"
    yield "weights that a rank holds", f"{sheet['weights_nbytes'] / _GB:.2f} GB"
    yield "optimizer state that a rank holds", f"{sheet['optimizer_nbytes'] / _GB:.2f} GB"


def _files(sheet: Line, name: str) -> str:
    return f"{sheet[name]:,} + {sheet['num_arrays']:,}"


def _planner_row(line: Line) -> Sequence[str]:
    case = line["case"]
    return (
        case["planner"],
        f"{case['num_ranks']:,}",
        f"{line['cpu_seconds']:.2f}",
        f"{line['cpu_seconds'] * 1e6 / line['num_items']:.1f}",
        f"{line['memory_nbytes'] / _MIB:,.0f}",
        f"{line['gathered_nbytes'] / _MIB:,.1f}",
        f"{line['num_steps']:,}",
    )


def _time_row(line: Line) -> Sequence[str]:
    seconds = (line["save"], line["load_alone"], line["load_two_stage"])
    return f"{line['bandwidth'] // _GB:,}", *(f"{one:,.1f}" for one in seconds)


def _node_rows(line: Line) -> Iterator[Sequence[str]]:
    yield "local save, two copies of each part", f"{line['local_save']:.1f} s"
    yield "local load, every rank its own part", f"{line['local_load']:.1f} s"
    gb = line["recover_nbytes"] / _GB
    yield f"recovery of a node from memory, {gb:.0f} GB", f"{line['recover']:.2f} s"


def _start_row(line: Line) -> Sequence[str]:
    wanted = "" if line["target"] is None else f"{line['target']:.1f}"
    return line["name"], *(f"{line[name]:.2f}" for name in ("median", "least", "most")), wanted


def _machine(found: Found) -> str:
    (run,) = found.of_kind("run")
    machine = run["machine"]
    gib = machine["memory_nbytes"] / (1 << 30)
    return (
        f"`{run['command']}` on {machine['num_cores']} cores ({machine['processor']}), {gib:.0f} "
        f"GiB, Python {run['python']}, commit {run['commit'][:8]}, load average "
        f"{machine['load_average']:.1f} at the start."
    )


def main() -> None:
    """Bring the page up to date."""
    found = tables(find_results(RESULTS, PLANNERS), find_results(RESULTS, STARTUP))
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
