"""All benchmarks with one command, and one page of what they have found.

    python benchmarks/report.py run             # two hours, on a machine that does nothing else
    python benchmarks/report.py run --smoke     # toy size: does it all run?
    python benchmarks/report.py run --only save_load --only reshard
    python benchmarks/report.py page            # docs/measured.md, from benchmarks/results

``run`` goes on when a benchmark fails, and ends with status 1 then. What it writes is never in the
repository by itself: ``bench-results`` by default, page and figures included.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import typer
from rich.console import Console

from benchmarks.common.command_line import ROOT, among
from benchmarks.page.figures import draw
from benchmarks.page.page import FIGURES_NAME, build_page

RESULTS: Final = ROOT / "benchmarks" / "results"
PAGE_NAME: Final = "measured.md"


BENCHMARKS: Final[Mapping[str, tuple[str, ...]]] = {
    "save_load": ("--size", "0.5", "--size", "2"),
    "two_stage": ("--size", "0.5"),
    "reshard": ("--size", "0.5"),
    "local_replicated": (),
    "async_save": ("--size", "0.5"),
    "tools": (),
    "object_stores": ("--size", "0.5"),
    "scaling": (),
    "recovery_overhead": (),
    "recovery_faults": (),
    "startup": (),
    "planning": (),
}
"""Everything that is run, in this order (what is timed comes first), and what each is told."""

app = typer.Typer(help="All benchmarks, and the page of their results.", add_completion=False)

_Results = Annotated[Path, typer.Option(help="Directory of the results.")]


def command_of(stem: str, out: Path, *, smoke: bool) -> list[str]:
    """What is run for a benchmark."""
    script = str(Path(__file__).with_name(f"{stem}.py"))
    toy = ["--smoke"] if smoke else []
    return [sys.executable, script, *toy, *BENCHMARKS[stem], "--out", str(out)]


def run_all(
    stems: Sequence[str],
    results: Path,
    *,
    smoke: bool,
    start: Callable[[Sequence[str]], int] | None = None,
) -> bool:
    """Run benchmarks one after the other, and make the page; whether none has failed.

    Args:
        stems: what is run, in this order.
        results: directory of the results, and of the page.
        smoke: toy size.
        start: runs a command; its exit status.
    """
    results.mkdir(parents=True, exist_ok=True)
    console = Console()
    failed = []
    for stem in stems:
        console.rule(stem)
        began = time.monotonic()
        status = (start or _status)(command_of(stem, results / f"{stem}.jsonl", smoke=smoke))
        minutes = (time.monotonic() - began) / 60
        if status != 0:
            failed.append(stem)
        outcome = "done" if status == 0 else f"failed with status {status}"
        console.print(f"{stem}: {outcome}, {minutes:.1f} minutes")
    write_page(results, results / PAGE_NAME, console)
    if failed:
        typer.echo(f"failed: {', '.join(failed)}", err=True)
    return not failed


@app.command()
def run(
    *,
    results: _Results = Path("bench-results"),
    only: Annotated[
        list[str] | None, typer.Option(help="Only these benchmarks.", callback=among(BENCHMARKS))
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Toy size: does it all run?")] = False,
) -> None:
    """Run all benchmarks one after the other, and make the page of their results."""
    if not run_all(only or [*BENCHMARKS], results, smoke=smoke):
        raise typer.Exit(1)


@app.command()
def page(
    *,
    results: _Results = RESULTS,
    out: Annotated[Path, typer.Option(help="The page; figures go beside it.")] = (
        ROOT / "docs" / PAGE_NAME
    ),
) -> None:
    """Make the page, and its figures, of results that are there."""
    write_page(results, out, Console())


def _status(command: Sequence[str]) -> int:
    """Its exit status; it ends when this process is interrupted, too."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def write_page(results: Path, out: Path, console: Console) -> None:
    """Write the page; the figures too, where matplotlib is installed."""
    made = build_page(results)
    out.write_text(made.text, encoding="utf-8")
    console.print(f"{out} is made")
    directory = out.parent / FIGURES_NAME
    directory.mkdir(exist_ok=True)
    for old in directory.glob("*.svg"):
        old.unlink()
    try:
        for figure in made.figures:
            draw(figure, directory)
    except ModuleNotFoundError as error:
        console.print(f"no figures: {error.name} is not installed")


if __name__ == "__main__":
    app()
