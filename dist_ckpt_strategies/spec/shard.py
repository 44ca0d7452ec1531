"""What one rank holds, or wants, of one array: the noun everything else is planned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent, Region


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """Names a shard, whichever rank or replica holds it."""

    key: str
    region: Region


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One replica of one shard, without its data.

    Attributes:
        id: key of the array and the box of it.
        array_shape: shape of the whole array as this rank sees it, in elements.
        dtype: element type.
        is_main: whether this replica is the one that is written.
        may_mismatch: whether the stored array may have another shape (padded vocabularies).
    """

    id: ShardId
    array_shape: Extent
    dtype: DType
    is_main: bool = True
    may_mismatch: bool = False

    @property
    def key(self) -> str:
        """Key of the array."""
        return self.id.key

    @property
    def region(self) -> Region:
        """Box of the array, in elements."""
        return self.id.region

    @property
    def nbytes(self) -> int:
        """Payload size in bytes."""
        return self.region.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class RankShards:
    """All the shards a rank holds (save) or wants (load).

    Attributes:
        rank: the global rank.
        shards: in any order.
    """

    rank: int
    shards: tuple[ShardSpec, ...]


Wire = list[Any]
"""What travels between ranks in place of a spec: JSON types only, nothing to unpickle."""


def shard_to_wire(spec: ShardSpec) -> Wire:
    """The spec as JSON types."""
    return [
        spec.key,
        list(spec.region.offset),
        list(spec.region.shape),
        list(spec.array_shape),
        spec.dtype.value,
        int(spec.is_main),
        int(spec.may_mismatch),
    ]


def shard_from_wire(wire: Wire) -> ShardSpec:
    """The spec that ``shard_to_wire`` made."""
    key, offset, shape, array_shape, dtype, is_main, may_mismatch = wire
    return ShardSpec(
        ShardId(str(key), Region(tuple(map(int, offset)), tuple(map(int, shape)))),
        tuple(map(int, array_shape)),
        DType.named(dtype, key=key),
        is_main=bool(is_main),
        may_mismatch=bool(may_mismatch),
    )
