"""The files of one array: chunks of either format, assembled and read back; ``zarr.json``.

Format 2 is one Zarr v3 array in a directory per key, below ``arrays``. The file of a chunk holds
inner chunks (codec ``sharding_indexed``), one after the other in C order, then the index of them.
TensorStore reads such arrays, and zarr-python those of a dtype it knows.

Source: the Zarr v3 specification.
"""

import json
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region, Shape
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.storage.file_systems import BounceBuffers, Bytes
from dist_ckpt_strategies.storage.store import HostArray

Blocks = Iterable[tuple[Region, HostArray]]
"""The elements of a chunk in the order of its file: regions of the array, and their elements, with
any strides. In format 1 a region may reach past the array's edge, where its elements end."""

Digests = Mapping[tuple[str, Shape], bytes]
"""Of each chunk, by key and index: of its inner chunks, then of its index; see ``digests_of``."""

ZARR_JSON = "zarr.json"
"""The metadata of an array of format 2."""

_END = "}}}"
"""Of that file: what follows the key, the last value in it."""

_MAX_COPY_NBYTES = 4 << 20
_MISSING = 2**64 - 1
_CRC = struct.Struct("<I")

_BITS: Mapping[int, npt.DTypeLike] = MappingProxyType(
    {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
)


def encode_raw(blocks: Blocks) -> Iterator[Bytes]:
    """All bytes of the file of a chunk of format 1, in segments."""
    for region, elements in blocks:
        for block in _in_order(bits_of(elements), region.shape):
            yield block.reshape(-1).view(np.uint8)


def encode_inner(
    grid: InnerGrid, dtype: DType, blocks: Blocks, buffers: BounceBuffers, digests: bytearray
) -> Iterator[Bytes]:
    """All bytes of the file of a chunk of format 2, each segment until the next is asked for.

    The digests of the inner chunks, then that of the index, are added to ``digests``. What does not
    lie in memory as in the file is gathered in one of the buffers.
    """
    for region, elements in blocks:
        counts = tuple(-(-n // i) for n, i in zip(region.shape, grid.inner_shape, strict=True))
        part = grid
        if region != grid.region:
            part = grid._replace(region=region, counts=counts, is_flat=False)
        for run in part.runs():
            nbytes = run.num_chunks * grid.stored_nbytes
            own = memory_of(part, run, region, elements)
            with buffers.borrowed(nbytes) if own is None else nullcontext(own) as memory:
                content = memory[:nbytes]
                if own is None:
                    if _whole_region(part, run, region) is None:  # padding is zeros
                        content.fill(0)
                    for inner, outer in _pairs(part, run, dtype, content, region, elements):
                        np.copyto(inner, outer)
                digests += digests_of(content.reshape(run.num_chunks, -1))
                yield content
    entries = _index_of(grid.counts, grid.slot_counts, grid.stored_nbytes)
    digests += digests_of(entries[None])
    yield entries


def _in_order(elements: HostArray, shape: Shape) -> Iterator[HostArray]:
    """Elements in C order, padded with zeros to a shape; copies are a few MiB at a time."""
    if elements.shape == shape and elements.flags.c_contiguous:
        yield elements
        return
    row_nbytes = math.prod(shape[1:]) * elements.itemsize
    if row_nbytes > _MAX_COPY_NBYTES:
        nothing = np.empty((0,) * (elements.ndim - 1), elements.dtype)
        for number in range(shape[0]):
            row = elements[number] if number < len(elements) else nothing
            yield from _in_order(row, shape[1:])
        return
    step = _MAX_COPY_NBYTES // row_nbytes
    for start in range(0, shape[0], step):
        part = elements[start : start + step]
        block = np.zeros((min(step, shape[0] - start), *shape[1:]), elements.dtype)
        block[Region.whole(part.shape).slices()] = part
        yield block


def memory_of(grid: InnerGrid, run: Run, region: Region, elements: HostArray) -> Bytes | None:
    """The memory of a run's elements, out of those of ``region``, where it is as in the file."""
    if grid.is_flat and region == grid.region and elements.flags.c_contiguous:
        start, stop = (n * grid.raw_nbytes for n in (run.first, run.first + run.num_chunks))
        return elements.reshape(-1).view(np.uint8)[start:stop] if stop <= elements.nbytes else None
    found = grid.region_of(run.offset, run.shape)
    is_row = all(n == 1 for n in run.shape[1:]) or all(i == 1 for i in grid.inner_shape[:-1])
    if not is_row:
        return None
    if found != region:
        if not region.contains(found):
            return None
        elements = at_region(elements, found.within(region))
    is_as_stored = elements.nbytes == run.num_chunks * grid.stored_nbytes  # no padding, no checksum
    if not is_as_stored or not elements.flags.c_contiguous:
        return None
    return elements.reshape(-1).view(np.uint8)


def _pairs(
    grid: InnerGrid, run: Run, dtype: DType, content: Bytes, region: Region, elements: HostArray
) -> Iterator[tuple[HostArray, HostArray]]:
    """Views of the same elements: in the bytes of a run, and in what is held of ``region``."""
    chunks = content.reshape(run.num_chunks, grid.stored_nbytes)[:, : grid.raw_nbytes]
    inner = chunks.view(_BITS.get(dtype.itemsize, dtype.numpy))
    inner = inner.reshape((*run.shape, *grid.inner_shape))
    covered = _whole_region(grid, run, region)
    if covered is not None:
        # Each dim is cut in two: which inner chunk, and where in it. That never copies.
        sizes = [size for pair in zip(run.shape, grid.inner_shape, strict=True) for size in pair]
        outer = bits_of(at_region(elements, covered.within(region))).reshape(sizes)
        yield inner, outer.transpose(*range(0, outer.ndim, 2), *range(1, outer.ndim, 2))
        return
    for at in np.ndindex(*run.shape):
        own = grid.region_of(tuple(map(operator.add, run.offset, at)))
        common = own.intersect(region)
        if common is not None:
            outer = bits_of(at_region(elements, common.within(region)))
            yield at_region(inner[(*at, ...)], common.within(own)), outer


def at_region(elements: HostArray, region: Region) -> HostArray:
    """A view of a region; of an array without dims too, where plain indexing would copy."""
    place: Any = (..., *region.slices())
    view: HostArray = elements[place]
    return view


def digests_of(chunks: Bytes) -> bytes:
    """The digests of all rows, ``DIGEST_NBYTES`` each."""
    digest = xxhash.xxh3_64_digest
    return b"".join([digest(chunk.data) for chunk in chunks])


@lru_cache(maxsize=32)
def _index_of(counts: Shape, slot_counts: Shape, stored_nbytes: int) -> Bytes:
    """The index at the end of the file: offset and size of each inner chunk, and a CRC32C."""
    entries = np.full((*slot_counts, 2), _MISSING, "<u8")
    held = entries[Region.whole(counts).slices()]
    numbers = np.arange(math.prod(counts), dtype="<u8").reshape(counts)
    held[..., 0] = numbers * stored_nbytes
    held[..., 1] = stored_nbytes
    content = entries.tobytes()
    return np.frombuffer(content + _CRC.pack(google_crc32c.value(content)), np.uint8)


def _whole_region(grid: InnerGrid, run: Run, region: Region) -> Region | None:
    """The region of a run; None where the array's edge cuts it, or not all is in ``region``."""
    found = grid.region_of(run.offset, run.shape)
    is_cut = found.shape != tuple(map(operator.mul, run.shape, grid.inner_shape))
    return None if is_cut or not region.contains(found) else found


def bits_of(elements: HostArray) -> HostArray:
    """The same memory as whole numbers: copies keep every bit, and need no code for the dtype."""
    return elements.view(_BITS.get(elements.itemsize, elements.dtype))


def zarr_json(array: ArraySpec) -> bytes:
    """The bytes of ``zarr.json``. The arrays of all layers have few descriptions between them."""
    return (_before_key(replace(array, key="")) + json.dumps(array.key) + _END).encode()


@lru_cache(maxsize=256)
def _before_key(array: ArraySpec) -> str:
    assert array.inner_shape is not None  # noqa: S101 - callers pass arrays of format 2
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    checksum = {"name": "crc32c"}
    inner_codecs = [little_endian, checksum] if array.has_crc32c else [little_endian]
    zero: Any = 0 if "int" in array.dtype.value else 0.0  # no chunk of ours is ever left out
    if array.dtype is DType.BOOL:
        zero = False
    elif array.dtype.value.startswith("complex"):
        zero = [0.0, 0.0]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": array.dtype.value,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": array.chunk_shape},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": array.inner_shape,
                    "codecs": inner_codecs,
                    "index_codecs": [little_endian, checksum],
                    "index_location": "end",
                },
            }
        ],
        "fill_value": zero,
        "attributes": {"dist_ckpt_strategies": {"key": array.key}},
    }
    # With indent, json takes ten times as long.
    return json.dumps(metadata).removesuffix(f'""{_END}')
