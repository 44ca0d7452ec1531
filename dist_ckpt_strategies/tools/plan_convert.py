"""Decide how a checkpoint becomes one of another format: its files, and blocks that fit memory."""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, pairwise, product
from operator import floordiv
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from dist_ckpt_strategies.core.array import (
    ArraySpec,
    DType,
    ObjectId,
    Region,
    Shape,
    ShardId,
    ShardSpec,
    flat_index,
    groups,
    require_storable_keys,
)
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable
from dist_ckpt_strategies.core.coverage import require_coverage
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.pack import LENGTH, SAFETENSORS_NAMES, Layout, PackLimits, lay_out

_MAX_CHUNK_NBYTES = 64 << 20
"""Of an array whose stored regions lie on no regular grid."""

SAFETENSORS_DTYPES = MappingProxyType({**SAFETENSORS_NAMES, DType.FLOAT8_E8M0FNU: "F8_E8M0"})
"""The dtypes that safetensors has, under the names that it gives them."""


class Format(StrEnum):
    """A format to convert from or to; the values are those of the command line.

    Another value raises a PlanError.
    """

    PACK = "pack"
    ZARR1 = "zarr@1"
    ZARR3 = "zarr@3"
    TORCH_DIST = "torch_dist"
    SAFETENSORS = "safetensors"

    @property
    def backend(self) -> tuple[str, int]:
        """Backend and version, as ``metadata.json`` has them; of no checkpoint, ("", 0)."""
        return _BACKENDS.get(self, ("", 0))

    @classmethod
    def of(cls, name: str | tuple[str, int]) -> Format:
        """The format of that name, or of a backend and version."""
        of_backend = (member for member in _BACKENDS if member.backend == name)
        return next(of_backend, None) or cls(str(name))

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise PlanError(f"format: expected one of {', '.join(cls)}, found {value!r}")


_BACKENDS: Mapping[Format, tuple[str, int]] = MappingProxyType(
    {
        Format.PACK: ("safetensors", 1),
        Format.ZARR1: ("zarr", 1),
        Format.ZARR3: ("zarr", 3),
        Format.TORCH_DIST: ("torch_dist", 1),
    }
)


def require_whole(arrays: Sequence[ArraySpec]) -> None:
    """Raise CoverageError unless blocks hold each element exactly once."""
    stored = {array.key: array for array in arrays if array.blocks is not None}
    listed = [(key, *block) for key, array in stored.items() for block in array.blocks or ()]
    table = BlockTable.of(
        {key: ArrayFacts(array.dtype.value, array.shape) for key, array in stored.items()},
        [(key, region) for key, region, _ in listed],
        [(0, 0, 0)] * len(listed),
    )
    require_coverage(table, np.array([rank for *_, rank in listed], np.int64))


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A region of an array, as source and target have it, that one thread writes block by block.

    A chunk's region is whole, and may reach past the array's edge. ``byte_offset`` is that of the
    array's first element in a file of safetensors.
    """

    source: ArraySpec
    array: ArraySpec
    region: Region
    byte_offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that the array has."""
        held = self.region.intersect(Region.whole(self.array.shape))
        return 0 if held is None else held.numel * self.array.dtype.itemsize

    def blocks(self, max_nbytes: int) -> Iterator[Region]:
        """The region cut into blocks; see ``blocks``."""
        return blocks(self.region, self.array.dtype.itemsize, max_nbytes)


