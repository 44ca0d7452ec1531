"""``python -m tests.seams --seed 7``: each cell of the seams, one after the other.

With patterns only those whose names match: ``"plain,*"``, ``"* run, kill*"``.
"""

import argparse
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.seams.matrix import cells, run_cell


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.seams", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("patterns", nargs="*", default=["*"])
    options = parser.parse_args()
    sys.stdout.write(f"seed {options.seed}\n")
    num_wrong = 0
    for number, cell in enumerate(cells(options.seed)):
        if not any(fnmatchcase(str(cell), pattern) for pattern in options.patterns):
            continue
        began = time.monotonic()
        try:
            with TemporaryDirectory() as directory:
                outcome = run_cell(cell, Path(directory) / "cell")
        except AssertionError as error:
            num_wrong += 1
            outcome = f"WRONG: {error}"
        sys.stdout.write(f"{time.monotonic() - began:6.1f} s  {number}: {cell}: {outcome}\n")
        sys.stdout.flush()
    return min(num_wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
