"""What a pack says of itself: its header, read back and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, Shape
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable
from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompatibleVersionError
from dist_ckpt_strategies.formats.pack import (
    COMMON,
    DIGESTS,
    LENGTH,
    MAX_HEADER_NBYTES,
    PADDING,
    RANGE_NBYTES,
    SAFETENSORS_NAMES,
    UNVERIFIED,
    VERSION,
    StoredBytes,
    num_ranges,
    table_nbytes,
)

_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})
_NAME = re.compile(r"(.*)([@#])(|\d+(?:\.\d+)*)", re.DOTALL | re.ASCII)

MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True, slots=True)
class PackHeader:
    """What a pack says of itself. Nothing of it has been compared with a digest yet.

    Attributes:
        save_id: of the save that wrote it; empty where writers share no id.
        num_packs: that all ranks of the save wrote; 0 where the writer did not know.
        rank: the global rank that wrote it.
        features: known ones.
        table: the blocks of arrays.
        objects: shards of objects.
        common: the common state.
        num_ranges: digests of ranges in the table.
        data_start: of the first tensor.
        nbytes: of the whole file.
        tensors: all of them but the last: name, first byte after the header, first digest, bytes.
        metadata: all fields of ``__metadata__``, those of the writer's own among them.
    """

    save_id: str
    num_packs: int
    rank: int
    features: tuple[str, ...]
    table: BlockTable
    objects: tuple[tuple[ObjectId, StoredBytes], ...]
    common: StoredBytes | None
    num_ranges: int
    data_start: int
    nbytes: int
    tensors: tuple[tuple[str, int, int, int], ...]
    metadata: Mapping[str, str]


def header_nbytes(start: bytes, path: str) -> int:
    """Bytes before the first tensor, by the first 8 bytes of the file."""
    if len(start) == LENGTH.size:
        (length,) = LENGTH.unpack(start)
        if LENGTH.size < length + LENGTH.size <= 2 * MAX_HEADER_NBYTES:
            return int(length) + LENGTH.size
    raise CorruptCheckpointError(f"{path} is damaged: it has no header of a pack", path=path)


def parse_header(content: bytes, path: str) -> PackHeader:
    """What a pack says of itself; ``content`` is all that stands before the first tensor.

    Raises:
        CorruptCheckpointError: it is no header of a pack.
        IncompatibleVersionError: a later version of this package wrote it.
    """
    try:
        found = json.loads(content[LENGTH.size :])
        metadata = found.pop("__metadata__")
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("__metadata__ holds what is no text")
        version, features = int(metadata["version"]), metadata["features"]
        named = tuple(filter(None, features.split(",")))
        if version != VERSION or not {UNVERIFIED}.issuperset(named):
            raise IncompatibleVersionError(
                f"{path}: a pack of version {version}, features {features or 'none'}; this release "
                f"reads version {VERSION}; install a newer one",
                path=path,
            )
        return _parsed(found, metadata, named, len(content))
    except MALFORMED as error:
        raise CorruptCheckpointError(
            f"{path} is damaged: its header: {error}", path=path
        ) from error


def _parsed(
    tensors: dict[str, Any], metadata: dict[str, str], features: tuple[str, ...], data_start: int
) -> PackHeader:
    if int(metadata["range_nbytes"]) != RANGE_NBYTES:
        raise ValueError(f"range_nbytes {metadata['range_nbytes']}, expected {RANGE_NBYTES}")
    shapes, dtypes, grids = (json.loads(metadata[n]) for n in ("arrays", "dtypes", "objects"))
    ordered = sorted(tensors.items(), key=lambda item: item[1]["data_offsets"])
    blocks: list[tuple[str, ArrayFacts, Region, StoredBytes]] = []
    objects: list[tuple[ObjectId, StoredBytes]] = []
    common = None
    end = first = 0
    places: list[tuple[str, int, int, int]] = []
    for name, tensor in ordered[:-1]:
        stored = _after(end, first, name, tensor["data_offsets"])
        places.append((name, end, first, stored.nbytes))
        match = _NAME.fullmatch(name)
        if name == COMMON:
            common = stored
        elif match and match[2] == "#":
            grid = tuple(map(_size, grids[match[1]]))
            objects.append((ObjectId(match[1], _numbers(match[3]), grid), stored))
        elif match:
            key, origin = match[1], _numbers(match[3])
            blocks.append((key, *_block(tensor, origin, shapes[key], dtypes.get(key)), stored))
        elif name != PADDING:
            raise ValueError(f"unknown tensor {name!r}")
        end += stored.nbytes
        first += num_ranges(stored.nbytes)
    last, table = ordered[-1]
    expected = [end, end + table_nbytes(first)]
    if last != DIGESTS or table["data_offsets"] != expected:
        raise ValueError(f"expected digests of {first} ranges as the last tensor")
    return PackHeader(
        metadata["save"],
        int(metadata["packs"]),
        int(metadata["rank"]),
        features,
        BlockTable.of(
            {key: facts for key, facts, _, _ in blocks},
            [(key, region) for key, _, region, _ in blocks],
            [(0, stored.byte_offset, stored.first_range) for *_, stored in blocks],
        ),
        tuple(objects),
        common,
        first,
        data_start,
        data_start + expected[1],
        tuple(places),
        metadata,
    )


def _after(end: int, first_range: int, name: str, offsets: Sequence[int]) -> StoredBytes:
    """Where a tensor is that begins at a byte."""
    start, stop = offsets
    if start != end or not start <= stop < 1 << 60:
        raise ValueError(f"{name}: bytes {start} to {stop}, expected {end} as the first")
    return StoredBytes(0, start, first_range, stop - start)


def _block(
    tensor: dict[str, Any], origin: Shape, array_shape: Any, stated: str | None
) -> tuple[ArrayFacts, Region]:
    dtype = _DTYPES[tensor["dtype"]] if stated is None else DType(stated)
    shape = tuple(map(_size, tensor["shape"]))
    if dtype not in SAFETENSORS_NAMES and dtype.itemsize > 1:
        shape = shape[:-1]
    start, stop = tensor["data_offsets"]
    facts, region = ArrayFacts(dtype.value, tuple(map(_size, array_shape))), Region(origin, shape)
    if len(origin) != region.ndim or region.ndim != len(facts.shape):
        raise ValueError(f"{region.ndim} dims at {origin} in an array {facts}")
    if region.numel * dtype.itemsize != stop - start:
        raise ValueError(f"{stop - start} bytes, expected {shape} of {dtype.value}")
    return facts, region


def _size(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"expected a size, found {number!r}")
    return number


def _numbers(text: str) -> Shape:
    return tuple(map(int, text.split("."))) if text else ()
