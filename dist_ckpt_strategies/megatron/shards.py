"""Megatron-Core's sharded tensors and objects in our own words, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica

from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, ShardId, ShardSpec
from dist_ckpt_strategies.core.region import Extent, Region
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.megatron.bases import ShardedObject, ShardedTensor

StateDict = dict[Any, Any]


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
    """The spec of a ShardedTensor; prepended axes become dims of extent 1.

    Raises:
        PlanError: it has a flattened range, a dtype that cannot be stored, or a key that is no
            text.
    """
    if getattr(tensor, "flattened_range", None) is not None:
        raise PlanError(
            f"{tensor.key}: flattened ranges are not supported, Megatron-Core 0.16 removed them; "
            "use the fully_reshardable or dp_reshardable optimizer format",
            key=tensor.key,
        )
    region = Region(_extent(tensor.global_offset), region_shape(tensor))
    return ShardSpec(
        ShardId(_key(tensor), region),
        _extent(tensor.global_shape),
        DType.named(str(tensor.dtype), key=tensor.key),
        is_main=is_main(tensor),
        may_mismatch=bool(tensor.allow_shape_mismatch),
    )


def region_shape(tensor: Any) -> Extent:
    """Shape of the shard in the global array: prepended axes have extent 1."""
    return (1,) * int(tensor.prepend_axis_num) + _extent(tensor.local_shape)


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


def metadata_to_wire(value: Any) -> list[Any]:
    """A ShardedTensor or ShardedObject without its data, as JSON types.

    Raises:
        PlanError: its key is no text, or its replica_id no number nor numbers.
    """
    where = [
        _key(value),
        _extent(value.global_shape),
        _extent(value.global_offset),
        _replica(value),
    ]
    if isinstance(value, ShardedObject):
        return where
    fragments = value.axis_fragmentations
    return [
        *where,
        str(value.dtype).removeprefix("torch."),
        _extent(value.local_shape),
        None if fragments is None else _extent(fragments),
        int(value.prepend_axis_num),
        bool(value.allow_shape_mismatch),
    ]


def metadata_from_wire(wire: list[Any]) -> Any:
    """The ShardedTensor or ShardedObject, without data, that ``metadata_to_wire`` described."""
    key, shape, offset, replica = wire[:4]
    replica_id = replica if isinstance(replica, int) else _extent(replica)
    if len(wire) == 4:  # noqa: PLR2004 - an object's fields
        return ShardedObject(key, None, _extent(shape), _extent(offset), replica_id)
    dtype, local_shape, fragments, prepend, may_mismatch = wire[4:]
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


def is_empty(value: Any) -> bool:
    """Whether this is a ShardedTensor without elements, which Megatron-Core's checks trip over."""
    return isinstance(value, ShardedTensor) and 0 in value.local_shape


def _replica(value: Any) -> int | Extent:
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


def _extent(numbers: Any) -> Extent:
    return tuple(map(int, numbers))
