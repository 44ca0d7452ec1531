"""``python -m tests.faults --seed 7``: break a training in every way there is, and compare.

Each count may be 0. The faults of nodes need root.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

# torch looks up the name of every peer that a store's client connects to; see tests/conftest.py.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

from tests.cluster.namespaces import why_not
from tests.faults.changes import Change
from tests.faults.run import Campaign, ViolationError, run_campaign
from tests.faults.schedule import Attempt, Event


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--events", type=int, default=200, help="in a training")
    parser.add_argument("--attempts", type=int, default=2000, help="of operations of all ranks")
    parser.add_argument("--changes", type=int, default=2000, help="of files, of each kind")
    parser.add_argument("--node-faults", type=int, default=200, help="of four nodes and a spare")
    parser.add_argument("--directory", type=Path, help="where to write")
    options = parser.parse_args()
    if options.node_faults and (reason := why_not()):
        sys.stdout.write(f"no faults of nodes: {reason}\n")
        options.node_faults = 0
    campaign = Campaign(
        options.seed, options.events, options.attempts, options.changes, options.node_faults
    )
    began = time.monotonic()

    def show(what: Event | Attempt | Change | str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:7.1f} s  {what}\n")
        sys.stdout.flush()

    sys.stdout.write(f"{campaign}\n")
    try:
        tally = run_campaign(campaign, options.directory, show)
    except ViolationError as violation:
        sys.stderr.write(f"VIOLATION: {violation}\n")
        return 1
    counters = {"events": tally.events, "attempts": tally.attempts, "changes": tally.changes}
    found: dict[str, Any] = {name: dict(sorted(one.items())) for name, one in counters.items()}
    found["node faults: number, median seconds"] = {
        kind: (len(seconds), round(statistics.median(seconds), 2))
        for kind, seconds in sorted(tally.node_faults.items())
    }
    sys.stdout.write(f"{json.dumps({'again': str(campaign), **found})}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
