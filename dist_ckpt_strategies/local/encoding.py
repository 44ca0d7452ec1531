"""States as tensors and a description, for the files of local checkpoints, and back."""

from __future__ import annotations

import datetime as dt
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.device import dtype_of, require_plain
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, load_pickle
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.replicate import FilledShard
from dist_ckpt_strategies.local.shard_format import BufferSpec, LocalShard, LocalShardId
from dist_ckpt_strategies.local.state_dicts import (
    BasicTensorAwareStateDict,
    TensorPlace,
    put_tensors,
    take_tensors,
)
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
    default_allowed,
    tensor_aware_class,
)

_BASIC, _MCORE, _MEGATRON = "basic", "mcore", "megatron"
_NAME = "the local state"
_TENSOR, _OBJECT = "sharded tensor", "sharded object"

RESHARDED_KINDS = frozenset({_MCORE, _MEGATRON})
"""Kinds whose shard files another number of ranks can use."""


def default_local_allowed(allow: Allowed = ()) -> Allowed:
    """Classes and functions that a local state may hold: Megatron-Core's list, and ``allow``."""
    plain = [
        bytes,
        frozenset,
        slice,
        dt.datetime,
        dt.timedelta,
        dt.timezone,
        pathlib.PurePosixPath,
    ]
    return (*default_allowed(), *plain, TensorPlace, *allow)


def encode_state(
    state: Any, shard_id: LocalShardId, *, world_size: int, session_id: str, allowed: Allowed
) -> FilledShard:
    """Split a state into tensors and the rest. It is left as it is.

    Raises:
        StrategyError: it is of another class than those of this package and Megatron-Core's.
        UnsafeObjectError: it holds an object of a class that is not allowed.
        PlanError: it is hollow, or a tensor cannot be stored.
    """
    kind, frame, tensors, devices = _split(state)
    content = bytearray(dump_loadable(frame, name=_NAME, allow=allowed))
    buffers = []
    for number, (name, tensor) in enumerate(tensors.items()):
        require_plain(tensor, key=name)
        device = devices[number] if number < len(devices) else ""
        buffers.append(BufferSpec(name, dtype_of(tensor, key=name), tuple(tensor.shape), device))
    buffers.append(BufferSpec("description", DType.UINT8, (len(content),), ""))
    summary = {} if kind == _BASIC else _summary(frame["common"])
    shard = LocalShard(shard_id, world_size, session_id, kind, summary, tuple(buffers))
    payloads = [tensor.detach() for tensor in tensors.values()]
    return FilledShard(shard, (*payloads, torch.frombuffer(content, dtype=torch.uint8)))


def decode_state(retrieved: FilledShard, *, allowed: Allowed) -> Any:
    """The state that was stored; its tensors are on the host.

    Raises:
        UnsafeObjectError: it needs a class that is not allowed.
        CorruptCheckpointError: its description makes no sense.
    """
    shard = retrieved.shard
    if shard.kind not in _MAKERS:
        raise StrategyError(
            f"{shard.shard_id}: a state of kind {shard.kind!r}: expected one of {sorted(_MAKERS)}"
        )
    devices = [buffer.device for buffer in shard.buffers if buffer.device]
    try:
        *tensors, content = retrieved.payloads
        found = load_pickle(content.numpy().tobytes(), str(shard.shard_id), _NAME, allowed)
        return _MAKERS[shard.kind](found, tensors, devices)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        CheckpointingException,
    ) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(
            f"{shard.shard_id}: the state's description is damaged: {error}"
        ) from error


def decode_shards(retrieved: Sequence[FilledShard], *, allowed: Allowed) -> Any:
    """The state of one shard file, or of several of one save; errors as in ``decode_state``."""
    states = [decode_state(shard, allowed=allowed) for shard in retrieved]
    return states[0] if len(states) == 1 else _joined(states)


_Split = tuple[str, Any, Mapping[str, torch.Tensor], Sequence[str]]
"""The kind of a state, the state with numbers in place of its tensors, those by name, first those
of the state, then those of the common state, and the kind of device of each tensor of the state."""


