"""States as tensors and a description, for the files of local checkpoints, and back."""

from __future__ import annotations

import datetime as dt
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import xxhash

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, load_pickle
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.shard_files import ShardDirectory, ShardReader
from dist_ckpt_strategies.local.shard_format import (
    BASIC,
    MCORE,
    MEGATRON,
    OWN,
    RESHARDED_KINDS,
    BufferSpec,
    FilledShard,
    LocalShard,
    LocalShardId,
)
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
from dist_ckpt_strategies.storage.io_pool import limited

_NAME = "the local state"
_TENSOR, _OBJECT = "sharded tensor", "sharded object"


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
    state: Any, shard_id: LocalShardId, world_size: int, session_id: str, allowed: Allowed
) -> FilledShard:
    """Split a state into tensors and the rest. It is left as it is.

    Raises:
        StrategyError: it is no TensorAwareStateDict.
        UnsafeObjectError: it holds an object of a class that is not allowed.
        PlanError: it is hollow, or a tensor cannot be stored.
    """
    kind, tensors, hollow = _split(state)
    try:
        content = bytearray(dump_loadable(hollow, name=_NAME, allow=allowed))
    finally:
        if kind == OWN:
            state.insert_tensors(list(tensors.values()))
    buffers = []
    for name, tensor in tensors.items():
        require_plain(tensor, key=name)
        buffers.append(
            BufferSpec(name, DType.named(str(tensor.dtype), key=name), tuple(tensor.shape))
        )
    buffers.append(BufferSpec("description", DType.UINT8, (len(content),)))
    payloads = [tensor.detach() for tensor in tensors.values()]
    return FilledShard(
        LocalShard(shard_id, world_size, session_id, kind, tuple(buffers)),
        (*payloads, torch.frombuffer(content, dtype=torch.uint8)),
    )


def _split(state: Any) -> tuple[str, dict[str, torch.Tensor], dict[str, Any]]:
    """The kind of a state, its tensors by name, and the rest; one of a user's class is hollow."""
    if isinstance(state, BasicTensorAwareStateDict):
        hollow = {"devices": state.devices, "state": state.hollow}
        return BASIC, state.named_tensors(), hollow
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(state).__mro__}
    kind = MEGATRON if TENSOR_AWARE_CLASS in names else MCORE
    if not (kind == MEGATRON or isinstance(state, MCoreTensorAwareStateDict)):
        if not (hasattr(state, "pop_tensors") and hasattr(state, "insert_tensors")):
            raise StrategyError(
                f"a {type(state).__qualname__} cannot be saved: expected a TensorAwareStateDict; "
                "wrap the state in BasicTensorAwareStateDict"
            )
        _require_filled(state)
        taken = dict(enumerate(state.pop_tensors()))
        hollow = {"devices": [tensor.device.type for tensor in taken.values()], "state": state}
        return OWN, {f"tensor {number}": tensor for number, tensor in taken.items()}, hollow
    _require_filled(state)
    ours = _from_megatrons(state) if kind == MEGATRON else state
    tensors: dict[str, torch.Tensor] = {}

    def place(value: Any) -> Any:
        number = None
        if isinstance(value, ShardedObject):
            return (_OBJECT, message_of(value), value.data)
        if value.data is not None:
            number = len(tensors)
            tensors[f"{value.key} ({number})"] = value.data
        return (_TENSOR, message_of(value), number)

    sharded = mapped_values(place, ours.sharded_state_dict)
    common = take_tensors(ours.common_state_dict, tensors, "common")
    return kind, tensors, {"devices": ours.devices, "sharded": sharded, "common": common}


def _require_filled(state: Any) -> None:
    if state.is_hollow:
        raise PlanError("the state is hollow: call insert_tensors or init_tensors first")


