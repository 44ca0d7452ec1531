"""The table of README.md that says how fast saves and loads are, out of the results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.page.results import GB, IN_MEMORY, Case, Found, Stat
from benchmarks.page.storage import SAVE_STEPS, TORCH_DIST, save_load_stats
from benchmarks.page.text import table

_ROWS: Final = (
    ("save, {disk}, all on the disk", "durable save", False),
    ("save, memory file system", "save", True),
    ("load, {disk}, files not cached", "load cold", False),
    ("load, {disk}, files cached", "load warm", False),
    ("load, memory file system", "load warm", True),
)
"""What a row says, the step that it is about, and whether files lie in memory."""
_OURS: Final = {"zarr 1": "1", "zarr 2": "2"}


def build_readme_table(found: Found) -> str:
    """One column group for each size that was measured, from the smallest on."""
    sizes = sorted({_gb(case) for case in found.cases()})
    titles = ["", '`("zarr", n)`']
    for size in sizes:
        titles += [f"{size}: seconds", "of the floor", "of `torch_dist`"]
    rows = [row for what in _ROWS for row in _rows(found, sizes, *what)]
    lines = table(titles, rows).splitlines()
    # The first two columns are names.
    return "\n".join([lines[0], "|---|---|" + "---:|" * 3 * len(sizes), *lines[2:]])


def _rows(
    found: Found,
    sizes: list[str],
    what: str,
    step: str,
    in_memory: bool,  # noqa: FBT001
) -> Iterator[list[str]]:
    cases = {
        _gb(case): case
        for case in found.cases()
        if (dict(case)["file_system"] in IN_MEMORY) is in_memory
    }
    stats = {size: _by_name(found, cases[size], step) for size in sizes if size in cases}
    disk = next((str(dict(case)["file_system"]) for case in cases.values()), "disk")
    for number, (name, version) in enumerate(_OURS.items()):
        row = [what.format(disk=disk) if number == 0 else "", version]
        for size in sizes:
            row += _cells(stats.get(size, {}).get(name), SAVE_STEPS[step])
        yield row


def _cells(stat: Stat | None, floor: str) -> list[str]:
    if stat is None:
        return ["-"] * 3
    ratios = (stat.ratios.get(name) for name in (floor, TORCH_DIST))
    medians = ("-" if ratio is None else f"{ratio.median:.2f}" for ratio in ratios)
    return [f"{stat.seconds.median:.2f}", *medians]


def _by_name(found: Found, case: Case, step: str) -> Mapping[str, Stat]:
    return {stat.contender: stat for stat in save_load_stats(found, case, step)}


def _gb(case: Case) -> str:
    return f"{dict(case)['nbytes'] / GB:.1g} GB"
