"""Random faults of a job on a cluster; ``python -m tests.faults`` runs them."""

import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster import faults
from tests.cluster.job import STORE, Job, Shape
from tests.cluster.namespaces import Cluster


def run_node_faults(
    seed: int, num_faults: int, save_every: int, directory: Path, watch: Callable[[str], None]
) -> dict[str, list[float]]:
    """Seconds until all ranks went on, by kind of fault; a fault depends on seed and number.

    Raises:
        AssertionError: a state or a checkpoint is wrong, two processes were one rank, or an agent
            failed.
        TimeoutError: the job hangs.
    """
    shape = Shape(num_nodes=4, num_shards=4, save_every=save_every)
    names = [f"n{number}" for number in range(shape.num_nodes + shape.num_spare_nodes)]
    seconds: dict[str, list[float]] = {}
    with Cluster(directory, [STORE, *names]) as cluster:
        job = Job(cluster, shape)
        began = time.monotonic()
        job.start(STORE, *names)
        job.go_on(began)
        job.await_spares()
        for number in range(1, num_faults + 1):
            draw = random.Random(f"{seed}/{number}")
            kind = draw.choice(list(faults.ALL))
            watch(f"node fault {number}: {kind}")
            seconds.setdefault(kind, []).append(faults.happen(job, faults.ALL[kind], draw))
        codes = job.finish()
        job.require_right()
        if save_every:
            watch(f"{job.require_whole_checkpoints()} checkpoints are whole")
        assert not any(codes.values()), f"exit codes {codes}: {job.report()}"
    return seconds
