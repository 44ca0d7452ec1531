"""How sharded state dicts get into files and out of them: our class's, and Megatron-Core's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.plain_values import Extension
from dist_ckpt_strategies.local.state_codecs import StateCodec
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    message_of,
    shard_spec,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import (
    TENSOR_AWARE_CLASS,
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    tensor_aware_class,
)


def mcore_codec() -> StateCodec:
    """The codec of MCoreTensorAwareStateDict."""
    return StateCodec(
        "mcore",
        MCoreTensorAwareStateDict,
        _to_value_of_ours,
        _from_value,
        extensions=_EXTENSIONS,
        from_several=_joined,
    )


def megatron_codec() -> StateCodec:
    """The codec of the class of that name that Megatron-Core has where NVRx is installed.

    What it saved is of its class again, and of ours where the number of ranks is another one:
    Megatron-Core's cannot give a state dict in another layout.
    """
    return StateCodec(
        "megatron",
        TENSOR_AWARE_CLASS,
        _to_value_of_megatrons,
        _megatrons_from_value,
        extensions=_EXTENSIONS,
        from_several=lambda states: _joined([_as_ours(state) for state in states]),
        devices=_homes_of_megatrons,
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A ShardedTensor without data, and the number of the tensor that is its data."""

    bare: Any
    place: int | None


def _described(wire: list[Any]) -> Any:
    """What was described, without data; a ValueError where Megatron-Core finds no sense in it."""
    try:
        return value_from_message(wire)
    except CheckpointingException as error:
        raise ValueError(str(error)) from error


def _placed_from(content: Sequence[Any]) -> _Placed:
    wire, place = content
    return _Placed(_described(wire), place)


def _object_from(content: Sequence[Any]) -> Any:
    wire, data = content
    made = _described(wire)
    made.data = data
    return made


_EXTENSIONS = (
    Extension("sharded tensor", _Placed, lambda p: [message_of(p.bare), p.place], _placed_from),
    Extension("sharded object", ShardedObject, lambda o: [message_of(o), o.data], _object_from),
)


def _to_value(common: StateDict, sharded: StateDict) -> dict[str, Any]:
    """The tensors, then the ShardedTensors with the number of each one's."""
    tensors: list[torch.Tensor] = []

    def place(value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        if value.data is None:
            return _Placed(value, None)
        tensors.append(value.data.detach())
        return _Placed(value.without_data(), len(tensors) - 1)

    placed = mapped_values(place, sharded)
    return {"tensors": tensors, "sharded": placed, "common": common}


def _filled(value: Mapping[str, Any]) -> StateDict:
    """The ShardedTensors with their tensors, and ShardedObjects."""
    tensors = value["tensors"]

    def fill(found: Any) -> Any:
        if not isinstance(found, _Placed):
            return found
        found.bare.data = None if found.place is None else tensors[found.place]
        return found.bare

    return mapped_values(fill, value["sharded"])


def _from_value(value: Mapping[str, Any], devices: Sequence[str]) -> MCoreTensorAwareStateDict:
    homes = devices[: len(value["tensors"])]
    return MCoreTensorAwareStateDict(value["common"], _filled(value), devices=homes)


def _joined(states: Sequence[MCoreTensorAwareStateDict]) -> MCoreTensorAwareStateDict:
    """A state that holds what all of these do."""
    return MCoreTensorAwareStateDict(
        states[0].common_state_dict,
        {str(number): state.sharded_state_dict for number, state in enumerate(states)},
        devices=[device for state in states for device in state.devices],
    )


def _to_value_of_ours(state: MCoreTensorAwareStateDict) -> dict[str, Any]:
    """Raises PlanError where it is hollow."""
    _require_full(state)
    return _to_value(state.common_state_dict, state.sharded_state_dict)


def _require_full(state: Any) -> None:
    if state.is_hollow:
        raise PlanError("the state is hollow: call insert_tensors or init_tensors first")


def _to_value_of_megatrons(state: Any) -> dict[str, Any]:
    """Raises PlanError where it is hollow, or holds what is no whole shard."""
    _require_full(state)
    for value in sharded_values(state.sharded_state_dict):
        if isinstance(value, ShardedTensor):
            shard_spec(value)
    return _to_value(state.common_state_dict, state.sharded_state_dict)


def _megatrons_from_value(value: Mapping[str, Any], devices: Sequence[str]) -> Any:
    """Its tensors are on the host; each remembers its device as Megatron-Core's have it."""
    sharded = _filled(value)
    for tensor, device in zip(_held(sharded), devices, strict=False):
        home = torch.device(device).type
        if home != tensor.data.device.type:
            tensor.orig_device = home
    return tensor_aware_class()(common=value["common"], sharded_state_dict=sharded)


def _homes_of_megatrons(state: Any) -> list[str]:
    """The kind of device that each tensor belongs to."""
    return [
        getattr(tensor, "orig_device", tensor.data.device.type)
        for tensor in _held(state.sharded_state_dict)
    ]


def _as_ours(state: Any) -> MCoreTensorAwareStateDict:
    """The same content in the class of this package."""
    return MCoreTensorAwareStateDict(
        state.common_state_dict, state.sharded_state_dict, devices=_homes_of_megatrons(state)
    )


def _held(sharded: StateDict) -> Iterator[Any]:
    """The ShardedTensors that have data."""
    for value in sharded_values(sharded):
        if isinstance(value, ShardedTensor) and value.data is not None:
            yield value
