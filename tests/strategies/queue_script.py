"""A script: asynchronous saves through a queue of each kind, with its worker forked or spawned.

What queues ask of CUDA is answered for a CPU at the top level, since a spawned worker runs this
file again, as a module. Local and global saves go through each queue.

    python queue_script.py DIRECTORY PORT megatron [nvrx]
"""

import itertools
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from torch import multiprocessing

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy

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

QUEUES = {
    "megatron": "megatron.core.dist_checkpointing.strategies.async_utils",
    "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
}


def main(rank: int, directory: Path, port: int, *owners: str) -> None:
    """One rank: for each kind of queue saves that succeed and saves that fail."""
    os.environ["DIST_CKPT_TIMEOUT_S"] = "60"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=NUM_RANKS)
    cliques = LazyCliqueReplicationStrategy(1, 2, timeout_s=40)
    dist_ckpt_strategies.register()
    use_tensorstore(directory)
    for owner, mode in itertools.product(owners, ("temporal", "persistent")):
        make = import_module(QUEUES[owner]).AsyncCallsQueue
        needs_gpu = "cpu_shm_mode" in signature(make.__init__).parameters  # NVRx from 0.6 on
        later = {"cpu_shm_mode": True} if needs_gpu else {}
        queue = make(persistent=mode == "persistent", **later)
        place = directory / owner / mode
        use_queue(rank, queue, place)
        node = place / f"node{rank}"
        save_twice(rank, LocalCheckpointManager(node, repl_strategy=cliques, timeout_s=40), queue)
        queue.close()
    dist.barrier()
    dist.destroy_process_group()


def require_finalised(queue: Any, index: int) -> None:
    """Wait until the queue has finalised one save, and says so: NVRx by 0, whatever its index."""
    found: list[int] = []
    while not found:
        found = queue.maybe_finalize_async_calls()
        time.sleep(0.05)
    assert found == [0 if "nvidia" in type(queue).__module__ else index]


@contextmanager
def small_files(rank: int) -> Iterator[None]:
    """Within the block rank 1 cannot write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_twice(rank: int, manager: Any, queue: Any) -> None:
    """Two saves through the queue, the second of which fails on rank 1."""
    weight = torch.full((1000,), float(rank))
    state = BasicTensorAwareStateDict({"w": weight})
    index = queue.schedule_async_request(manager.save(state, 1, is_async=True))
    weight.zero_()
    require_finalised(queue, index)
    assert manager.load()[0].state_dict["w"].unique().tolist() == [float(rank)]
    with small_files(rank):
        queue.schedule_async_request(manager.save(state, 2, is_async=True))
        with pytest.raises(StorageError, match=r"^rank 1: "):
            queue.maybe_finalize_async_calls(blocking=True)
    assert manager.find_latest() == 1
    left = {path.name[:12] for path in Path(manager.local_ckpt_dir).rglob("*.*")}
    assert left == {"iter_0000001"}


def use_queue(rank: int, queue: Any, directory: Path) -> None:
    strategies: dict[str, Any] = {
        "1": ZarrSaveShardedStrategy,
        "packs": PackSaveShardedStrategy,
    }
    for name, strategy in strategies.items():
        require_saved(rank, queue, strategy(), directory / name)
    for inner in (ZarrSaveShardedStrategy(), PackSaveShardedStrategy()):
        wrapped = FullyParallelSaveStrategyWrapper(inner, dist.group.WORLD)
        require_saved(rank, queue, wrapped, directory / f"wrapped {inner.backend}")
    with small_files(rank):
        for name, strategy in strategies.items():
            root = directory / f"refused {name}"
            schedule(queue, strategy(), root, state(rank, 1.0))
            with pytest.raises(StorageError, match=r"^rank 1: "):
                queue.maybe_finalize_async_calls(blocking=True)
            assert not (root / "metadata.json").exists()


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
    require_finalised(queue, index)
    loaded = dist_checkpointing.load(state(rank, 0.0), str(root))
    for name, expected in state(rank, 5.0).items():
        assert torch.equal(loaded[name], expected.data), root


if __name__ == "__main__":
    arguments = (Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    multiprocessing.start_processes(main, arguments, NUM_RANKS, start_method="fork")  # type: ignore[attr-defined,no-untyped-call]
