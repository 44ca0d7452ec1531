"""The layout of a pack: one safetensors file with all that a rank stores in one save. Pure.

A pack begins with safetensors' header, padded to 4 KiB. A block of an array is a tensor of the name
``KEY@ORIGIN``, one shard of objects is a tensor of bytes ``KEY#OFFSET``, the common state is
``__common__``. The last tensor, ``__digests__``, has an XXH3-64 of every range of 256 KiB of every
tensor before it, in their order, then the XXH3-128 of the header, then that of all these digests.

Blocks are ordered by the size of their elements, which so are aligned, and objects follow.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from json.encoder import encode_basestring_ascii as quoted
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.core.array import DType, ObjectId, Region, Shape, ShardSpec, joined
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable
from dist_ckpt_strategies.errors import CorruptCheckpointError, CoverageError, PlanError

RANGE_NBYTES = 256 << 10
"""The unit of a digest, and of a verified read; docs/decisions.md has the measurement."""

VERSION = 1
COMMON, DIGESTS, PADDING = "__common__", "__digests__", "__padding__"
UNVERIFIED = "unverified"
"""The feature of a pack with contents that were read without comparing their digests."""

MAX_BLOCKS = 100_000
MAX_HEADER_NBYTES = 100_000_000
"""The library safetensors reads no longer one."""

_ALIGNMENT = 4096
_DIGEST_NBYTES = 8
NUM_TRAILING = 4
"""Numbers in the table that are no digest of a range: of the header and of the table, two each."""

LENGTH = struct.Struct("<Q")

SAFETENSORS_NAMES = MappingProxyType(
    {
        DType.BOOL: "BOOL",
        DType.UINT8: "U8",
        DType.INT8: "I8",
        DType.UINT16: "U16",
        DType.INT16: "I16",
        DType.UINT32: "U32",
        DType.INT32: "I32",
        DType.UINT64: "U64",
        DType.INT64: "I64",
        DType.FLOAT16: "F16",
        DType.BFLOAT16: "BF16",
        DType.FLOAT32: "F32",
        DType.FLOAT64: "F64",
        DType.COMPLEX64: "C64",
        DType.FLOAT8_E4M3FN: "F8_E4M3",
        DType.FLOAT8_E5M2: "F8_E5M2",
    }
)
"""safetensors' names. Other types are stored as bytes, with one more dim if they take several."""


