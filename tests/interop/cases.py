"""State dicts that both sides understand: arrays, how ranks cut them, objects, common state."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)
"""What Megatron-Core 0.15.3 could store."""

Shard = dict[str, Any]
Cut = tuple[int, int, int]
"""Axis, number of the share, number of shares."""


@dataclass(frozen=True)
class Case:
    """Whole values, and the shards of each rank."""

    size: int
    tensors: dict[str, torch.Tensor]
    layout: list[list[Shard]]
    objects: dict[str, Any] = field(default_factory=dict)
    object_layout: list[list[Shard]] = field(default_factory=list)
    common: dict[str, Any] = field(default_factory=dict)

    def without(self, key: str) -> Case:
        """The same without one array."""
        return replace(self, tensors={k: t for k, t in self.tensors.items() if k != key})

    def job(self, action: str, **more: Any) -> dict[str, Any]:
        """The description that goes to the other environment."""
        arrays = {
            key: {"shape": list(whole.shape), "dtype": str(whole.dtype).removeprefix("torch.")}
            for key, whole in self.tensors.items()
        }
        return {
            "action": action,
            "size": self.size,
            "timeout_s": 90.0,
            "arrays": arrays,
            "layout": self.layout,
            "objects": self.object_layout or [[] for _ in range(self.size)],
            **more,
        }


def random_values(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Values of every kind: random bits, and for floats also zeros of both signs and infinities.

    Without not-a-numbers of bfloat16, whose payload 0.15.3 did not keep.
    """
    generator = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        return (bits % 2).to(torch.bool).reshape(tuple(shape))
    found = bits.view(dtype).clone()
    if dtype.is_floating_point:
        special = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-40], dtype=dtype)
        num_special = min(special.numel(), found.numel())
        found[:num_special] = special[:num_special]
    if dtype == torch.bfloat16:
        found[found.isnan()] = 1.5
    return found.reshape(tuple(shape))


def share(key: str, whole: torch.Tensor, *cuts: Cut, replica: int = 0, prepend: int = 0) -> Shard:
    """A rank's regular share of an array."""
    shape, offset, fragments = list(whole.shape), [0] * whole.ndim, [1] * whole.ndim
    for axis, number, num_shares in cuts:
        shape[axis] //= num_shares
        offset[axis] = number * shape[axis]
        fragments[axis] = num_shares
    return {
        "key": key,
        "local_shape": shape[prepend:],
        "offset": offset,
        "fragments": fragments,
        "replica_id": [0, 0, replica],
        "prepend_axis_num": prepend,
    }


def box(key: str, offset: Sequence[int], shape: Sequence[int]) -> Shard:
    """A rank's box of an array, on no grid."""
    return {
        "key": key,
        "local_shape": list(shape),
        "offset": list(offset),
        "fragments": None,
        "replica_id": [0, 0, 0],
        "prepend_axis_num": 0,
    }


def regular_tensors() -> dict[str, torch.Tensor]:
    """An array of every dtype, and arrays of the shapes that models have."""
    found = {
        f"dtypes.{str(dtype).removeprefix('torch.')}": random_values(dtype, (8, 6), seed)
        for seed, dtype in enumerate(DTYPES)
    }
    shapes = {
        "rows.weight": (16, 3),
        "columns.weight": (5, 12),
        "one.bias": (12,),
        "decoder.layers.weight": (8, 4, 10),
        "decoder.layers.norm": (8, 6),
        "replicated.weight": (7, 5),
        "tensor_parallel.weight": (4, 9),
        "size_one.weight": (1, 1, 4),
        "group/inner.weight": (4, 4),
    }
    for seed, (key, shape) in enumerate(shapes.items(), start=100):
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        found[key] = random_values(dtype, shape, seed)
    found["zeros.weight"] = torch.zeros(8, 4)
    return found


