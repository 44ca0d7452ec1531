"""A script: local saves through Megatron-Core's queue or NVRx's, with its worker forked or spawned.

What the queues ask of CUDA is answered for a CPU at the top level, since a spawned worker runs this
file again, as a module.

    python queue_script.py DIRECTORY megatron|nvrx PORT
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NUM_RANKS = 2

STAND_INS: dict[str, Any] = {
    "synchronize": lambda _device=None: None,
    "current_device": lambda: torch.device("cpu"),
    "device_count": lambda: 1,
    "set_device": lambda _device: None,
}
for name, stand_in in STAND_INS.items():
    setattr(torch.cuda, name, stand_in)


def say(rank: int, mode: str, text: str) -> None:
    """One line, in one piece."""
    os.write(1, f"{mode}, rank {rank}: {text}\n".encode())


def queue_class(owner: str) -> Any:
    """The queue of Megatron-Core, or NVRx's."""
    if owner == "megatron":
        from megatron.core.dist_checkpointing.strategies import async_utils  # noqa: PLC0415

        return async_utils.AsyncCallsQueue
    from nvidia_resiliency_ext.checkpointing.async_ckpt import core  # noqa: PLC0415

    return core.AsyncCallsQueue


def saved(manager: Any, value: torch.Tensor, iteration: int) -> Any:
    """The request of a save."""
    from dist_ckpt_strategies.local import BasicTensorAwareStateDict  # noqa: PLC0415

    return manager.save(BasicTensorAwareStateDict({"w": value}), iteration, is_async=True)


def save_twice(rank: int, manager: Any, owner: str, mode: str, queue: Any) -> None:
    """Two saves through the queue, the second of which fails on rank 1.

    NVRx's queue gets the first request as it is, and the second in its own class.
    """
    from dist_ckpt_strategies.errors import StorageError  # noqa: PLC0415

    weight = torch.full((1000,), float(rank))
    index = queue.schedule_async_request(saved(manager, weight, 1))
    weight.zero_()
    finalised: list[int] = []
    while not finalised:
        finalised = queue.maybe_finalize_async_calls()
        time.sleep(0.05)
    found = manager.load()[0].state_dict["w"]
    say(rank, mode, f"finalised {finalised == [index]}, w {found.unique().tolist()}")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    request = saved(manager, weight, 2)
    queue.schedule_async_request(request if owner == "megatron" else request.for_nvrx())
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except StorageError as error:
        say(rank, mode, f"refused: {error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def main(rank: int, directory: str, owner: str, port: int) -> None:
    """One rank."""
    from dist_ckpt_strategies.local import (  # noqa: PLC0415
        LazyCliqueReplicationStrategy,
        LocalCheckpointManager,
    )

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    cliques = LazyCliqueReplicationStrategy(1, 2, timeout_s=40)
    for mode in ("temporal", "persistent"):
        root = Path(directory) / mode / f"node{rank}"
        manager = LocalCheckpointManager(root, repl_strategy=cliques, timeout_s=40)
        queue = queue_class(owner)(persistent=mode == "persistent")
        save_twice(rank, manager, owner, mode, queue)
        queue.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=main, args=(rank, *sys.argv[1:3], int(sys.argv[3])))
        for rank in range(NUM_RANKS)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    sys.exit(sum(bool(one.exitcode) for one in ranks))