@dataclass(frozen=True, slots=True)
class FileTask:
    """The items that one thread writes, in order: of a file of the target, or of a region of one.

    The name of a pack is its number in the layout.
    """

    name: str
    items: tuple[WriteItem, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(item.nbytes for item in self.items)

    @property
    def key(self) -> str:
        """The key that messages name."""
        return self.items[0].array.key


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """The arrays of the target, sorted by key, its objects, and what is written of the arrays.

    ``layout`` is that of packs, one for each task; ``features`` are theirs. ``headers`` are what
    files of safetensors begin with, by name.
    """

    target: Format
    arrays: tuple[ArraySpec, ...]
    objects: tuple[ObjectId, ...]
    tasks: tuple[FileTask, ...]
    layout: Layout
    features: tuple[str, ...] = ()
    headers: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """Of all arrays and objects."""
        return [array.key for array in self.arrays] + [one.key for one in self.objects]

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return sum(array.nbytes for array in self.arrays)


Pair = tuple[ArraySpec, ArraySpec]
"""An array as the source and as the target have it."""


def build_convert_plan(  # noqa: PLR0913
    sources: Sequence[ArraySpec],
    target: Format,
    renames: Mapping[str, str],
    objects: Sequence[ObjectId] = (),
    *,
    file_nbytes: int,
    max_block_nbytes: int = sys.maxsize,
    features: Sequence[str] = (),
) -> ConvertPlan:
    """Choose chunks and files: the source's own grid, where it has one.

    ``renames`` has keys in the target, by those in the source, where they differ. A file of several
    arrays has about ``file_nbytes``. ``max_block_nbytes`` limits the blocks of packs and the chunks
    of Zarr v3. ``features`` are those of packs.

    Raises CoverageError if the shards of an array do not make it up, and PlanError if the target
    cannot hold an array, or two would have one key.
    """
    named = [(renames.get(source.key, source.key), source) for source in sources]
    named.sort(key=lambda pair: pair[0])
    _require_keys(target, [key for key, _ in named], objects)
    require_whole(sources)
    pairs = [(source, _target_array(key, source, target)) for key, source in named]
    items = [WriteItem(*pair, region) for pair in pairs for region in pair[0].regions()]
    layout = lay_out(())
    headers: dict[str, bytes] = {}
    match target:
        case Format.PACK:
            limits = PackLimits(min(file_nbytes, max_block_nbytes))
            layout, tasks = _packs(items, limits, max_block_nbytes, features)
        case Format.SAFETENSORS:
            headers, tasks = _safetensors(pairs, file_nbytes)
        case Format.TORCH_DIST:
            files = enumerate(groups(items, file_nbytes))
            tasks = [FileTask(f"__0_{number}.distcp", tuple(file)) for number, file in files]
        case _:
            tasks = [task for pair in pairs for task in _chunk_tasks(*pair, max_block_nbytes)]
            pairs = [(source, _with_smaller_chunks(a, max_block_nbytes)) for source, a in pairs]
    arrays = tuple(array for _, array in pairs)
    contents = tuple(objects), tuple(tasks), layout, tuple(features), headers
    return ConvertPlan(target, arrays, *contents)


def _require_keys(target: Format, keys: Sequence[str], objects: Sequence[ObjectId]) -> None:
    for one, other in pairwise(keys):
        if one == other:
            raise PlanError(f"{one}: two arrays of the source would have this key", key=one)
    if target in {Format.ZARR1, Format.ZARR3}:
        require_storable_keys(keys, [object_id.key for object_id in objects])
    for key in keys if target is Format.ZARR3 else ():
        if "zarr.json" in key.split("/"):
            raise PlanError(f"{key}: Zarr v3 has a file of its own named zarr.json", key=key)


def _target_array(key: str, source: ArraySpec, target: Format) -> ArraySpec:
    """The array with the target's chunk grid: that of the source, or else rows of the array."""
    if target is Format.SAFETENSORS and source.dtype not in SAFETENSORS_DTYPES:
        names = ", ".join(dtype.value for dtype in SAFETENSORS_DTYPES)
        raise PlanError(
            f"{key}: safetensors has no {source.dtype.value}; it has {names}; leave the array out "
            "with --keys, or convert to another format",
            key=key,
        )
    regions = [region for region, _ in source.blocks or () if region.numel]
    shape, chunk = source.shape, source.chunk_shape
    if regions:
        chunk = tuple(map(max, zip(*(region.shape for region in regions), strict=True)))
    chunk = tuple(max(1, min(sizes)) for sizes in zip(chunk, shape, strict=True))
    is_regular = all(
        offset % c == 0 and n == min(c, size - offset)  # the edge may cut a chunk
        for region in regions
        for offset, n, c, size in zip(*region, chunk, shape, strict=True)
    )
    array = ArraySpec(key, shape, source.dtype, chunk)
    return (
        array
        if is_regular
        else _with_smaller_chunks(replace(array, chunk_shape=shape), _MAX_CHUNK_NBYTES)
    )


def _packs(
    items: Sequence[WriteItem], limits: PackLimits, max_block_nbytes: int, features: Sequence[str]
) -> tuple[Layout, list[FileTask]]:
    """Packs, all of them written in the name of rank 0, and the blocks of each."""
    cut = [replace(i, region=block) for i in items for block in i.blocks(max_block_nbytes)]
    shards = [ShardSpec(ShardId(i.array.key, i.region), i.array.shape, i.array.dtype) for i in cut]
    layout = lay_out(shards, limits=limits, features=features)
    tasks = [
        FileTask(str(number), tuple(cut[source] for source in pack.sources if source >= 0))
        for number, pack in enumerate(layout.packs)
    ]
    return layout, tasks


def _safetensors(
    pairs: Sequence[Pair], file_nbytes: int
) -> tuple[dict[str, bytes], list[FileTask]]:
    """Whole arrays, the widest elements first, which keeps them aligned; and the files' headers."""
    files = list(
        groups([WriteItem(*pair, Region.whole(pair[1].shape)) for pair in pairs], file_nbytes)
    )
    headers, tasks = {}, []
    for number, file in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = name if len(files) > 1 else "model.safetensors"
        file.sort(key=lambda item: (-item.array.dtype.itemsize, item.array.key))
        ends = list(accumulate((item.nbytes for item in file), initial=0))
        fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        for item, span in zip(file, pairwise(ends), strict=True):
            stored = {"dtype": SAFETENSORS_DTYPES[item.array.dtype], "shape": item.array.shape}
            fields[item.array.key] = stored | {"data_offsets": span}
        content = json.dumps(fields, separators=(",", ":")).encode()
        content += b" " * (-len(content) % LENGTH.size)
        headers[name] = LENGTH.pack(len(content)) + content
        tasks += [
            FileTask(name, (replace(item, region=region, byte_offset=len(headers[name]) + start),))
            for item, start in zip(file, ends, strict=False)
            for region in item.source.regions()
        ]
    return headers, tasks


def _chunk_tasks(source: ArraySpec, array: ArraySpec, max_nbytes: int) -> Iterator[FileTask]:
    """The chunks of an array; those that begin in one cell, a region of the source, together."""
    together: dict[Shape, list[WriteItem]] = defaultdict(list)
    smaller = _with_smaller_chunks(array, max_nbytes)
    for index in smaller.chunk_indices():
        region = smaller.chunk_region(index)
        cell = tuple(map(floordiv, region.offset, array.chunk_shape))
        together[cell].append(WriteItem(source, smaller, region))
    for cell, items in together.items():
        yield FileTask(array.chunk_file(cell), tuple(items))


def _with_smaller_chunks(array: ArraySpec, max_nbytes: int) -> ArraySpec:
    whole = Region.whole(array.chunk_shape)
    return replace(array, chunk_shape=next(blocks(whole, array.dtype.itemsize, max_nbytes)).shape)


def blocks(region: Region, itemsize: int, max_nbytes: int) -> Iterator[Region]:
    """The region cut into blocks, each of them contiguous in its C order, and in that order.

    An element is never cut.
    """
    shape = region.shape
    if not region.numel or region.numel * itemsize <= max_nbytes:
        yield region
        return
    dim = len(shape) - 1
    while dim and math.prod(shape[dim:]) * itemsize <= max_nbytes:
        dim -= 1
    step = max(1, max_nbytes // (math.prod(shape[dim + 1 :]) * itemsize))
    for outer in product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], step):
            inner = (*outer, start, *(0,) * (len(shape) - dim - 1))
            offset = tuple(o + i for o, i in zip(region.offset, inner, strict=True))
            yield Region(offset, (*(1,) * dim, min(step, shape[dim] - start), *shape[dim + 1 :]))


def contiguous_runs(region: Region, shape: Shape) -> Iterator[tuple[int, int]]:
    """The runs of a region in an array in C order: first element and count, in C order."""
    dim = len(shape)
    while dim and region.shape[dim - 1] == shape[dim - 1]:
        dim -= 1
    limit = math.prod(region.shape[max(0, dim - 1) :])
    for run in blocks(region, 1, max(1, limit)):
        yield flat_index(shape, run.offset), run.numel
