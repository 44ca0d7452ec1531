"""``python -m tests.faults --seed 7``: break a training in every way there is, and compare."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# torch looks up the name of every peer that a store's client connects to; see tests/conftest.py.
os.environ.setdefault("RES_OPTIONS", "attempts:0")

from tests.faults.changes import Change
from tests.faults.run import Campaign, ViolationError, report, run_campaign
from tests.faults.schedule import Attempt, Event, Store


def main() -> int:
    """0 if nothing happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--events", type=int, default=200, help="in a training")
    parser.add_argument("--attempts", type=int, default=2000, help="of operations of all ranks")
    parser.add_argument("--changes", type=int, default=2000, help="of files, of each kind")
    parser.add_argument("--store", action="append", choices=list(Store), help="default: both")
    parser.add_argument("--directory", type=Path, help="where to write")
    parser.add_argument("--quiet", action="store_true", help="do not show each event")
    options = parser.parse_args()
    stores = tuple(Store(name) for name in options.store or Store)
    counts = (options.events, options.attempts, options.changes)
    campaign = Campaign(options.seed, *counts, stores)
    began = time.monotonic()

    def show(what: Event | Attempt | Change) -> None:
        if not options.quiet:
            sys.stdout.write(f"{time.monotonic() - began:7.1f} s  {what}\n")
            sys.stdout.flush()

    sys.stdout.write(f"{campaign}\n")
    try:
        tally = run_campaign(campaign, options.directory, show)
    except ViolationError as violation:
        sys.stderr.write(f"VIOLATION: {violation}\n")
        return 1
    sys.stdout.write(f"{report(campaign, tally)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