def at_tp2_pp2(tensors: dict[str, torch.Tensor], rank: int) -> Iterator[Shard]:
    """The shards of one of four ranks: tensor-parallel 2, pipeline-parallel 2."""
    tp, pp = rank % 2, rank // 2
    for key, whole in tensors.items():
        if key.startswith("dtypes."):
            yield share(key, whole, (0, tp, 2), (1, pp, 2))
        elif key.startswith("decoder.layers."):
            num_layers = whole.shape[0]
            cut = [(1, tp, 2)] if whole.ndim > 2 else []
            for layer in range(pp * num_layers // 2, (pp + 1) * num_layers // 2):
                replica = 0 if cut else tp
                at_layer = (0, layer, num_layers)
                yield share(key, whole, at_layer, *cut, replica=replica, prepend=1)
        elif key.startswith(("replicated.", "size_one.")):
            yield share(key, whole, replica=rank)
        elif key.startswith("tensor_parallel."):
            yield share(key, whole, (0, tp, 2), replica=pp)
        else:
            yield share(key, whole, (1 if key.startswith("columns.") else 0, rank, 4))


def at_tp2(tensors: dict[str, torch.Tensor], rank: int) -> Iterator[Shard]:
    """The shards of one of two ranks, cut along the last axis that divides."""
    for key, whole in tensors.items():
        axes = [axis for axis in reversed(range(whole.ndim)) if whole.shape[axis] % 2 == 0]
        if axes:
            yield share(key, whole, (axes[0], rank, 2))
        else:
            yield share(key, whole, replica=rank)


def rng_state(rank: int, size: int) -> Shard:
    """A rank's own object."""
    return {"key": "rng_state", "shape": [1, size], "offset": [0, rank], "replica_id": [0]}


def shared_object(rank: int) -> Shard:
    """The object that all ranks share."""
    return {"key": "shared._extra_state", "shape": [1], "offset": [0], "replica_id": [rank]}


def object_values(size: int) -> dict[str, Any]:
    """Values of the shared object and of each rank's own."""
    values: dict[str, Any] = {"shared._extra_state/shard_0_1": {"bytes": b"\x00state\xff"}}
    for rank in range(size):
        values[f"rng_state/shard_0.{rank}_1.{size}"] = [
            {"rank": rank, "state": torch.arange(rank, rank + 5), "text": "é", "none": None}
        ]
    return values


def common_state() -> dict[str, Any]:
    """State like a Megatron-LM run's."""
    return {
        "iteration": 7,
        "checkpoint_version": 3.0,
        "args": Namespace(tensor_model_parallel_size=2, attention_backend=AttnBackend.flash),
        "scheduler": {"max_lr": 1e-3, "steps": [1, 2, (3, None)]},
        "step": torch.tensor(3.0),
        "note": "été",
    }


def regular_case() -> Case:
    """Everything that both versions can save, on four ranks."""
    tensors = regular_tensors()
    layout = [list(at_tp2_pp2(tensors, rank)) for rank in range(4)]
    objects = [[shared_object(rank), rng_state(rank, 4)] for rank in range(4)]
    return Case(4, tensors, layout, object_values(4), objects, common_state())


def resharded(case: Case) -> Case:
    """The same values on two ranks, cut along other axes; each takes over objects of two."""
    layout = [list(at_tp2(case.tensors, rank)) for rank in range(2)]
    objects = [
        [shared_object(rank), rng_state(2 * rank, 4), rng_state(2 * rank + 1, 4)]
        for rank in range(2)
    ]
    return replace(case, size=2, layout=layout, object_layout=objects)


def irregular_case() -> Case:
    """Shards on no grid, which only we can save; some ranks hold none, or several."""
    tensors = {
        "uneven.weight": random_values(torch.float32, (16, 4), 1),
        "blocks.weight": random_values(torch.bfloat16, (10, 10), 2),
        "buffer": random_values(torch.float32, (1000,), 3),
        "lonely.bias": random_values(torch.int64, (9,), 4),
    }
    layout = [
        [
            box("uneven.weight", (0, 0), (1, 4)),
            box("blocks.weight", (0, 0), (10, 3)),
            box("buffer", (0,), (1,)),
            box("buffer", (501,), (99,)),
        ],
        [
            box("uneven.weight", (1, 0), (5, 4)),
            box("blocks.weight", (0, 3), (4, 7)),
            box("buffer", (1,), (500,)),
        ],
        [
            box("uneven.weight", (6, 0), (7, 4)),
            box("blocks.weight", (4, 3), (6, 7)),
            box("buffer", (600,), (400,)),
            box("lonely.bias", (0,), (9,)),
        ],
        [box("uneven.weight", (13, 0), (3, 4))],
    ]
    return Case(4, tensors, layout)
