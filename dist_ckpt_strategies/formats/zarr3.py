"""The layout of format ("zarr", 2): one Zarr v3 array in a directory per key, below ``arrays``.

The file of a chunk holds inner chunks (codec ``sharding_indexed``), one after the other in C order,
then the index of them. TensorStore reads such arrays, and zarr-python those of a dtype it knows.

Source: the Zarr v3 specification.
"""

from __future__ import annotations

import json
import operator
import re
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.core.array import ArraySpec, DType
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.storage.store import HostArray

ARRAYS_NAME = "arrays"
METADATA_NAME = "zarr.json"

_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_SAFE_BYTES = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_MAX_NAME_NBYTES = 200
_KEPT_OF_LONG_NBYTES = 150


def directory_name(key: str) -> str:
    """The directory of an array, below ``arrays``: its key, where that is a plain name.

    Other bytes are written as ``%`` and two hexadecimal digits. A name too long for file systems is
    cut, and ends in ``%`` and a digest of the whole. No two keys have the same.
    """
    if _PLAIN.fullmatch(key) and len(key) <= _MAX_NAME_NBYTES:
        return key
    content = key.encode(errors="surrogatepass")
    name = "".join(
        chr(byte) if byte in _SAFE_BYTES and (place or byte != ord(".")) else f"%{byte:02X}"
        for place, byte in enumerate(content)
    )
    if len(name) <= _MAX_NAME_NBYTES and name:
        return name
    return f"{name[:_KEPT_OF_LONG_NBYTES]}%{xxhash.xxh3_128_hexdigest(content)}"


def array_directory(key: str) -> str:
    """The directory of an array, below the checkpoint's."""
    return f"{ARRAYS_NAME}/{directory_name(key)}"


def chunk_name(array: ArraySpec, index: Shape) -> str:
    """The file of a chunk, below the checkpoint's directory."""
    return f"{array_directory(array.key)}/{'.'.join(['c', *map(str, index)])}"


def metadata_content(array: ArraySpec) -> bytes:
    """The bytes of ``zarr.json``."""
    assert array.inner_shape is not None  # noqa: S101 - callers pass arrays of format 2
    little_endian = {"name": "bytes", "configuration": {"endian": "little"}}
    checksum = {"name": "crc32c"}
    inner_codecs = [little_endian, checksum] if array.has_crc32c else [little_endian]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype.value,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(array.chunk_shape)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {
                "name": "sharding_indexed",
                "configuration": {
                    "chunk_shape": list(array.inner_shape),
                    "codecs": inner_codecs,
                    "index_codecs": [little_endian, checksum],
                    "index_location": "end",
                },
            }
        ],
        "fill_value": _fill_value(array.dtype),
        "attributes": {"dist_ckpt_strategies": {"key": array.key}},
    }
    return json.dumps(metadata).encode()  # with indent, json takes ten times as long


def _fill_value(dtype: DType) -> Any:
    """Zero, as Zarr v3 spells it for a dtype; no chunk of ours is ever left out."""
    if dtype is DType.BOOL:
        return False
    if dtype.value.startswith("complex"):
        return [0.0, 0.0]
    return 0 if "int" in dtype.value else 0.0


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
    covered = grid.region_of(run.offset, run.shape)
    part = at_region(source, covered.within(grid.region))
    elements = _elements(chunks, grid, run, dtype)
    if covered.shape == _whole_shape(grid, run):
        np.copyto(elements, _split(bits_of(part), grid))
    else:
        elements[...] = 0
        for offset, chunk in _each(run, elements):
            own = grid.region_of(offset)
            held = at_region(source, own.within(grid.region))
            np.copyto(at_region(chunk, Region.whole(own.shape)), bits_of(held))
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
    covered = grid.region_of(run.offset, run.shape)
    if covered.shape == _whole_shape(grid, run) and region.contains(covered):
        part = at_region(target, covered.within(region))
        np.copyto(_split(bits_of(part), grid), elements)
        return
    for offset, chunk in _each(run, elements):
        own = grid.region_of(offset)
        common = own.intersect(region)
        if common is not None:
            part = at_region(target, common.within(region))
            np.copyto(bits_of(part), at_region(chunk, common.within(own)))


def is_in_place(grid: InnerGrid, run: Run, region: Region) -> bool:
    """Whether the run's bytes are, one after the other, those of its region in C order.

    Then a target whose region is contiguous can take them as they come.
    """
    is_row = all(n == 1 for n in run.shape[1:]) or all(i == 1 for i in grid.inner_shape[:-1])
    if not is_row or grid.stored_nbytes != grid.raw_nbytes:
        return False
    covered = grid.region_of(run.offset, run.shape)
    return covered.shape == _whole_shape(grid, run) and region.contains(covered)


def at_region(elements: HostArray, region: Region) -> HostArray:
    """A view of a region; of an array without dims too, where plain indexing would copy."""
    place: Any = (..., *region.slices())
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
    raw = chunks[:, : grid.raw_nbytes].view(_BITS.get(dtype.itemsize, dtype.numpy))
    return raw.reshape((*run.shape, *grid.inner_shape))


def _whole_shape(grid: InnerGrid, run: Run) -> Shape:
    return tuple(map(operator.mul, run.shape, grid.inner_shape))


def _split(part: HostArray, grid: InnerGrid) -> HostArray:
    """A view with each dim cut in two: which inner chunk, and where in it; the former first."""
    counts = tuple(map(operator.floordiv, part.shape, grid.inner_shape))
    pairs = [size for pair in zip(counts, grid.inner_shape, strict=True) for size in pair]
    dims = range(2 * part.ndim)
    return part.reshape(pairs).transpose(*dims[::2], *dims[1::2])  # splitting dims never copies


def _each(run: Run, elements: HostArray) -> Iterator[tuple[Shape, HostArray]]:
    """The inner chunks of a run, each with its place in the chunk's grid."""
    for at in np.ndindex(*run.shape):
        yield tuple(map(operator.add, run.offset, at)), elements[(*at, ...)]


def bits_of(elements: HostArray) -> HostArray:
    """The same memory as whole numbers: copies keep every bit, and need no code for the dtype."""
    return elements.view(_BITS.get(elements.itemsize, elements.dtype))


_BITS: Mapping[int, npt.DTypeLike] = MappingProxyType(
    {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
)
