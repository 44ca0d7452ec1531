"""``python -m tests.faults --seed 7``: break a training in every way there is, and compare.

Each count may be 0. The faults of nodes need root.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

# torch looks up the name of every peer that a store's client connects to; see tests/conftest.py.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

from tests.cluster.campaign import run_node_faults
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
    parser.add_argument(
        "--save-every", type=int, default=0, help="steps between checkpoints on the nodes"
    )
    parser.add_argument("--directory", type=Path, help="where to write")
    options = parser.parse_args()
    campaign = Campaign(options.seed, options.events, options.attempts, options.changes)
    began = time.monotonic()

    def show(what: Event | Attempt | Change | str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:7.1f} s  {what}\n")
        sys.stdout.flush()

    show(f"seed {options.seed}")
    try:
        tally = run_campaign(campaign, options.directory, show)
    except ViolationError as violation:
        sys.stderr.write(f"VIOLATION: {violation}\n")
        return 1
    counters = {"events": tally.events, "attempts": tally.attempts, "changes": tally.changes}
    found = {name: dict(sorted(counter.items())) for name, counter in counters.items()}
    sys.stdout.write(f"{json.dumps({'again': str(campaign), **found})}\n")
    if options.node_faults and why_not():
        sys.stdout.write(f"no faults of nodes: {why_not()}\n")
    elif options.node_faults:
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            seconds = run_node_faults(
                options.seed, options.node_faults, options.save_every, Path(scratch), show
            )
        medians = {kind: round(statistics.median(found), 2) for kind, found in seconds.items()}
        counts = {kind: len(found) for kind, found in seconds.items()}
        sys.stdout.write(f"{json.dumps({'node faults': counts, 'median_s': medians})}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
