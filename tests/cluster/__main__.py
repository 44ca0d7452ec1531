"""``python -m tests.cluster --seed 7``: random faults of a job, one after the other.

Each is drawn from the seed and its number alone: ``--seed 7 --only 12`` does the twelfth again.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

# torch looks up the name of every peer that a store's client connects to; see tests/conftest.py.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from tests.cluster import faults
from tests.cluster.job import STORE, Job, Shape
from tests.cluster.namespaces import Cluster, why_not


def main() -> int:
    """0 if nothing happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="do this fault alone")
    parser.add_argument("--kind", action="append", choices=list(faults.ALL), help="default: all")
    parser.add_argument("--save-every", type=int, default=0, help="steps between checkpoints")
    options = parser.parse_args()
    if why_not():
        sys.exit(why_not())
    with tempfile.TemporaryDirectory() as directory:
        return campaign(Path(directory), options)


def campaign(directory: Path, options: argparse.Namespace) -> int:
    """0 if nothing happened that must not; raises otherwise."""
    shape = Shape(num_nodes=4, num_shards=4, save_every=options.save_every)
    names = [f"n{number}" for number in range(shape.num_nodes + shape.num_spare_nodes)]
    seconds: dict[str, list[float]] = {}
    say(f"seed {options.seed}, {shape}")
    with Cluster(directory, [STORE, *names]) as cluster:
        job = Job(cluster, shape)
        began = time.monotonic()
        job.start(STORE, *names)
        job.go_on(began)
        job.await_spares()
        numbers = range(1, options.faults + 1) if options.only is None else [options.only]
        for number in numbers:
            draw = random.Random(f"{options.seed}/{number}")
            kind = draw.choice(options.kind or list(faults.ALL))
            say(f"{time.monotonic() - began:7.1f} s  {number}/{numbers[-1]}: {kind}")
            took = faults.happen(job, faults.ALL[kind], draw)
            seconds.setdefault(kind, []).append(took)
            say(f"  the next step came after {took:.2f} s; all are at step {job.step()}")
        codes = job.finish()
        job.require_right()
        if shape.save_every:
            say(f"{job.require_whole_checkpoints()} checkpoints are whole")
        if any(codes.values()):
            say(job.report())
    medians = {kind: round(statistics.median(found), 2) for kind, found in seconds.items()}
    counts = {kind: len(found) for kind, found in seconds.items()}
    say(json.dumps({"faults": counts, "median_s": medians, "exit codes": codes}))
    return int(any(codes.values()))


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
