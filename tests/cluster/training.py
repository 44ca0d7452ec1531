"""The script of the cluster's jobs: recovers from memory, else from the disks of the nodes.

What a rank does it notes at once, in a file of its process: the time, what was done, the step and
the digest of the state. It has no state of its own beside a directory that all nodes share, and
``disk`` in its current directory, which is the node's.
"""

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.recovery_training import step
from dist_ckpt_strategies.inprocess import CheckpointlessAbortManager, HPCallWrapper, HPWrapper
from dist_ckpt_strategies.inprocess.train_utils import wait_rank
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.sharded_training import (
    ShardedTraining,
    from_local,
    make_groups,
    state_digest,
    to_global,
    to_local,
)

SHARED = Path(os.environ["CLUSTER_SHARED"])
SEED = int(os.environ["CLUSTER_SEED"])
NUM_SHARDS = int(os.environ["CLUSTER_SHARDS"])
SAVE_EVERY = int(os.environ["CLUSTER_SAVE_EVERY"])
MAX_IDLE = int(os.environ["CLUSTER_MAX_IDLE"]) or None
PACE_S = 0.2
TIMEOUT_S = 300.0
"""Of groups: no fault is found by it."""

manager = CheckpointManager(timeout_s=TIMEOUT_S)


class OrderedError(Exception):
    """The exception that a rank raises on SIGUSR1."""


@HPWrapper(
    abort=CheckpointlessAbortManager.get_default_checkpointless_abort(),
    checkpoint_manager=manager,
    max_idle_attempts=MAX_IDLE,
)
def train(note: Callable[..., None], orders: list[int], call: HPCallWrapper | None = None) -> None:
    dist.init_process_group("interruptible_gloo", timeout=timedelta(seconds=TIMEOUT_S))
    training = ShardedTraining(make_groups(NUM_SHARDS), seed=SEED)
    disk = local_checkpoints() if SAVE_EVERY else None
    source = "memory"
    if manager.try_checkpointless_load(training) is None:
        source = "begin"
        if disk is not None and disk.find_latest() != -1:
            source = "disk"
            from_local(training, disk.load()[0])
    manager.track(training, replica_group=training.groups.twins)
    note(source, training)
    while not has_ended(training.step):
        if disk is not None and training.step and training.step % SAVE_EVERY == 0:
            disk.save(to_local(training), training.step)
            save_globally(training)
            note("save", training)
        step(training, manager)
        note("step", training)
        if orders:
            orders.clear()
            raise OrderedError("as ordered")
        time.sleep(PACE_S)


def local_checkpoints() -> Any:
    """On the disk of the node, copied to that of another; loaded with it is Megatron-Core."""
    from dist_ckpt_strategies.local import (  # noqa: PLC0415
        CliqueReplicationStrategy,
        LocalCheckpointManager,
    )

    cliques = CliqueReplicationStrategy.from_replication_params(
        NUM_SHARDS, allow_uneven=True, timeout_s=TIMEOUT_S
    )
    return LocalCheckpointManager("disk", repl_strategy=cliques, keep=2, timeout_s=TIMEOUT_S)


def save_globally(training: ShardedTraining) -> None:
    """Into a directory of the step, which all nodes share; again where the step is done again."""
    import dist_ckpt_strategies  # noqa: PLC0415 - with Megatron-Core

    directory = SHARED / "global" / f"iter_{training.step:07d}"
    dist_ckpt_strategies.save(to_global(training), directory, ("safetensors", 1), overwrite=True)


def has_ended(step: int) -> bool:
    """All ranks say the same: the last step is written down well before it comes."""
    try:
        return step >= int((SHARED / "last_step").read_text())
    except FileNotFoundError:
        return False


def main() -> None:
    orders: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: orders.append(number))
    torch.set_num_threads(1)
    if SAVE_EVERY:
        import_module("dist_ckpt_strategies.local.manager")
        import_module("dist_ckpt_strategies.strategies.save")
        import_module("dist_ckpt_strategies.strategies.load")
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    me = f"{socket.gethostname()}.{boot_id}.{os.getpid()}"
    (SHARED / "ready" / me).touch()
    wait_rank()
    path = SHARED / "notes" / f"{os.environ['RANK']}.{me}"
    notes = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what: str, training: ShardedTraining) -> None:
        digest = state_digest(training)
        os.write(notes, f"{time.monotonic()} {what} {training.step} {digest}\n".encode())

    train(note, orders)


if __name__ == "__main__":
    main()
