"""Inner chunks in memory: put together from elements, taken apart again, with their digests.

Many inner chunks are moved by one copy, in whatever order their elements lie, so that their number
costs little. Digests are taken while the bytes are in the processor's cache.

Source: the codec ``sharding_indexed`` of Zarr v3; XXH3, 64 bits.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.storage.base import HostArray

Bytes = npt.NDArray[np.uint8]

_ABSENT = 2**64 - 1
_CRC = struct.Struct("<I")


def encode_run(
    grid: InnerGrid, run: Run, dtype: DType, source: HostArray, target: Bytes
) -> list[int]:
    """Put the inner chunks of a run together; the digest of each.

    Args:
        grid: of the chunk.
        run: which inner chunks.
        dtype: element type.
        source: the elements of the chunk's region, with any strides.
        target: ``run.num_chunks * grid.stored_nbytes`` bytes, which are overwritten.
    """
    chunks = target.reshape(run.num_chunks, grid.stored_nbytes)
    box = grid.box(run.offset, run.shape)
    part = at_box(source, box.within(grid.region))
    elements = _elements(chunks, grid, run, dtype)
    if box.shape == _whole_shape(grid, run):
        np.copyto(elements, _split(_bits(part, dtype), grid))
    else:
        elements[...] = 0
        for offset, chunk in _each(run, elements):
            own = grid.box(offset)
            held = at_box(source, own.within(grid.region))
            np.copyto(at_box(chunk, Region.whole(own.shape)), _bits(held, dtype))
    if grid.stored_nbytes > grid.raw_nbytes:
        for chunk in chunks:
            crc = google_crc32c.value(chunk[: grid.raw_nbytes].tobytes())
            chunk[grid.raw_nbytes :] = np.frombuffer(_CRC.pack(crc), np.uint8)
    return digests_of(chunks)


def decode_run(
    grid: InnerGrid, run: Run, dtype: DType, content: Bytes, region: Region, target: HostArray
) -> None:
    """Copy the elements that a run shares with ``region`` to their place.

    Args:
        grid: of the chunk.
        run: which inner chunks.
        dtype: element type.
        content: their bytes.
        region: what ``target`` holds.
        target: has the region's shape, and any strides.
    """
    chunks = content.reshape(run.num_chunks, grid.stored_nbytes)
    elements = _elements(chunks, grid, run, dtype)
    box = grid.box(run.offset, run.shape)
    if box.shape == _whole_shape(grid, run) and region.contains(box):
        part = at_box(target, box.within(region))
        np.copyto(_split(_bits(part, dtype), grid), elements)
        return
    for offset, chunk in _each(run, elements):
        own = grid.box(offset)
        common = own.intersect(region)
        if common is not None:
            part = at_box(target, common.within(region))
            np.copyto(_bits(part, dtype), at_box(chunk, common.within(own)))


def is_in_place(grid: InnerGrid, run: Run, region: Region) -> bool:
    """Whether the run's bytes are, one after the other, those of its box in C order.

    Then a target whose box is contiguous can take them as they come.
    """
    is_row = all(n == 1 for n in run.shape[1:]) or all(i == 1 for i in grid.inner_shape[:-1])
    if not is_row or grid.stored_nbytes != grid.raw_nbytes:
        return False
    box = grid.box(run.offset, run.shape)
    return box.shape == _whole_shape(grid, run) and region.contains(box)


def at_box(elements: HostArray, box: Region) -> HostArray:
    """A view of a box; of an array without dims too, where plain indexing would copy."""
    place: Any = (..., *box.slices())
    view: HostArray = elements[place]
    return view


def digests_of(chunks: Bytes) -> list[int]:
    """The digest of each row."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(chunk.data) for chunk in chunks]


def encode_index(grid: InnerGrid) -> bytes:
    """The index at the end of the file: offset and size of each inner chunk, and a CRC32C."""
    entries = np.full((*grid.slot_counts, 2), _ABSENT, "<u8")
    held = entries[Region.whole(grid.counts).slices()]
    numbers = np.arange(grid.num_chunks, dtype="<u8").reshape(grid.counts)
    held[..., 0] = numbers * grid.stored_nbytes
    held[..., 1] = grid.stored_nbytes
    content = entries.tobytes()
    return content + _CRC.pack(google_crc32c.value(content))


def _elements(chunks: Bytes, grid: InnerGrid, run: Run, dtype: DType) -> HostArray:
    """The elements of the inner chunks: dims of the run, then those of an inner chunk."""
    raw = chunks[:, : grid.raw_nbytes].view(_bits_of(dtype))
    return raw.reshape((*run.shape, *grid.inner_shape))


def _whole_shape(grid: InnerGrid, run: Run) -> Extent:
    return tuple(map(operator.mul, run.shape, grid.inner_shape))


def _split(part: HostArray, grid: InnerGrid) -> HostArray:
    """A view with each dim cut in two: which inner chunk, and where in it; the former first."""
    counts = tuple(map(operator.floordiv, part.shape, grid.inner_shape))
    pairs = [extent for pair in zip(counts, grid.inner_shape, strict=True) for extent in pair]
    dims = range(2 * part.ndim)
    return part.reshape(pairs).transpose(*dims[::2], *dims[1::2])  # splitting dims never copies


def _each(run: Run, elements: HostArray) -> Iterator[tuple[Extent, HostArray]]:
    """The inner chunks of a run, each with its place in the chunk's grid."""
    for at in np.ndindex(*run.shape):
        yield tuple(map(operator.add, run.offset, at)), elements[(*at, ...)]


def _bits(elements: HostArray, dtype: DType) -> HostArray:
    """The same memory as whole numbers: copies keep every bit, and need no code for the dtype."""
    return elements.view(_bits_of(dtype))


def _bits_of(dtype: DType) -> npt.DTypeLike:
    return _BITS.get(dtype.itemsize, dtype.numpy)


_BITS: Mapping[int, npt.DTypeLike] = MappingProxyType(
    {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
)
