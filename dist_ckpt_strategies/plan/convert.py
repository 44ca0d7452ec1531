"""Decide how a checkpoint becomes one of another format: its files, and boxes that fit memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from types import MappingProxyType

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.plan.chunking import (
    fills_grid,
    irregular_chunk_shape,
    object_chunk_shape,
    regular_chunk_shape,
)
from dist_ckpt_strategies.plan.coverage import Holding, require_partition
from dist_ckpt_strategies.plan.inner_chunks import cut_chunk
from dist_ckpt_strategies.plan.keys import require_storable_keys
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.conversion import Format, Part, SourceArray, Unit
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent, Region

ChunkName = Callable[[ArraySpec, Extent], str]
"""Gives the file of a chunk, below the target's directory."""

SAFETENSORS_DTYPES: Mapping[DType, str] = MappingProxyType(
    {
        DType.BOOL: "BOOL",
        DType.UINT8: "U8",
        DType.UINT16: "U16",
        DType.UINT32: "U32",
        DType.UINT64: "U64",
        DType.INT8: "I8",
        DType.INT16: "I16",
        DType.INT32: "I32",
        DType.INT64: "I64",
        DType.FLOAT16: "F16",
        DType.FLOAT32: "F32",
        DType.FLOAT64: "F64",
        DType.BFLOAT16: "BF16",
        DType.COMPLEX64: "C64",
        DType.FLOAT8_E4M3FN: "F8_E4M3",
        DType.FLOAT8_E5M2: "F8_E5M2",
        DType.FLOAT8_E8M0FNU: "F8_E8M0",
    }
)
"""The dtypes that safetensors has, under the names that it gives them."""


@dataclass(frozen=True, slots=True)
class ConvertLimits:
    """How much is handled at once.

    Attributes:
        box_nbytes: of one box in memory; each thread holds up to four times as much.
        file_nbytes: wanted size of a file that holds several arrays; an array that is larger has
            one of its own.
        noted_nbytes: after so many bytes what is done is made durable, and noted as done.
        object_nbytes: no chunk is larger, where a chunk is an object of a store; None for any.
    """

    box_nbytes: int
    file_nbytes: int
    noted_nbytes: int = 1 << 30
    object_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """The arrays of the target, and what is written one after the other.

    Attributes:
        target: its format.
        arrays: as the target has them, sorted by key.
        units: of all files.
        limits: what bounds them.
    """

    target: Format
    arrays: tuple[ArraySpec, ...]
    units: tuple[Unit, ...]
    limits: ConvertLimits

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(array.nbytes for array in self.arrays)


def build_convert_plan(
    sources: Sequence[SourceArray],
    target: Format,
    limits: ConvertLimits,
    renames: Mapping[str, str],
    object_keys: Sequence[str] = (),
    *,
    chunk_name: ChunkName = lambda array, index: f"{array.key}/{array.chunk_name(index)}",
) -> ConvertPlan:
    """Choose chunks and files: the source's own grid, where it has one.

    Args:
        sources: all arrays that are converted.
        target: the format.
        limits: bounds on boxes and files.
        renames: other keys in the target, by those in the source.
        object_keys: of the objects that go there too, to find collisions.
        chunk_name: of the target, for formats that have a file for each chunk.

    Raises:
        CoverageError: the pieces of an array do not make it up.
        PlanError: the target cannot hold an array, or two arrays would have one key.
    """
    named = sorted(
        ((renames.get(source.key, source.key), source) for source in sources),
        key=lambda pair: pair[0],
    )
    _require_distinct([key for key, _ in named])
    if target is Format.ZARR1:
        require_storable_keys([key for key, _ in named], object_keys)
    made = [(source, _array_of(key, source, target, limits)) for key, source in named]
    if target is Format.TORCH_DIST:
        units = list(_piece_files(made, limits))
    elif target is Format.SAFETENSORS:
        units = list(_tensor_files(made, limits))
    else:
        units = [
            Unit(chunk_name(array, index), (_part(source, array, array.chunk_region(index)),))
            for source, array in made
            for index in array.chunk_indices()
        ]
    return ConvertPlan(target, tuple(array for _, array in made), tuple(units), limits)


def _require_distinct(keys: Sequence[str]) -> None:
    for one, other in pairwise(keys):
        if one == other:
            raise PlanError(f"{one}: two arrays of the source would have this key", key=one)


def _part(source: SourceArray, array: ArraySpec, region: Region) -> Part:
    return Part(source.key, array, region, source.grain)


def _array_of(key: str, source: SourceArray, target: Format, limits: ConvertLimits) -> ArraySpec:
    """The array with the target's chunk grid."""
    if target is Format.SAFETENSORS and source.dtype not in SAFETENSORS_DTYPES:
        known = ", ".join(dtype.value for dtype in SAFETENSORS_DTYPES)
        raise PlanError(
            f"{key}: safetensors has no {source.dtype.value}; it has {known}; leave the array out "
            "with --keys, or convert to another format",
            key=key,
        )
    chunk, is_regular = _grid_of(source)
    array = ArraySpec(key, source.shape, source.dtype, chunk)
    if target is not Format.ZARR2:
        return array
    itemsize, most = source.dtype.itemsize, limits.object_nbytes
    if most is not None and math.prod(chunk) * itemsize > most:
        chunk, is_regular = object_chunk_shape(chunk, itemsize, most), False
    cut = cut_chunk(chunk, source.shape, itemsize, is_movable=not is_regular)
    cut = cut or cut_chunk(chunk, source.shape, itemsize, is_movable=True)
    assert cut is not None  # noqa: S101 - where boundaries may move, every chunk can be cut
    return ArraySpec(key, source.shape, source.dtype, cut.chunk_shape, inner_shape=cut.inner_shape)


