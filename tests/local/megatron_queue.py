"""A script: local saves through Megatron-Core's own queue, with its worker forked or spawned.

What the queue asks of CUDA is answered for a CPU at the top level, since its spawned worker runs
this file again, as a module.

    python megatron_queue.py DIRECTORY temporal|persistent PORT RANK
"""

# ruff: noqa: E402

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch

# Megatron-Core decorates with it, and compiles nothing here: half of the time its import takes.
vars(torch)["compile"] = lambda model: model
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
)

NUM_RANKS = 2

STAND_INS: dict[str, Any] = {
    "synchronize": lambda _device=None: None,
    "current_device": lambda: torch.device("cpu"),
    "device_count": lambda: 1,
    "set_device": lambda _device: None,
}
for name, stand_in in STAND_INS.items():
    setattr(torch.cuda, name, stand_in)


def main(directory: str, mode: str, port: str, rank: int) -> None:
    """One rank: two saves through the queue, the second of which fails on rank 1."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    queue = AsyncCallsQueue(persistent=mode == "persistent")
    root = Path(directory) / f"node{rank}"
    manager = LocalCheckpointManager(
        root, repl_strategy=LazyCliqueReplicationStrategy(1, 2, timeout_s=40), timeout_s=40
    )
    weight = torch.full((1000,), float(rank))
    request = manager.save(BasicTensorAwareStateDict({"w": weight}), 1, is_async=True)
    index = queue.schedule_async_request(request)
    weight.zero_()
    finalised: list[int] = []
    while not finalised:
        finalised = queue.maybe_finalize_async_calls()
        time.sleep(0.05)
    found = manager.load()[0].state_dict["w"]
    sys.stdout.write(
        f"rank {rank}: finalised {finalised == [index]}, w {found.unique().tolist()}\n"
    )
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    request = manager.save(BasicTensorAwareStateDict({"w": weight}), 2, is_async=True)
    queue.schedule_async_request(request)
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except StorageError as error:
        sys.stdout.write(f"rank {rank}: refused: {error}\n")
    queue.close(abort=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
