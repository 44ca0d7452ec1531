"""Arrays of known content, cut between ranks: every rank can tell what it has to load."""

import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor

from tests.support.tensors import bits, noise

Shape = tuple[int, ...]

ALL_DTYPES = tuple(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank holds of an array; only replica 0 is written."""

    rank: int
    offset: Shape
    shape: Shape
    replica: int = 0

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Cut:
    """An array, and who holds what of it."""

    key: str  # of the array
    shape: Shape  # of the whole array, in elements
    dtype: torch.dtype  # of its elements
    parts: tuple[Part, ...]  # in the order in which ranks list them
    grid: Shape | None = None  # parts in each dim; None where they lie on no regular grid
    num_prepended: int = 0  # leading dims that the local tensors lack


@lru_cache(maxsize=64)
def whole(cut: Cut) -> torch.Tensor:
    """The array's content, to be read only: random bits by its key."""
    return noise(cut.shape, cut.dtype, zlib.crc32(cut.key.encode()))


def part_of(cut: Cut, part: Part) -> torch.Tensor:
    """The content of one part, without prepended dims, in memory of its own."""
    return whole(cut)[part.slices()].reshape(part.shape[cut.num_prepended :]).clone()


def sharded(cut: Cut, part: Part, data: torch.Tensor | None, **changes: Any) -> Any:
    return ShardedTensor(
        key=cut.key,
        data=data,
        dtype=changes.pop("dtype", cut.dtype),
        local_shape=part.shape[cut.num_prepended :],
        global_shape=cut.shape,
        global_offset=part.offset,
        axis_fragmentations=cut.grid,
        replica_id=part.replica,
        prepend_axis_num=cut.num_prepended,
        **changes,
    )


def held_by(rank: int, cuts: Iterable[Cut]) -> Iterator[tuple[str, Cut, Part]]:
    """Every part of a rank, under a name of its own for the state dict."""
    for cut in cuts:
        for number, part in enumerate(cut.parts):
            if part.rank == rank:
                yield f"{cut.key} #{number}", cut, part


def no_data(cut: Cut, part: Part) -> None:
    """Nothing to load into."""


def zeros(cut: Cut, part: Part) -> torch.Tensor:
    """A tensor to load into."""
    return torch.zeros(part.shape[cut.num_prepended :], dtype=cut.dtype)


def state_of(
    rank: int,
    cuts: Iterable[Cut],
    data: Callable[[Cut, Part], torch.Tensor | None] = part_of,
) -> dict[str, Any]:
    """The state dict of a rank, by default with the content that is to be saved."""
    return {name: sharded(cut, part, data(cut, part)) for name, cut, part in held_by(rank, cuts)}


def differences(
    rank: int,
    cuts: Iterable[Cut],
    loaded: Mapping[str, Any],
    data: Callable[[Cut, Part], torch.Tensor] = part_of,
) -> list[str]:
    """Names of the parts of a rank that did not come back bit for bit as ``data`` gives them."""
    return [
        name
        for name, cut, part in held_by(rank, cuts)
        if not same_bits(loaded[name], data(cut, part))
    ]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal; NaNs too."""
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def on_grid(  # noqa: PLR0913
    key: str,
    shape: Shape,
    grid: Shape,
    *,
    size: int = 4,
    dtype: torch.dtype = torch.float32,
    num_replicas: int = 1,
    num_prepended: int = 0,
) -> Cut:
    """The array in equal parts, dealt to ``size`` ranks in turn, each part to several of them."""
    lengths = tuple(n // g for n, g in zip(shape, grid, strict=True))
    cells = product(*map(range, grid))
    parts = [
        Part(
            (number + replica) % size,
            tuple(i * e for i, e in zip(cell, lengths, strict=True)),
            lengths,
            replica,
        )
        for number, cell in enumerate(cells)
        for replica in range(num_replicas)
    ]
    return Cut(key, shape, dtype, tuple(parts), grid, num_prepended)


def at_random(
    key: str,
    shape: Shape,
    num_parts: int,
    *,
    size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Cut:
    """The array in regions of all sizes, each with a random rank."""
    chance = random.Random(f"{key} {seed}")
    regions = [((0,) * len(shape), shape)]
    for _ in range(num_parts - 1):
        region = regions.pop(chance.randrange(len(regions)))
        regions.extend(_halves(region, chance))
    parts = [Part(chance.randrange(size), offset, length) for offset, length in sorted(regions)]
    return Cut(key, shape, dtype, tuple(parts))


def _halves(region: tuple[Shape, Shape], chance: random.Random) -> list[tuple[Shape, Shape]]:
    offset, shape = region
    dims = [dim for dim, length in enumerate(shape) if length > 1]
    if not dims:
        return [region]
    dim = chance.choice(dims)
    at = chance.randrange(1, shape[dim])
    below, above = _with(shape, dim, at), _with(shape, dim, shape[dim] - at)
    return [(offset, below), (_with(offset, dim, offset[dim] + at), above)]


def _with(numbers: Shape, dim: int, value: int) -> Shape:
    return (*numbers[:dim], value, *numbers[dim + 1 :])


def in_runs(key: str, ends: Sequence[int], *, size: int = 4) -> Cut:
    """A 1-D array cut at ``ends``, run by run to the ranks in order: a flat optimizer buffer."""
    starts = [0, *ends[:-1]]
    per_rank = -(-len(ends) // size)
    parts = [
        Part(number // per_rank, (a,), (b - a,))
        for number, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]
    return Cut(key, (ends[-1],), torch.float32, tuple(parts))


def replicated(cut: Cut, *, size: int = 4) -> Cut:
    """The same cut, every part on every rank; what was there stays the main replica."""
    parts = [
        replace(part, rank=(part.rank + turn) % size, replica=turn)
        for part in cut.parts
        for turn in range(size)
    ]
    return replace(cut, parts=tuple(parts))