def _grid_of(source: SourceArray) -> tuple[Extent, bool]:
    """A chunk shape, and whether its chunks are the shards of the source."""
    shape = source.shape
    if source.chunk_shape is not None:
        return tuple(
            min(c, max(1, n)) for c, n in zip(source.chunk_shape, shape, strict=True)
        ), True
    holdings = sorted(Holding(region, rank) for region, rank in source.pieces if region.numel)
    regions = [holding.region for holding in holdings]
    chunk = regular_chunk_shape(shape, regions)
    if chunk is None or not fills_grid(shape, chunk, regions):
        require_partition(source.key, shape, holdings)
    if chunk is None:
        return irregular_chunk_shape(shape, source.dtype.itemsize, holdings), False
    return chunk, True


def require_whole(source: SourceArray) -> None:
    """Raise unless the pieces of an array make it up, once each.

    Raises:
        CoverageError: elements are missing, or a piece lies outside.
        DuplicateWriterError: two pieces share an element.
    """
    _grid_of(source)


def stored_boxes(source: SourceArray) -> Iterator[Region]:
    """The boxes in which the source keeps an array, cut at its edge; of an empty one, itself."""
    whole = Region.whole(source.shape)
    if not whole.numel:
        yield whole
    elif source.chunk_shape is None:
        yield from sorted(region for region, _ in source.pieces if region.numel)
    else:
        array = ArraySpec(source.key, source.shape, source.dtype, source.chunk_shape)
        cut = (array.chunk_region(index).intersect(whole) for index in array.chunk_indices())
        yield from (region for region in cut if region is not None)


def _piece_files(
    made: Sequence[tuple[SourceArray, ArraySpec]], limits: ConvertLimits
) -> Iterator[Unit]:
    """Files of torch_dist: the source's boxes, those that are too large cut."""
    parts = [
        _part(source, array, slab)
        for source, array in made
        for region in stored_boxes(source)
        for slab in slabs(region, array.dtype.itemsize, limits.box_nbytes, source.grain)
    ]
    for number, share in enumerate(_shares(parts, limits.file_nbytes)):
        yield Unit(f"__0_{number}.distcp", tuple(share))


def _tensor_files(
    made: Sequence[tuple[SourceArray, ArraySpec]], limits: ConvertLimits
) -> Iterator[Unit]:
    """Files of safetensors: whole arrays, the widest elements first, which keeps them aligned."""
    wholes = [_part(source, array, Region.whole(array.shape)) for source, array in made]
    files = list(_shares(wholes, limits.file_nbytes))
    for number, file in enumerate(files):
        name = tensor_file_name(number, len(files))
        at = 0
        parts = []
        for part in sorted(file, key=lambda part: (-part.array.dtype.itemsize, part.array.key)):
            for slab in slabs(
                part.region, part.array.dtype.itemsize, limits.box_nbytes, part.grain
            ):
                moved = Part(part.source, part.array, slab, part.grain, at)
                parts.append(moved)
                at += moved.nbytes
        for share in _shares(parts, limits.box_nbytes):
            yield Unit(name, tuple(share))


def tensor_file_name(number: int, num_files: int) -> str:
    """What the ecosystem names a file of safetensors."""
    if num_files == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def _shares(parts: Sequence[Part], max_nbytes: int) -> Iterator[list[Part]]:
    """Parts in order, in groups of a bounded size; a larger part has one of its own."""
    share: list[Part] = []
    held = 0
    for part in parts:
        if share and held + part.nbytes > max_nbytes:
            yield share
            share, held = [], 0
        share.append(part)
        held += part.nbytes
    if share:
        yield share


def slabs(
    region: Region, itemsize: int, max_nbytes: int, grain: Extent | None = None
) -> Iterator[Region]:
    """The region cut into boxes, each of them contiguous in its C order, and in that order.

    Args:
        region: what to cut.
        itemsize: bytes of an element.
        max_nbytes: of a box; one element is never cut.
        grain: cut at multiples of this, from the region's own start, where that fits.
    """
    shape = region.shape
    if not region.numel or region.numel * itemsize <= max_nbytes:
        yield region
        return
    dim = len(shape) - 1
    while dim and math.prod(shape[dim:]) * itemsize <= max_nbytes:
        dim -= 1
    step = max(1, max_nbytes // (math.prod(shape[dim + 1 :]) * itemsize))
    if grain is not None and step > grain[dim]:
        step -= step % grain[dim]
    for outer in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            inner = (*outer, start, *(0,) * (len(shape) - dim - 1))
            offset = tuple(o + i for o, i in zip(region.offset, inner, strict=True))
            extent = (*(1,) * dim, min(step, shape[dim] - start), *shape[dim + 1 :])
            yield Region(offset, extent)
