"""A script: local saves through Megatron-Core's queue or NVRx's, with its worker forked or spawned.

What queues ask of CUDA is answered at the top level: a spawned worker runs this file as a module.

    python queue_script.py DIRECTORY megatron|nvrx PORT
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from importlib import import_module
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


QUEUES = {
    "megatron": "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
}


def say(rank: int, mode: str, text: str) -> None:
    """One line, in one piece."""
    os.write(1, f"{mode}, rank {rank}: {text}\n".encode())


def save_twice(rank: int, manager: Any, owner: str, mode: str, queue: Any) -> None:
    """Two saves through the queue, the second of which fails on rank 1.

    NVRx's queue gets the first request as it is, and the second in its own class.
    """
    from dist_ckpt_strategies.errors import StorageError  # noqa: PLC0415
    from dist_ckpt_strategies.local import BasicTensorAwareStateDict  # noqa: PLC0415

    weight = torch.full((1000,), float(rank))
    state = BasicTensorAwareStateDict({"w": weight})
    index = queue.schedule_async_request(manager.save(state, 1, is_async=True))
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
    request = manager.save(state, 2, is_async=True)
    queue.schedule_async_request(request if owner == "megatron" else request.for_nvrx())
    try:
        queue.maybe_finalize_async_calls(blocking=True)
    except StorageError as error:
        say(rank, mode, f"refused: {error}")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert manager.find_latest() == 1
    left = {path.name[:12] for path in Path(manager.local_ckpt_dir).rglob("*.*")}
    assert left == {"iter_0000001"}


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
        queue = import_module(QUEUES[owner]).AsyncCallsQueue(persistent=mode == "persistent")
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
