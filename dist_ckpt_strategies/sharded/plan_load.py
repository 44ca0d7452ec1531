"""Decide which region of which stored array goes to which region of each wanted tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dist_ckpt_strategies.core.array import ArraySpec, ShardSpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import ShapeMismatchError


@dataclass(frozen=True, slots=True)
class ReadItem:
    """How one wanted shard is filled.

    Attributes:
        number: position of the shard among the wanted ones; the same shard may be wanted twice.
        array: the stored array.
        source: region of the stored array to read; None where the shard lies wholly beyond it.
        target: the same region, in coordinates of the wanted tensor.
        is_padded: whether a part of the tensor has no counterpart in storage and becomes zeros.
    """

    number: int
    array: ArraySpec
    source: Region | None
    target: Region | None
    is_padded: bool

    @property
    def nbytes(self) -> int:
        """Bytes that are read from storage."""
        return self.source.numel * self.array.dtype.itemsize if self.source else 0


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One rank's reads, one for each wanted shard, in their order."""

    reads: tuple[ReadItem, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that are read from storage."""
        return sum(read.nbytes for read in self.reads)


def build_load_plan(wants: Sequence[ShardSpec], stored: Mapping[str, ArraySpec]) -> LoadPlan:
    """Match what a rank wants with what a checkpoint holds.

    Where ``may_mismatch`` is set and shapes differ, the read is clipped to what is stored and the
    rest of the tensor is padding, as in Megatron-Core 0.15's TensorStore loader.

    Args:
        wants: shards in any order; the same one may come twice.
        stored: the array of each wanted key.

    Raises:
        ShapeMismatchError: shapes differ, or the shard reaches outside, and ``may_mismatch`` is
            not set; or the number of dims differs.
    """
    return LoadPlan(
        tuple(_shard_read(number, want, stored[want.key]) for number, want in enumerate(wants))
    )


def _shard_read(number: int, want: ShardSpec, array: ArraySpec) -> ReadItem:
    same_rank = len(array.shape) == len(want.array_shape)
    if array.shape != want.array_shape and not (want.may_mismatch and same_rank):
        raise ShapeMismatchError(
            f"{want.key}: shape {array.shape} in the checkpoint, {want.array_shape} requested; "
            "load it as it is stored, or set allow_shape_mismatch on the ShardedTensor",
            key=want.key,
        )
    if want.region.numel == 0:
        return ReadItem(number, array, None, None, is_padded=False)
    if Region.whole(array.shape).contains(want.region):
        return ReadItem(
            number, array, want.region, Region.whole(want.region.shape), is_padded=False
        )
    if not want.may_mismatch:
        raise ShapeMismatchError(
            f"{want.key}: {want.region} requested, outside the array's shape {array.shape}",
            key=want.key,
        )
    source = want.region.intersect(Region.whole(array.shape))
    if source is None:
        return ReadItem(number, array, None, None, is_padded=True)
    target = source.within(want.region)
    return ReadItem(number, array, source, target, is_padded=source.shape != want.region.shape)
