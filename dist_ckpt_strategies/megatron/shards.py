"""Megatron-Core's sharded tensors and objects in our own words, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica

from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, ShardId, ShardSpec
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.megatron.types import ShardedObject, ShardedTensor

StateDict = dict[Any, Any]

Message = list[Any]
"""What ranks send each other of a ShardedTensor or ShardedObject, of JSON types."""

_NUM_OBJECT_FIELDS = 4


def sharded_values(state_dict: StateDict) -> Iterator[Any]:
    """Every ShardedTensor and ShardedObject of a nested state dict, in its order.

    Raises:
        PlanError: a value is neither.
    """
    for value in nested_values(state_dict):
        if not isinstance(value, (ShardedTensor, ShardedObject)):
            raise PlanError(
                f"expected ShardedTensor and ShardedObject values, found {type(value).__name__}"
            )
        yield value


def mapped_values(convert: Callable[[Any], Any], state_dict: StateDict) -> StateDict:
    """A state dict of the same structure with every value converted; the old one is untouched."""
    mapped: StateDict = dict_list_map_outplace(convert, state_dict)
    return mapped


def is_main(value: Any) -> bool:
    """Whether this replica is the one that is written.

    Raises:
        PlanError: its replica_id is no number nor numbers.
    """
    return bool(is_main_replica(_replica(value)))


def shard_spec(tensor: Any) -> ShardSpec:
    """The spec of a ShardedTensor; errors as of ``message_of``."""
    found = shard_from_message(message_of(tensor))
    assert found is not None  # noqa: S101 - it is no ShardedObject
    return found


def shard_data(tensor: Any) -> torch.Tensor:
    """The data of a ShardedTensor, shaped like its region; a view, not a copy.

    Raises:
        PlanError: it has no data, or data of another shape or dtype than it says.
    """
    if tensor.data is None:
        raise PlanError(f"{tensor.key}: the ShardedTensor has no data to save", key=tensor.key)
    data: torch.Tensor = tensor.data.detach()
    found, expected = (tuple(data.shape), data.dtype), (_extent(tensor.local_shape), tensor.dtype)
    if found != expected:
        raise PlanError(
            f"{tensor.key}: the data is {found[0]} of {found[1]}, but the ShardedTensor says "
            f"{expected[0]} of {expected[1]}; make it anew from the data",
            key=tensor.key,
        )
    return data[(None,) * tensor.prepend_axis_num]


def object_id(sharded_object: Any) -> ObjectId:
    """The name of a ShardedObject.

    Raises:
        PlanError: its key is no text.
    """
    return ObjectId(
        _key(sharded_object),
        _extent(sharded_object.global_offset),
        _extent(sharded_object.global_shape),
    )


def metadata_tensor(array: ArraySpec) -> Any:
    """A ShardedTensor without data that stands for a whole stored array."""
    zeros = (0,) * len(array.shape)
    ones = (1,) * len(array.shape)
    dtype = getattr(torch, array.dtype.value)
    return ShardedTensor(array.key, None, dtype, array.shape, array.shape, zeros, ones)


def metadata_object(found: ObjectId) -> Any:
    """A ShardedObject without data that stands for a stored one."""
    return ShardedObject(found.key, None, found.shape, found.offset)


def message_of(value: Any) -> Message:
    """A ShardedTensor or ShardedObject without its data, as JSON types for other ranks.

    Raises:
        PlanError: its key is no text, its replica_id no number nor numbers, or a tensor has a
            flattened range.
    """
    where = [_key(value), _extent(value.global_shape), _extent(value.global_offset)]
    if isinstance(value, ShardedObject):
        return [*where, _replica(value)]
    if getattr(value, "flattened_range", None) is not None:
        raise PlanError(
            f"{value.key}: flattened ranges are not supported, Megatron-Core 0.16 removed them; "
            "use the fully_reshardable or dp_reshardable optimizer format",
            key=value.key,
        )
    fragments = value.axis_fragmentations
    return [
        *where,
        _replica(value),
        str(value.dtype).removeprefix("torch."),
        _extent(value.local_shape),
        None if fragments is None else _extent(fragments),
        int(value.prepend_axis_num),
        bool(value.allow_shape_mismatch),
    ]


def value_from_message(message: Message) -> Any:
    """The ShardedTensor or ShardedObject, without data, that ``message_of`` described."""
    key, shape, offset, replica = message[:_NUM_OBJECT_FIELDS]
    replica_id = replica if isinstance(replica, int) else _extent(replica)
    if len(message) == _NUM_OBJECT_FIELDS:
        return ShardedObject(key, None, _extent(shape), _extent(offset), replica_id)
    dtype, local_shape, fragments, prepend, may_mismatch = message[_NUM_OBJECT_FIELDS:]
    return ShardedTensor(
        key,
        None,
        getattr(torch, dtype),
        _extent(local_shape),
        _extent(shape),
        _extent(offset),
        None if fragments is None else _extent(fragments),
        replica_id,
        prepend,
        may_mismatch,
    )


def shard_from_message(message: Message) -> ShardSpec | None:
    """The spec of the ShardedTensor that ``message_of`` described; None of a ShardedObject.

    Prepended axes become dims of extent 1.

    Raises:
        PlanError: its dtype cannot be stored.
    """
    if len(message) == _NUM_OBJECT_FIELDS:
        return None
    key, shape, offset, _, dtype, local_shape, _, prepend, may_mismatch = message
    region = Region(tuple(offset), (1,) * prepend + tuple(local_shape))
    return ShardSpec(
        ShardId(key, region),
        tuple(shape),
        DType.named(dtype, key=key),
        is_main=is_main_message(message),
        may_mismatch=may_mismatch,
    )


def object_from_message(message: Message) -> ObjectId:
    """The name of the ShardedObject that ``message_of`` described."""
    key, shape, offset, _ = message
    return ObjectId(key, tuple(offset), tuple(shape))


def is_main_message(message: Message) -> bool:
    """Whether this replica is the one that is written."""
    replica = message[_NUM_OBJECT_FIELDS - 1]
    return not (replica if isinstance(replica, int) else any(replica))


def is_empty(value: Any) -> bool:
    """Whether this is a ShardedTensor without elements, which Megatron-Core's checks trip over."""
    return isinstance(value, ShardedTensor) and 0 in value.local_shape


def _replica(value: Any) -> int | Shape:
    replica = value.replica_id
    try:
        return _extent(replica) if isinstance(replica, Sequence) else int(replica)
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{value.key}: expected a number or several as replica_id, found {replica!r}",
            key=value.key,
        ) from error


def _key(value: Any) -> str:
    if not isinstance(value.key, str):
        raise PlanError(f"expected text as key of a {type(value).__name__}, found {value.key!r}")
    return value.key


def _extent(numbers: Any) -> Shape:
    return tuple(map(int, numbers))