@dataclass(frozen=True, slots=True)
class PackLimits:
    """How large packs get, and how many a rank writes at least if it has bytes for so many.

    Attributes:
        nbytes: of the blocks of one pack; a single larger block goes alone.
        num_packs: written at the same time, if each has ``share_nbytes``.
        share_nbytes: see there.
    """

    nbytes: int = 4 << 30
    num_packs: int = 1
    share_nbytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class PackLayout:
    """One pack. Its blocks follow each other without a gap.

    Attributes:
        sources: what each tensor of the file is of: see Layout.
        sizes: of each tensor, in bytes.
        num_ranges: digests in the table, those at its end not counted.
        nbytes: of the whole file.
        data_start: of the first tensor, in bytes.
    """

    sources: tuple[int, ...]
    sizes: tuple[int, ...]
    num_ranges: int
    nbytes: int
    data_start: int
    _before_save_id: str
    _after_save_id: str

    def header(self, save_id: str, num_packs: int = 0) -> bytes:
        """The first bytes of the file, up to the first tensor.

        An empty ``save_id``: writers share none; 0 ``num_packs`` of all ranks: not known.
        """
        of_save = f'{quoted(save_id)},"packs":"{num_packs}"'
        if len(of_save) > _MAX_SAVE_ID:
            raise PlanError(f"save id {save_id!r} is too long")
        text = self._before_save_id + of_save + self._after_save_id
        return LENGTH.pack(self.data_start - LENGTH.size) + text.encode().ljust(
            self.data_start - LENGTH.size
        )


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes that are no block of an array: where they are stored.

    Attributes:
        pack: number of the pack.
        byte_offset: after the pack's header.
        first_range: the first digest of it in the pack's table.
        nbytes: how many there are.
    """

    pack: int
    byte_offset: int
    first_range: int
    nbytes: int


StoredObject = tuple[ObjectId, StoredBytes]
"""One shard of a grid of objects, and where it is."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The packs of a rank. Their sources are numbers: of shards, then of objects, then the common.

    Attributes:
        packs: one or more, unless there is nothing to store.
        table: the blocks of arrays, and where they are.
        objects: shards of objects, and where they are.
        common: where the common state is; None if it is not stored.
    """

    packs: tuple[PackLayout, ...]
    table: BlockTable
    objects: tuple[StoredObject, ...]
    common: StoredBytes | None


class _Item(NamedTuple):
    """One tensor of a pack, before it has a place. ``name`` is in quotation marks."""

    source: int
    key: str
    name: str
    dtype: str
    shape: Shape
    nbytes: int
    itemsize: int


def num_ranges(nbytes: int) -> int:
    """Digests of so many bytes."""
    return -(-nbytes // RANGE_NBYTES)


def lay_out(  # noqa: PLR0913 - facts of the pack
    shards: Sequence[ShardSpec],
    objects: Sequence[tuple[ObjectId, int]] = (),
    common_nbytes: int | None = None,
    *,
    rank: int = 0,
    limits: PackLimits = PackLimits(),
    features: Sequence[str] = (),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Layout:
    """The packs of a rank that stores these shards, objects of these sizes and the common state.

    ``notes`` are further fields of each pack's ``__metadata__``.

    Equal arguments give an equal layout. Shards without elements are left out, but for one of an
    array that has no elements at all.

    Raises:
        CoverageError: two shards of an array begin at the same element.
        PlanError: a key cannot be written as UTF-8, or an array is described in two ways.
    """
    facts, kept = _blocks(shards, rank)
    first_object, common_source = len(shards), len(shards) + len(objects)
    items = _array_items(kept, facts)
    for n, (name, nbytes) in enumerate(objects, first_object):
        items.append(_bytes_item(n, name.key, f"{name.key}#{joined(name.offset)}", nbytes))
    if common_nbytes is not None:
        items.append(_bytes_item(common_source, "", COMMON, common_nbytes))
    grids = {name.key: name.shape for name, _ in objects}
    packs: list[PackLayout] = []
    places = {}
    for unsorted in _groups(items, limits):
        group = sorted(unsorted, key=lambda item: -item.itemsize)
        listed = {i.key: facts[i.key] for i in group if i.source < first_object}
        of_objects = {
            i.key: grids[i.key] for i in group if first_object <= i.source < common_source
        }
        for item, start, first in _places(group):
            places[item.source] = len(packs), start, first
        packs.append(_pack(group, {**notes, **_metadata(rank, listed, of_objects, features)}))
    stored = (
        (name, StoredBytes(*places[n], nbytes))
        for n, (name, nbytes) in enumerate(objects, first_object)
    )
    table = BlockTable.of(
        {key: facts[key] for key in sorted({key for key, _, _ in kept})},
        [(key, region) for key, region, _ in kept],
        [places[n] for _, _, n in kept],
    )
    common = None
    if common_nbytes is not None:
        common = StoredBytes(*places[common_source], common_nbytes)
    return Layout(tuple(packs), table, tuple(stored), common)


def _blocks(
    shards: Sequence[ShardSpec], rank: int
) -> tuple[dict[str, ArrayFacts], list[tuple[str, Region, int]]]:
    """Each array, and what is stored of it: key, region and number of the shard, sorted."""
    facts: dict[str, ArrayFacts] = {}
    dtypes = {dtype: dtype.value for dtype in DType}
    kept: dict[tuple[str, Shape], tuple[Region, int]] = {}
    for number, shard in enumerate(shards):
        (key, region), dtype, shape = shard.id, dtypes[shard.dtype], shard.array_shape
        earlier = facts.get(key)
        if earlier is None:
            facts[key] = ArrayFacts(dtype, shape)
        elif (earlier.dtype, earlier.shape) != (dtype, shape):
            stated = ArrayFacts(dtype, shape)
            raise PlanError(f"{key}: {earlier} and {stated} on rank {rank}", key=key)
        if 0 in region.shape and 0 not in shard.array_shape:
            continue
        before = kept.setdefault((key, region.offset), (region, number))
        if before[1] != number and 0 not in region.shape:
            raise CoverageError(
                f"{key}: {before[0]} and {region}, both on rank {rank}, are both main replicas and "
                "overlap; give one of them another replica_id",
                key=key,
            )
    return facts, sorted((key, region, number) for (key, _), (region, number) in kept.items())


def _bytes_item(source: int, key: str, name: str, nbytes: int) -> _Item:
    return _Item(source, key, _quoted(key, name), "U8", (nbytes,), nbytes, 1)


def _array_items(
    kept: Sequence[tuple[str, Region, int]], facts: dict[str, ArrayFacts]
) -> list[_Item]:
    dtypes = {name: DType(name) for name in {of_key.dtype for of_key in facts.values()}}
    stored = {
        name: (SAFETENSORS_NAMES.get(dtype, "U8"), dtype.itemsize, _last_dim(dtype))
        for name, dtype in dtypes.items()
    }
    items = []
    for key, (offset, shape), source in kept:
        dtype, itemsize, last_dim = stored[facts[key].dtype]
        name = _quoted(key, f"{key}@{joined(offset)}")
        nbytes = math.prod(shape) * itemsize
        items.append(_Item(source, key, name, dtype, (*shape, *last_dim), nbytes, itemsize))
    return items


def _last_dim(dtype: DType) -> Shape:
    """The further dim of elements that safetensors knows as several bytes."""
    is_bytes = dtype not in SAFETENSORS_NAMES and dtype.itemsize > 1
    return (dtype.itemsize,) if is_bytes else ()


def _quoted(key: str, name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"key {key!r} cannot be encoded as UTF-8", key=key) from error
    return quoted(name)


def _groups(items: Sequence[_Item], limits: PackLimits) -> Iterator[list[_Item]]:
    """The items of each pack: about equal bytes, in order."""
    total = sum(item.nbytes for item in items)
    wanted = max(1, min(limits.num_packs, total // limits.share_nbytes))
    most = min(limits.nbytes, -(-total // wanted))
    group: list[_Item] = []
    nbytes = header_nbytes = 0
    for item in items:
        described = 3 * len(item.name) + 24 * len(item.shape) + 100  # the key stands there twice
        if group and (
            nbytes + item.nbytes / 2 > most
            or nbytes + item.nbytes > limits.nbytes
            or len(group) == MAX_BLOCKS
            or header_nbytes + described > MAX_HEADER_NBYTES / 2
        ):
            yield group
            group, nbytes, header_nbytes = [], 0, 0
        group.append(item)
        nbytes += item.nbytes
        header_nbytes += described
    if group:
        yield group


def _places(group: Sequence[_Item]) -> Iterator[tuple[_Item, int, int]]:
    """Each item, its first byte after the header, and its first digest."""
    starts = accumulate((item.nbytes for item in group), initial=0)
    firsts = accumulate((num_ranges(item.nbytes) for item in group), initial=0)
    return zip(group, starts, firsts, strict=False)


def _metadata(
    rank: int,
    arrays: dict[str, ArrayFacts],
    grids: dict[str, Shape],
    features: Sequence[str],
) -> dict[str, str]:
    dtypes = {key: f.dtype for key, f in arrays.items() if DType(f.dtype) not in SAFETENSORS_NAMES}
    fields: dict[str, Any] = {
        "format": "dist_ckpt_strategies",
        "version": VERSION,
        "features": ",".join(features),
        "rank": rank,
        "range_nbytes": RANGE_NBYTES,
        "arrays": {key: f.shape for key, f in arrays.items()},
        "dtypes": dtypes,
        "objects": grids,
    }
    return {
        name: value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        for name, value in fields.items()
    }


def _pack(group: Sequence[_Item], metadata: dict[str, str]) -> PackLayout:
    nbytes = sum(item.nbytes for item in group)
    num_digests = sum(num_ranges(item.nbytes) for item in group)
    padding = -nbytes % _DIGEST_NBYTES
    items = list(group)
    if padding:
        items.append(_bytes_item(-1, "", PADDING, padding))
        num_digests += 1
    table_nbytes = (num_digests + NUM_TRAILING) * _DIGEST_NBYTES
    shape = (num_digests + NUM_TRAILING,)
    table = _Item(-1, "", quoted(DIGESTS), "U64", shape, table_nbytes, _DIGEST_NBYTES)
    parts = [f"{quoted(name)}:{quoted(value)}" for name, value in metadata.items()]
    before = f'{{"__metadata__":{{{",".join(parts)},"save":'
    described = [
        f"{item.name}:{{"
        f'"dtype":"{item.dtype}","shape":[{",".join(map(str, item.shape))}],'
        f'"data_offsets":[{start},{start + item.nbytes}]}}'
        for item, start, _ in _places([*items, table])
    ]
    after = "}," + ",".join(described) + "}"
    needed = LENGTH.size + len(before) + len(after) + _MAX_SAVE_ID
    data_start = -(-needed // _ALIGNMENT) * _ALIGNMENT
    sources, sizes = tuple(i.source for i in items), tuple(i.nbytes for i in items)
    total = data_start + nbytes + padding + table_nbytes
    return PackLayout(sources, sizes, num_digests, total, data_start, before, after)


_MAX_SAVE_ID = 128
"""Bytes that a header has for what is known only when it is written."""

Digests = npt.NDArray[np.uint64]


def table_nbytes(num_digests: int) -> int:
    """Bytes of the table of so many ranges."""
    return (num_digests + NUM_TRAILING) * _DIGEST_NBYTES


def sealed_table(digests: Digests, header: bytes) -> tuple[bytes, str]:
    """The bytes of the last tensor, and its own digest, which stands in the index."""
    of_ranges = digests.astype("<u8", copy=False).tobytes() + xxhash.xxh3_128_digest(header)
    table_digest = xxhash.xxh3_128(of_ranges)
    return of_ranges + table_digest.digest(), table_digest.hexdigest()


def opened_table(content: bytes, expected: str | None, path: str) -> Digests:
    """The digests of ranges in the bytes of the last tensor, which has been compared with itself.

    ``expected``: the digest that the index has of it, if there is one.

    Raises:
        CorruptCheckpointError: it is not what was written.
    """
    digest = xxhash.xxh3_128_digest(content[:-16])
    if digest != content[-16:] or (expected is not None and digest.hex() != expected):
        raise CorruptCheckpointError(
            f"{path} is damaged, or of another save: its digests have digest {digest.hex()}, "
            f"expected {expected or content[-16:].hex()}",
            path=path,
        )
    return np.frombuffer(content, "<u8", count=len(content) // _DIGEST_NBYTES - NUM_TRAILING)