def decode_shards(
    retrieved: Sequence[FilledShard], allowed: Allowed, *, on_host: bool = True
) -> Any:
    """The state of one shard file, or of several of one save.

    With ``on_host``, or without a GPU, its tensors stay there; else each is moved to the device
    that it was on.

    Raises:
        UnsafeObjectError: it needs a class that is not allowed.
        CorruptCheckpointError: its description makes no sense.
    """
    on_host = on_host or not torch.cuda.is_available()
    states = [_decoded(one, allowed, on_host=on_host) for one in retrieved]
    (state, *others), kind = states, retrieved[0].shard.kind
    if others:
        state = MCoreTensorAwareStateDict(  # Megatron-Core's fits one layout only
            state.common_state_dict,
            {str(number): state.sharded_state_dict for number, state in enumerate(states)},
            devices=[device for state in states for device in state.devices],
        )
    elif kind == MEGATRON:
        state = _as_megatrons(state)
    if not (on_host or kind == OWN):
        state.restore_tensor_device(non_blocking=False)
    return state


def _decoded(filled: FilledShard, allowed: Allowed, *, on_host: bool) -> Any:
    """A state of this package's classes, or of a user's."""
    shard = filled.shard
    kinds = [BASIC, OWN, *sorted(RESHARDED_KINDS)]
    if shard.kind not in kinds:
        raise StrategyError(
            f"{shard.shard_id}: a state of kind {shard.kind!r}: expected one of {kinds}"
        )
    *tensors, content = filled.payloads

    def fill(value: Any) -> Any:
        kind, message, held = value
        made = value_from_message(message)
        made.data = tensors[held] if kind == _TENSOR and held is not None else held
        return made

    found = load_pickle(content.numpy().tobytes(), str(shard.shard_id), _NAME, allowed)
    try:
        devices = found["devices"]
        if shard.kind == BASIC:
            return BasicTensorAwareStateDict(put_tensors(found["state"], tensors), devices=devices)
        if shard.kind == OWN:
            pairs = zip(tensors, devices, strict=True)
            state = found["state"]
            state.insert_tensors([t if on_host else t.to(device) for t, device in pairs])
            return state
        common = put_tensors(found["common"], tensors)
        sharded = mapped_values(fill, found["sharded"])
        return MCoreTensorAwareStateDict(common, sharded, devices=devices)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        CheckpointingException,
    ) as error:
        raise CorruptCheckpointError(
            f"{shard.shard_id}: the state's description is damaged: {error}"
        ) from error


@limited
def read_common(directory: ShardDirectory, allowed: Allowed) -> Any:
    """The common state of the newest save here, of any good shard; None if there is none."""
    for one in sorted(directory.find(), key=lambda one: one.shard_id, reverse=True):
        with suppress(CheckpointError), ShardReader(one.path) as reader:
            content = np.empty(reader.shard.buffers[-1].nbytes, np.uint8)
            reader.read(reader.shard.byte_offsets[-1], content)
            if xxhash.xxh3_64_intdigest(content.data) == reader.digests[-1]:
                break
    else:
        return None
    return load_pickle(content.tobytes(), one.path, _NAME, allowed)["common"]


def _from_megatrons(state: Any) -> MCoreTensorAwareStateDict:
    """Megatron-Core's state as one of ours."""
    for value in sharded_values(state.sharded_state_dict):
        message_of(value)  # refuses what a copy without data would lose
    devices = [
        getattr(tensor, "orig_device", tensor.data.device.type)
        for tensor in _held(state.sharded_state_dict)
    ]
    return MCoreTensorAwareStateDict(
        state.common_state_dict, state.sharded_state_dict, devices=devices
    )


def _as_megatrons(state: MCoreTensorAwareStateDict) -> Any:
    """The same as a state of Megatron-Core's class; each tensor remembers its device."""
    sharded = state.sharded_state_dict
    for tensor, device in zip(_held(sharded), state.devices, strict=True):
        if device != tensor.data.device.type:
            tensor.orig_device = device
    return tensor_aware_class()(common=state.common_state_dict, sharded_state_dict=sharded)


def _held(sharded: StateDict) -> Iterator[Any]:
    """The ShardedTensors that have data."""
    for value in sharded_values(sharded):
        if isinstance(value, ShardedTensor) and value.data is not None:
            yield value
