"""What Megatron-Core <= 0.15 itself saves and loads. Runs in its own environment, without ours.

    python old_megatron.py load CHECKPOINT            compare, print what differs as JSON
    python old_megatron.py save CHECKPOINT SIZE

The environment holds 0.15.3; PYTHONPATH puts an older release before it, which saves only.
It runs on the CPU: the old backend calls ``torch.cuda.synchronize``, which does nothing here.
"""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

torch.cuda.synchronize = lambda *_: None

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing.strategies.tensorstore import (  # noqa: E402
    TensorStoreLoadShardedStrategy,
)
from megatron.core.dist_checkpointing.strategies.zarr import (  # noqa: E402
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)

from tests.interop.content import (  # noqa: E402
    COMMON,
    as_whole,
    cuts,
    flat_cuts,
    objects_of,
    others_wrong,
    part_of,
    recut,
    zeros_alone,
)
from tests.support.sharding import differences, sharded, state_of, zeros  # noqa: E402

SIZE = 4  # of the world whose checkpoints are loaded


def load(checkpoint):
    """Load everything with both old loaders: whole, in halves along the last dim, in layers."""
    saved = cuts(SIZE) + zeros_alone()
    even = [cut for cut in saved if cut.shape[-1] % 2 == 0]
    stacked = [cut for cut in saved if len(cut.shape) > 1]
    views = {
        "whole": recut(saved, as_whole, size=1),
        "halves": recut(even, lambda shape: (*as_whole(shape[1:]), 2), size=1),
        "layers": recut(stacked, lambda s: (s[0], *as_whole(s[1:])), size=1, num_prepended=1),
    }
    wrong = []
    for strategy in (ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy()):
        wanted = {name: state_of(0, view, zeros) for name, view in views.items()}
        for owner in range(SIZE):
            wanted |= objects_of(owner, SIZE, is_filled=False)
        got = dist_checkpointing.load(
            wanted, checkpoint, sharded_strategy=strategy, validate_access_integrity=False
        )
        names = others_wrong(got, range(SIZE), SIZE)
        for name, view in views.items():
            names += [f"{name}: {one}" for one in differences(0, view, got[name], part_of)]
        wrong += [f"{type(strategy).__name__}: {name}" for name in names]
    metadata = dist_checkpointing.load_tensors_metadata(checkpoint, ZarrLoadShardedStrategy())
    return wrong + [f"not in the metadata: {c.key}" for c in saved if c.key not in metadata]


def save(rank, checkpoint, size):
    """Save what two sides know, and runs of elements."""
    state = state_of(rank, cuts(size), part_of) | objects_of(rank, size) | COMMON
    for cut in flat_cuts():
        (whole,) = cut.parts
        length = torch.Size(cut.shape).numel() // size
        run = slice(rank * length, (rank + 1) * length)
        content = part_of(cut, whole).reshape(-1)[run].clone()
        state[cut.key] = sharded(cut, whole, content, flattened_range=run)
    with world(rank, checkpoint, size):
        if rank == 0:
            Path(checkpoint).mkdir()
        dist.barrier()
        dist_checkpointing.save(state, checkpoint, ZarrSaveShardedStrategy("zarr", 1))


@contextmanager
def world(rank, checkpoint, size):
    """Meet the other ranks, and leave them."""
    address = f"file://{checkpoint}.{size}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    yield
    dist.barrier()
    dist.destroy_process_group()


def main():
    """Carry out the command, print what is wrong."""
    command, checkpoint, *size = sys.argv[1:]
    wrong = []
    if command == "save":
        args = (checkpoint, int(*size))
        start_processes(save, args, nprocs=args[1], start_method="fork")
    else:
        with world(0, checkpoint, 1):
            wrong = load(checkpoint)
    print(json.dumps(wrong))


if __name__ == "__main__":
    main()
