"""``python -m tests.seams --seed 7``: a table of all cells, which run one after the other.

With patterns only those whose names match: ``"plain,*"``, ``"* run, kill*"``. The exit code is 1 if
a cell ends in another way than it should; its report goes to standard error.
"""

import argparse
import resource
import statistics
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.seams.matrix import NONSENSE, Cell, cells, run_cell, undisturbed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seams", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("patterns", nargs="*", default=["*"])
    options = parser.parse_args()
    say(f"seed {options.seed}; seconds, and those of processors in all processes, of:")
    seconds, num_wrong = [], 0
    for number, cell in enumerate(cells(options.seed)):
        if not any(fnmatchcase(str(cell), pattern) for pattern in options.patterns):
            continue
        undisturbed(cell.loop)  # once for each; it is no cell
        began, cpu_began = time.monotonic(), cpu_s()
        outcome = verdict(cell)
        seconds.append(time.monotonic() - began)
        num_wrong += outcome == "WRONG"
        cost = f"{seconds[-1]:6.1f} s {cpu_s() - cpu_began:6.1f} s"
        say(f"{number:3} {cost}  {outcome:17} {cell}")
    for what, why in NONSENSE.items():
        say(f"no cell: {what}: {why}")
    if seconds:
        median, most = statistics.median(seconds), max(seconds)
        right = len(seconds) - num_wrong
        say(f"{len(seconds)} cells, {right} right; median {median:.1f} s, longest {most:.1f} s")
    return min(num_wrong, 1)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def cpu_s() -> float:
    """Of all processes that have ended by now."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdict(cell: Cell) -> str:
    """How a cell has ended."""
    try:
        with TemporaryDirectory() as directory:
            return run_cell(cell, Path(directory) / "cell")
    except AssertionError as error:
        sys.stderr.write(f"{error}\n")
        return "WRONG"


if __name__ == "__main__":
    sys.exit(main())
