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
        array: the stored array.
        source: region of the stored array to read; None where the shard lies wholly beyond it.
        target: the same region, in coordinates of the wanted tensor.
        is_padded: whether a part of the tensor has no counterpart in storage and becomes zeros.
    """

    array: ArraySpec
    source: Region | None
    target: Region | None
    is_padded: bool


def build_load_plan(wants: Sequence[ShardSpec], stored: Mapping[str, ArraySpec]) -> list[ReadItem]:
    """Match what a rank wants with what a checkpoint holds: one item for each wanted shard.

    Where ``may_mismatch`` is set and shapes differ, the read is clipped to what is stored and the
    rest of the tensor is padding, as in Megatron-Core 0.15's TensorStore loader.

    Args:
        wants: shards in any order; the same one may come twice.
        stored: the array of each wanted key.

    Raises:
        ShapeMismatchError: shapes differ, or the shard reaches outside, and ``may_mismatch`` is
            not set; or the number of dims differs.
    """
    return [_read_item(want, stored[want.key]) for want in wants]


def _read_item(want: ShardSpec, array: ArraySpec) -> ReadItem:
    same_rank = len(array.shape) == len(want.array_shape)
    if array.shape != want.array_shape and not (want.may_mismatch and same_rank):
        raise ShapeMismatchError(
            f"{want.key}: shape {array.shape} in the checkpoint, {want.array_shape} requested; "
            "load it as it is stored, or set allow_shape_mismatch on the ShardedTensor",
            key=want.key,
        )
    if want.region.numel == 0:
        return ReadItem(array, None, None, is_padded=False)
    if Region.whole(array.shape).contains(want.region):
        return ReadItem(array, want.region, Region.whole(want.region.shape), is_padded=False)
    if not want.may_mismatch:
        raise ShapeMismatchError(
            f"{want.key}: {want.region} requested, outside the array's shape {array.shape}",
            key=want.key,
        )
    source = want.region.intersect(Region.whole(array.shape))
    if source is None:
        return ReadItem(array, None, None, is_padded=True)
    target = source.within(want.region)
    return ReadItem(array, source, target, is_padded=source.shape != want.region.shape)
