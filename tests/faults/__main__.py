"""``python -m tests.faults``: fail on one rank wherever that is possible."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

# torch looks up the name of every peer that a store's client connects to; see tests/conftest.py.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

from tests.faults.scenarios import SCENARIOS
from tests.faults.sweep import (
    CULPRIT,
    Fault,
    count_calls,
    sweep,
)
from tests.support.ranks import run_processes


def main() -> int:
    """0 if all ranks learnt of every failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="default: all")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each scenario")
    parser.add_argument("--only", default="", help="faults whose name holds this")
    options = parser.parse_args()
    is_fine = True
    for scenario in options.scenario or SCENARIOS:
        faults = [fault for fault in _faults(scenario) if options.only in fault.name]
        lines = _swept(scenario, faults, options.seconds)
        is_fine = is_fine and not lines
        sys.stdout.write(f"== {scenario}, {len(faults)} faults: {len(lines)} complaints\n")
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()
    return 0 if is_fine else 1


def _faults(scenario: str) -> list[Fault]:
    with tempfile.TemporaryDirectory(prefix="dist-ckpt-faults-") as root:
        counted = run_processes(4, count_calls, scenario, root)[CULPRIT]
    assert isinstance(counted, dict), counted
    faults = []
    for name, count in counted.items():
        chosen = (
            range(1, count + 1)
            if count <= 24
            else sorted({*range(1, 13), *range(13, count, 5), count})
        )
        faults += [Fault(name, number) for number in chosen]
        faults += [Fault(name, number, for_ever=True) for number in chosen][:: max(1, count // 3)]
    return faults


def _swept(scenario: str, faults: list[Fault], seconds: float) -> list[str]:
    """All complaints; where a group does not survive one fault, another one takes over after it."""
    lines: list[str] = []
    while faults:
        with tempfile.TemporaryDirectory(prefix="dist-ckpt-faults-") as root:
            found = sweep(scenario, Path(root), faults, seconds)
        lines += found
        left = next((line for line in found if line.startswith("left after ")), None)
        if left is None:
            break
        faults = faults[int(left.split()[2]) :]
    return lines


if __name__ == "__main__":
    sys.exit(main())
