"""All benchmarks with one command, and one page of what they have found.

    python benchmarks/report.py run             # two hours, on a machine that does nothing else
    python benchmarks/report.py run --smoke     # toy size: does it all run?
    python benchmarks/report.py run --only save_load --only reshard
    python benchmarks/report.py page            # docs/measured.md, from benchmarks/results

``run`` goes on when a benchmark fails, and ends with status 1 then. Its results, the page and the
figures go to ``bench-results`` by default.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

from benchmarks.page.figures import draw
from benchmarks.page.page import FIGURES_NAME, build_page

_HERE: Final = Path(__file__).resolve().parent
RESULTS: Final = _HERE / "results"
PAGE: Final = _HERE.parent / "docs" / "measured.md"

BENCHMARKS: Final = {
    "save_load": ("--size", "0.5", "--size", "2"),
    "dcp": (),
    "one_process": (),
    "many_shards": (),
    "two_stage": ("--size", "0.5"),
    "reshard": ("--size", "0.5"),
    "local_replicated": (),
    "async_save": ("--size", "0.5", "--size", "2"),
    "tools": (),
    "object_stores": ("--size", "0.5"),
    "growth": (),
    "recovery_overhead": (),
    "recovery_faults": (),
    "planning": (),
}
"""Everything that is run, in this order (what is timed comes first), and its options."""


def run_all(stems: Sequence[str], results: Path, *, smoke: bool) -> bool:
    """Run benchmarks one after the other, and make the page; whether none has failed."""
    results.mkdir(parents=True, exist_ok=True)
    failed = []
    for stem in stems:
        toy = ["--smoke"] if smoke else []
        out = str(results / f"{stem}.jsonl")
        command = [sys.executable, str(_HERE / f"{stem}.py"), *toy, *BENCHMARKS[stem], "--out", out]
        began = time.monotonic()
        status = _status(command)
        if status != 0:
            failed.append(stem)
        minutes = (time.monotonic() - began) / 60
        print(f"{stem}: status {status}, {minutes:.1f} minutes", flush=True)  # noqa: T201
    write_page(results, results / PAGE.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)  # noqa: T201
    return not failed


def _status(command: Sequence[str]) -> int:
    """Its exit status; it ends when this process is interrupted, too."""
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def write_page(results: Path, out: Path) -> None:
    """Write the page; the figures too, where matplotlib is installed."""
    text, figures = build_page(results)
    out.write_text(text, encoding="utf-8")
    print(f"{out} is made")  # noqa: T201 - a command's output
    directory = out.parent / FIGURES_NAME
    directory.mkdir(exist_ok=True)
    for old in directory.glob("*.svg"):
        old.unlink()
    try:
        for figure in figures:
            draw(figure, directory)
    except ModuleNotFoundError as error:
        print(f"no figures: {error.name} is not installed")  # noqa: T201


def main() -> None:
    """Run all benchmarks, or make the page of their results."""
    parser = argparse.ArgumentParser(description="All benchmarks, and the page of their results.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run all benchmarks, and make the page of their results")
    run.add_argument("--results", type=Path, default=Path("bench-results"))
    run.add_argument("--only", action="append", choices=BENCHMARKS, help="only these benchmarks")
    run.add_argument("--smoke", action="store_true", help="toy size: does it all run?")
    page = commands.add_parser("page", help="make the page, and its figures, of existing results")
    page.add_argument("--results", type=Path, default=RESULTS)
    page.add_argument("--out", type=Path, default=PAGE, help="the page; figures go beside it")
    options = parser.parse_args()
    if options.command == "page":
        write_page(options.results, options.out)
    elif not run_all(options.only or [*BENCHMARKS], options.results, smoke=options.smoke):
        sys.exit(1)


if __name__ == "__main__":
    main()
