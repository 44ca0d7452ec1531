"""What both sides save and load: arrays of every dtype that old releases know, objects, the rest.

Neither this nor what it imports needs this package: the old side has none.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from tests.support.sharding import Cut, Part, Shape, on_grid

VERSIONS = ("0.3.0", "0.5.0", "0.9.0", "0.11.0", "0.14.0")
"""Releases that wrote old checkpoints, beside 0.15.3."""

COMMON = {"iteration": 7, "args": {"tensor_model_parallel_size": 2, "names": ["a", "b"]}}
_DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
_DTYPES += [torch.float16, torch.float32, torch.float64, torch.bfloat16]
_DTYPES += [torch.complex64, torch.complex128]


def cuts(size: int) -> list[Cut]:
    """Rows, columns, stacked layers and replicas of every dtype."""
    found = []
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        found += [
            on_grid(f"rows.{name}", (8, 6), (size, 1), size=size, dtype=dtype),
            on_grid(f"columns.{name}", (5, 8), (1, size), size=size, dtype=dtype),
            on_grid(
                f"layers.{name}", (4, 3, 4), (4, 1, 1), size=size, dtype=dtype, num_prepended=1
            ),
            on_grid(f"replicated.{name}", (3, 5), (1, 1), dtype=dtype, num_replicas=size),
        ]
    return found


def flat_cuts() -> list[Cut]:
    """What old distributed optimizers cut into runs of elements; here on one rank."""
    return [
        on_grid(f"optimizer.state.exp_avg.{name}", (5, 4), (1, 1), dtype=getattr(torch, name))
        for name in ("float32", "bfloat16")
    ]


def zeros_alone() -> list[Cut]:
    """Chunks that a Zarr writer may leave out; ours does not."""
    return [on_grid("zeros", (8, 4), (4, 1))]


def recut(cuts: Iterable[Cut], grid_of: Callable[[Shape], Shape], **options: Any) -> list[Cut]:
    """The same arrays, each cut as a function of its shape says."""
    return [on_grid(c.key, c.shape, grid_of(c.shape), dtype=c.dtype, **options) for c in cuts]


def as_whole(shape: Shape) -> Shape:
    return (1,) * len(shape)


def part_of(cut: Cut, part: Part) -> torch.Tensor:
    """The content of a part, without NaNs, which the old loader changes for bfloat16."""
    numbers = torch.arange(torch.Size(cut.shape).numel()).reshape(cut.shape)
    if cut.key == "zeros":
        numbers = numbers * 0
    elif cut.dtype is torch.bool:
        numbers = numbers % 3 == 0
    else:
        numbers = numbers % 251 - 100 * cut.dtype.is_signed
    if cut.dtype.is_floating_point or cut.dtype.is_complex:
        numbers = numbers.double() / 7
    whole = numbers.to(cut.dtype)
    return whole[part.slices()].reshape(part.shape[cut.num_prepended :]).clone()


def objects_of(
    owner: int, size: int, *, is_filled: bool = True, replica: int = 0
) -> dict[str, ShardedObject]:
    """One of a row of objects, and two of a grid."""
    row = ("rng_state", (size,), (owner,))
    places = [row, *(("grid", (size, 2), (owner, column)) for column in range(2))]
    return {
        f"{key} {offset}": ShardedObject(
            key, {"at": [*offset]} if is_filled else None, shape, offset, replica
        )
        for key, shape, offset in places
    }


def others_wrong(loaded: Mapping[str, Any], owners: Iterable[int], size: int) -> list[str]:
    """Names of the objects and common values that did not come back as they were."""
    objects = {name: o.data for owner in owners for name, o in objects_of(owner, size).items()}
    return [name for name, value in (COMMON | objects).items() if loaded.get(name) != value]
