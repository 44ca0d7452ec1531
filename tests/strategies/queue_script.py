"""A script: asynchronous saves through Megatron-Core's own queue, its worker forked or spawned.

What the queue asks of CUDA is answered for a CPU at the top level, since its spawned worker runs
this file again, as a module.

    python queue_script.py DIRECTORY megatron PORT
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from torch import multiprocessing

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.strategies.zarr import Format2SaveShardedStrategy, ZarrSaveShardedStrategy

NUM_RANKS = 2
ROWS = 50_000

STAND_INS: dict[str, Any] = {
    "synchronize": lambda _device=None: None,
    "current_device": lambda: torch.device("cpu"),
    "device_count": lambda: 1,
    "set_device": lambda _device: None,
}
for name, stand_in in STAND_INS.items():
    setattr(torch.cuda, name, stand_in)


def main(rank: int, directory: str, port: int) -> None:
    """One rank: for each kind of queue and format a save that succeeds and one that fails."""
    os.environ["DIST_CKPT_TIMEOUT_S"] = "60"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=NUM_RANKS)
    dist_ckpt_strategies.register()
    use_tensorstore(Path(directory))
    for is_persistent in (False, True):
        use_queue(rank, AsyncCallsQueue(is_persistent), Path(directory) / f"{is_persistent}")
    dist.barrier()
    dist.destroy_process_group()


def use_queue(rank: int, queue: Any, directory: Path) -> None:
    strategies = {"1": ZarrSaveShardedStrategy, "2": Format2SaveShardedStrategy}
    for name, strategy in strategies.items():
        require_saved(rank, queue, strategy(), directory / name)
    wrapped = FullyParallelSaveStrategyWrapper(Format2SaveShardedStrategy(), dist.group.WORLD)
    require_saved(rank, queue, wrapped, directory / "wrapped")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    for name, strategy in strategies.items():
        root = directory / f"refused {name}"
        schedule(queue, strategy(), root, state(rank, 1.0))
        with pytest.raises(StorageError, match=r"^rank 1: "):
            queue.maybe_finalize_async_calls(blocking=True)
        assert not (root / "metadata.json").exists()
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    queue.close(abort=True)


def state(rank: int, value: float) -> dict[str, Any]:
    tensor = torch.full((ROWS,), value + rank)
    return {
        "w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, NUM_RANKS)),
        "b": ShardedTensor.from_rank_offsets("b", torch.full((7,), value), replica_id=rank),
    }


def use_tensorstore(root: Path) -> None:
    """Load through TensorStore, in the process that the queue forks."""
    dist_ckpt_strategies.save(state(dist.get_rank(), 0.0), root / "warm", ("zarr", 1))
    dist_checkpointing.load(state(dist.get_rank(), 0.0), str(root / "warm"))


def schedule(queue: Any, strategy: Any, root: Path, wanted: dict[str, Any]) -> Any:
    if dist.get_rank() == 0:
        root.mkdir(parents=True)
    dist.barrier()
    request = dist_checkpointing.save(wanted, str(root), strategy, async_sharded_save=True)
    return queue.schedule_async_request(request)


def require_saved(rank: int, queue: Any, strategy: Any, root: Path) -> None:
    """What was saved is loaded, although it was overwritten at once."""
    wanted = state(rank, 5.0)
    tensors = [value.data for value in wanted.values()]
    index = schedule(queue, strategy, root, wanted)
    for tensor in tensors:
        tensor.zero_()
    finalised: list[int] = []
    while not finalised:
        finalised = queue.maybe_finalize_async_calls()
        time.sleep(0.05)
    assert finalised == [index]
    loaded = dist_checkpointing.load(state(rank, 0.0), str(root))
    for name, expected in state(rank, 5.0).items():
        assert torch.equal(loaded[name], expected.data), root


if __name__ == "__main__":
    arguments = (sys.argv[1], int(sys.argv[3]))
    multiprocessing.spawn(main, args=arguments, nprocs=NUM_RANKS)  # type: ignore[attr-defined,no-untyped-call]
