"""What Megatron-Core <= 0.15 itself saves and loads. Runs in its own environment, without ours.

    python old_megatron.py load CHECKPOINT EXPECTED     compare, print differences as JSON
    python old_megatron.py save CHECKPOINT EXPECTED RANK SIZE MEETING_FILE

The environment holds 0.15.3; PYTHONPATH puts an older release before it, which saves only.
It runs on the CPU: the old backend calls ``torch.cuda.synchronize``, which does nothing here.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

torch.cuda.synchronize = lambda *_: None

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.strategies.tensorstore import (  # noqa: E402
    TensorStoreLoadShardedStrategy,
)
from megatron.core.dist_checkpointing.strategies.zarr import (  # noqa: E402
    ZarrLoadShardedStrategy,
    ZarrSaveShardedStrategy,
)

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(one, other):
    """Equal shape, dtype and bytes; old bfloat16 goes through float32, which keeps all but NaNs."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    one, other = one.contiguous(), other.contiguous()
    return torch.equal(one.view(BITS[one.element_size()]), other.view(BITS[one.element_size()]))


def views(key, tensor):
    """Ways to ask for an array: whole, in halves along its last dim, in layers.

    Name, ShardedTensor, and what has to come back, of each.
    """
    make = ShardedTensor.from_rank_offsets
    yield "whole", make(key, torch.empty_like(tensor)), tensor
    if tensor.ndim and tensor.shape[-1] % 2 == 0:
        for n, half in enumerate(tensor.chunk(2, -1)):
            yield f"half {n}", make(key, torch.empty_like(half), (tensor.ndim - 1, n, 2)), half
    if tensor.ndim > 1:
        layer, place = torch.empty_like(tensor[0]), (0, 0, tensor.shape[0])
        yield "layer", make(key, layer, place, prepend_axis_num=1), tensor[0]


def load(checkpoint, expected):
    """Load everything with both old loaders; what differs."""
    tensors, objects, common = torch.load(expected, weights_only=False)
    wrong = []
    for strategy in (ZarrLoadShardedStrategy(), TensorStoreLoadShardedStrategy()):
        found = [(key, *view) for key, tensor in tensors.items() for view in views(key, tensor)]
        shards = [(key, n, one) for key, grid in objects.items() for n, one in enumerate(grid)]
        wanted = {f"{key}, {name}": sharded for key, name, sharded, _ in found}
        for key, n, _ in shards:
            wanted[f"object {key} {n}"] = ShardedObject(key, None, (len(objects[key]),), (n,))
        got = dist_checkpointing.load(
            wanted, checkpoint, sharded_strategy=strategy, validate_access_integrity=False
        )
        names = [
            f"{key}, {name}"
            for key, name, _, right in found
            if not same(got[f"{key}, {name}"], right)
        ]
        names += [f"object {key} {n}" for key, n, one in shards if got[f"object {key} {n}"] != one]
        names += [f"common {key}" for key in common if got.get(key) != common[key]]
        wrong += [f"{type(strategy).__name__}: {name}" for name in names]
    metadata = dist_checkpointing.load_tensors_metadata(checkpoint, ZarrLoadShardedStrategy())
    flat = {key for key in tensors if "/" not in key}
    if not flat <= set(metadata):
        wrong.append(f"not in the metadata: {sorted(flat - set(metadata))}")
    return {"arrays": len(tensors), "wrong": wrong}


def values(shape, dtype, seed):
    """Random bytes as elements; floats without NaNs, which the old writer changed for bfloat16."""
    rng = np.random.default_rng(seed)
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, shape).astype(bool))
    if dtype.is_floating_point or dtype.is_complex:
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    return torch.from_numpy(rng.integers(0, 100, shape)).to(dtype)


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.float32, torch.float64, torch.bfloat16]
DTYPES += [torch.complex64, torch.complex128]


def flat_share(key, whole, rank, size):
    """A rank's run of the elements of a tensor, as the distributed optimizer cut them."""
    per_rank = -(-whole.numel() // size)
    run = slice(rank * per_rank, min((rank + 1) * per_rank, whole.numel()))
    content = whole.reshape(-1)[run].clone()
    if hasattr(ShardedTensor, "from_rank_offsets_flat"):
        shape = tuple(whole.shape)
        return ShardedTensor.from_rank_offsets_flat(key, content, shape, flattened_range=run)
    regular = ShardedTensor.from_rank_offsets(key, whole)
    return replace(regular, data=content, flattened_range=run)


def save(checkpoint, expected, rank, size):
    """Save arrays of every dtype, cut in rows, columns, layers, replicated or flat; objects."""
    state, tensors = {}, {}
    for number, dtype in enumerate(DTYPES):
        name = str(dtype).removeprefix("torch.")
        for cut, shape in {
            "rows": (4 * size, 6),
            "columns": (5, 2 * size),
            "layers": (size, 3, 4),
        }.items():
            key = f"{name}.{cut}"
            whole = tensors[key] = values(shape, dtype, number)
            axis = 1 if cut == "columns" else 0
            mine = whole.chunk(size, axis)[rank].contiguous()
            if cut == "layers":
                state[key] = ShardedTensor.from_rank_offsets(
                    key, mine[0], (0, rank, size), prepend_axis_num=1
                )
            else:
                state[key] = ShardedTensor.from_rank_offsets(key, mine, (axis, rank, size))
        key = f"{name}.replicated"
        tensors[key] = values((3, 3), dtype, number)
        state[key] = ShardedTensor.from_rank_offsets(key, tensors[key], replica_id=rank)
    for dtype in (torch.float32, torch.bfloat16):
        key = f"optimizer.state.exp_avg.{str(dtype).removeprefix('torch.')}"
        whole = tensors[key] = values((5, 4), dtype, 99)
        state[key] = flat_share(key, whole, rank, size)
    objects = {
        "rng_state": [{"rank": n, "seed": n * 7} for n in range(size)],
        "grid": [[{"row": n, "column": m} for m in range(2)] for n in range(size)],
    }
    state["object"] = ShardedObject("rng_state", objects["rng_state"][rank], (size,), (rank,))
    for column, value in enumerate(objects["grid"][rank]):
        state[f"grid {column}"] = ShardedObject("grid", value, (size, 2), (rank, column))
    common = {"iteration": 12, "args": {"tp": 2, "names": ["a", "b"]}}
    state.update(common)
    if rank == 0:
        Path(checkpoint).mkdir()
        torch.save((tensors, objects, common), expected)
    dist.barrier()
    dist_checkpointing.save(state, checkpoint, ZarrSaveShardedStrategy("zarr", 1))
    return {"arrays": len(tensors), "wrong": []}


def main():
    """Meet the other ranks, carry out the command, print what came of it."""
    command, checkpoint, expected, *place = sys.argv[1:]
    rank, size, rendezvous = (
        (int(place[0]), int(place[1]), place[2]) if place else (0, 1, expected + ".rendezvous")
    )
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    result = (
        load(checkpoint, expected) if command == "load" else save(checkpoint, expected, rank, size)
    )
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
