"""States as tensors and a description, for the files of local checkpoints, and back."""

import datetime as dt
import pathlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, load_content
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.shard_files import ShardDirectory, ShardReader
from dist_ckpt_strategies.local.shard_format import (
    BufferSpec,
    FilledShard,
    LocalShard,
    LocalShardId,
)
from dist_ckpt_strategies.local.state_dicts import (
    BasicTensorAwareStateDict,
    ListedTensors,
    TensorPlace,
)
from dist_ckpt_strategies.megatron.shards import sharded_values
from dist_ckpt_strategies.megatron.types import (
    TENSOR_AWARE_CLASS,
    ShardedObject,
    default_allowed,
    tensor_aware_class,
)
from dist_ckpt_strategies.storage.io_pool import limited

_NAME = "the local state"
_MEGATRON = "megatron"


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
    states = [BasicTensorAwareStateDict, MCoreTensorAwareStateDict, TensorPlace]
    return (*default_allowed(), *plain, *states, *allow)


def encode_state(
    state: Any, shard_id: LocalShardId, world_size: int, session_id: str, allowed: Allowed
) -> FilledShard:
    """Split a state into tensors and the rest, the state without them. It is left as it is.

    Raises:
        StrategyError: it is no TensorAwareStateDict.
        UnsafeObjectError: it holds an object of a class that is not allowed.
        PlanError: it is hollow, or a tensor cannot be stored.
    """
    if not (hasattr(state, "pop_tensors") and hasattr(state, "insert_tensors")):
        raise StrategyError(
            f"a {type(state).__qualname__} cannot be saved: expected a TensorAwareStateDict; "
            "wrap the state in BasicTensorAwareStateDict"
        )
    if state.is_hollow:
        raise PlanError("the state is hollow: call insert_tensors or init_tensors first")
    kind = _kind_of(state)
    if kind == _MEGATRON:
        state = MCoreTensorAwareStateDict(state.common_state_dict, state.sharded_state_dict)
    numbered = (f"tensor {number}" for number, _ in enumerate(state.tensors))
    names = state.names if isinstance(state, ListedTensors) else list(numbered)
    for name, tensor in zip(names, state.tensors, strict=True):
        require_plain(tensor, key=name)
    tensors = list(state.pop_tensors())
    try:
        hollow = {"devices": [tensor.device.type for tensor in tensors], "state": state}
        content = bytearray(dump_loadable(hollow, name=_NAME, allow=allowed, keeps_meta=True))
    finally:
        state.insert_tensors(tensors)
    buffers = [
        BufferSpec(name, DType.named(str(tensor.dtype), key=name), tuple(tensor.shape))
        for name, tensor in zip(names, tensors, strict=True)
    ]
    buffers.append(BufferSpec("description", DType.UINT8, (len(content),)))
    return FilledShard(
        LocalShard(shard_id, world_size, session_id, kind, tuple(buffers)),
        (*(tensor.detach() for tensor in tensors), torch.frombuffer(content, dtype=torch.uint8)),
    )


def _kind_of(state: Any) -> str:
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(state).__mro__}
    if TENSOR_AWARE_CLASS in names:
        return _MEGATRON
    if isinstance(state, MCoreTensorAwareStateDict):
        return "mcore"
    return "basic" if isinstance(state, BasicTensorAwareStateDict) else "own"


def decode_shard(filled: FilledShard, allowed: Allowed, *, on_host: bool = True) -> Any:
    """The state of a shard file.

    With ``on_host``, or without a GPU, its tensors stay there; else each is moved to the device
    that it was on.

    Raises:
        UnsafeObjectError: it needs a class that is not allowed.
        CorruptCheckpointError: its description makes no sense.
    """
    on_host = on_host or not torch.cuda.is_available()
    shard_id = filled.shard.shard_id
    *tensors, content = filled.payloads
    found = load_content(content.numpy().tobytes(), str(shard_id), _NAME, allowed)
    try:
        state, devices = found["state"], found["devices"]
        pairs = zip(tensors, devices, strict=True)
        state.insert_tensors([t if on_host else t.to(device) for t, device in pairs])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{shard_id}: the state's description is damaged: {error}"
        ) from error
    return _as_megatrons(state, devices) if filled.shard.kind == _MEGATRON else state


def _as_megatrons(state: MCoreTensorAwareStateDict, devices: Sequence[str]) -> Any:
    """The same as a state of Megatron-Core's class; each tensor remembers its device."""
    sharded = state.sharded_state_dict
    held = (v for v in sharded_values(sharded) if not isinstance(v, ShardedObject))
    for tensor, device in zip([v for v in held if v.data is not None], devices, strict=True):
        if device != tensor.data.device.type:
            tensor.orig_device = device
    return tensor_aware_class()(common=state.common_state_dict, sharded_state_dict=sharded)


def joined(states: Sequence[Any], shard: LocalShard, num_ranks: int) -> MCoreTensorAwareStateDict:
    """The states of shards of a save of another number of ranks as one; all share the common state.

    Raises a PlanError if they are not of Megatron-Core.
    """
    if not all(hasattr(state, "sharded_state_dict") for state in states):
        raise PlanError(
            f"iteration {shard.shard_id.save.iteration} was saved by {shard.world_size} ranks, "
            f"and {num_ranks} load it; states of kind {shard.kind} fit the number of ranks that "
            "saved them; MCoreTensorAwareStateDict fits any"
        )
    sharded = {str(number): state.sharded_state_dict for number, state in enumerate(states)}
    return MCoreTensorAwareStateDict(states[0].common_state_dict, sharded)


@limited
def read_common(directory: ShardDirectory, allowed: Allowed) -> Any:
    """The common state of the newest save here, of any good shard; None if there is none."""
    for one in sorted(directory.find(), key=lambda one: one.shard_id, reverse=True):
        with suppress(CheckpointError):
            reader = ShardReader(one.path)
            content = np.empty(reader.shard.buffers[-1].nbytes, np.uint8)
            if reader.read_buffer(-1, content) == reader.digests[-1]:
                break
    else:
        return None
    found = load_content(content.tobytes(), one.path, _NAME, allowed)
    return found["state"].common_state_dict