def _split(state: Any) -> _Split:
    if isinstance(state, BasicTensorAwareStateDict):
        return _BASIC, state.frame, state.named_tensors(), state.devices
    if isinstance(state, MCoreTensorAwareStateDict):
        return _split_sharded(_MCORE, state, state.devices)
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(state).__mro__}
    if TENSOR_AWARE_CLASS in names:
        return _split_sharded(_MEGATRON, state, None)
    raise StrategyError(
        f"a {type(state).__qualname__} cannot be saved: expected BasicTensorAwareStateDict, "
        "MCoreTensorAwareStateDict or Megatron-Core's class of that name; wrap the state in "
        "BasicTensorAwareStateDict"
    )


def _split_sharded(kind: str, state: Any, devices: Sequence[str] | None) -> _Split:
    if state.is_hollow:
        raise PlanError("the state is hollow: call insert_tensors or init_tensors first")
    tensors: dict[str, torch.Tensor] = {}

    def place(value: Any) -> Any:
        if isinstance(value, ShardedObject):
            return (_OBJECT, message_of(value), value.data)
        if not isinstance(value, ShardedTensor):
            return value
        if kind == _MEGATRON:
            shard_spec(value)
        number = None
        if value.data is not None:
            number = len(tensors)
            tensors[f"{value.key} ({number})"] = value.data
        return (_TENSOR, message_of(value.without_data()), number)

    sharded = state.sharded_state_dict
    placed = mapped_values(place, sharded)
    homes = _homes_of(sharded) if devices is None else devices
    common = take_tensors(state.common_state_dict, tensors, "common")
    return kind, {"sharded": placed, "common": common}, tensors, homes


def _summary(common: Any) -> dict[str, Any]:
    """The common state for readers of the header alone, where JSON can hold it."""
    try:
        json.dumps(common, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return {}
    return {"common": common}


def _basic(frame: Any, tensors: Sequence[torch.Tensor], devices: Sequence[str]) -> Any:
    return BasicTensorAwareStateDict(put_tensors(frame, tensors), devices=devices)


def _mcore(found: Any, tensors: Sequence[torch.Tensor], devices: Sequence[str]) -> Any:
    common, sharded = _filled(found, tensors)
    return MCoreTensorAwareStateDict(common, sharded, devices=devices)


def _megatrons(found: Any, tensors: Sequence[torch.Tensor], devices: Sequence[str]) -> Any:
    """Its tensors are on the host; each remembers its device as Megatron-Core's have it."""
    common, sharded = _filled(found, tensors)
    for tensor, device in zip(_held(sharded), devices, strict=False):
        home = torch.device(device).type
        if home != tensor.data.device.type:
            tensor.orig_device = home
    return tensor_aware_class()(common=common, sharded_state_dict=sharded)


_MAKERS: Mapping[str, Callable[[Any, Sequence[torch.Tensor], Sequence[str]], Any]] = {
    _BASIC: _basic,
    _MCORE: _mcore,
    _MEGATRON: _megatrons,
}


def _filled(found: Any, tensors: Sequence[torch.Tensor]) -> tuple[StateDict, StateDict]:
    """The common state, and the ShardedTensors and ShardedObjects with what they hold."""

    def fill(value: Any) -> Any:
        if not isinstance(value, tuple) or value[0] not in {_TENSOR, _OBJECT}:
            return value
        kind, message, held = value
        made = value_from_message(message)
        made.data = tensors[held] if kind == _TENSOR and held is not None else held
        return made

    return put_tensors(found["common"], tensors), mapped_values(fill, found["sharded"])


def _homes_of(sharded: StateDict) -> list[str]:
    """The kind of device that each tensor of Megatron-Core's state belongs to."""
    return [getattr(tensor, "orig_device", tensor.data.device.type) for tensor in _held(sharded)]


def _held(sharded: StateDict) -> Iterator[Any]:
    """The ShardedTensors that have data."""
    for value in sharded_values(sharded):
        if isinstance(value, ShardedTensor) and value.data is not None:
            yield value


def _joined(states: Sequence[Any]) -> MCoreTensorAwareStateDict:
    """A state of ours that holds what all of these do; Megatron-Core's fits one layout only."""
    devices = [
        device
        for state in states
        for device in getattr(state, "devices", None) or _homes_of(state.sharded_state_dict)
    ]
    return MCoreTensorAwareStateDict(
        states[0].common_state_dict,
        {str(number): state.sharded_state_dict for number, state in enumerate(states)},
        devices=devices,
    )
