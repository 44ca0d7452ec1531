"""States of local checkpoints as packs, in memory, in files and as messages; and back.

Each tensor is an array of its own, under its place in the state; the object ``state`` is the state
without its tensors.
"""

import datetime as dt
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.core.array import DType, Region, ShardId, ShardSpec
from dist_ckpt_strategies.device import has_gpu, host_memory, require_plain, torch_dtype
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    default_allowed,
    dump_object,
    load_content,
    require_loadable,
)
from dist_ckpt_strategies.formats.pack import MAX_BLOCKS, Layout, PackLimits, lay_out
from dist_ckpt_strategies.formats.pack_read import BlockReads, read_content, read_jobs
from dist_ckpt_strategies.formats.pack_write import seal
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict
from dist_ckpt_strategies.local.plan import SaveId
from dist_ckpt_strategies.local.shard_files import (
    KIND_NOTE,
    SESSION_NOTE,
    STATE,
    ShardDirectory,
    ShardInfo,
    open_shard,
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
    tensor_aware_class,
)
from dist_ckpt_strategies.sharded.background import copy_contents
from dist_ckpt_strategies.sharded.save import Contents
from dist_ckpt_strategies.storage.io_pool import Deadline, Transfer, run_within
from dist_ckpt_strategies.storage.store import Bytes

_NAME = "the local state"
_MEGATRON = "megatron"
_NUM_READERS = min(4, os.cpu_count() or 1)


def default_local_allowed(allow: Allowed = ()) -> Allowed:
    """Classes and functions that a local state may hold: Megatron-Core's list, and ``allow``."""
    times = dt.datetime, dt.timedelta, dt.timezone
    plain = bytes, frozenset, slice, pathlib.PurePosixPath, *times
    states = BasicTensorAwareStateDict, MCoreTensorAwareStateDict, TensorPlace
    return (*default_allowed(), *plain, *states, *allow)


def split_state(state: Any, rank: int, session_id: str) -> tuple[Contents, Layout]:
    """The contents of a state, and the layout of its pack; the state is left as it is.

    ``rank`` is the global one. ``require_allowed`` looks at its classes, which takes longer.

    Raises:
        StrategyError: it is no TensorAwareStateDict.
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
    tensors = list(state.tensors)
    numbered = (f"tensor {number}" for number, _ in enumerate(tensors))
    texts = state.names if isinstance(state, ListedTensors) else numbered
    names = [text.encode(errors="backslashreplace").decode() for text in texts]
    for name, tensor in zip(names, tensors, strict=True):
        require_plain(tensor, key=name)
    content = _description(state, names)
    regions = [Region.whole(tuple(tensor.shape)) for tensor in tensors]
    shards = tuple(
        ShardSpec(ShardId(name, region), region.shape, DType.named(str(tensor.dtype), key=name))
        for name, region, tensor in zip(names, regions, tensors, strict=True)
    )
    layout = lay_out(
        shards,
        [(STATE, len(content))],
        rank=rank,
        limits=PackLimits(1 << 60),
        notes={SESSION_NOTE: session_id, KIND_NOTE: kind},
    )
    if len(layout.packs) > 1:
        raise PlanError(
            f"the local state has {len(tensors)} tensors; expected at most {MAX_BLOCKS}, with a "
            "header of 50 MB; join some of them"
        )
    plain = tuple(tensor.detach() for tensor in tensors)
    return Contents(shards, plain, objects=((STATE, content),)), layout


def require_allowed(contents: Contents, allowed: Allowed) -> None:
    """Raise an UnsafeObjectError if a state holds an object of a class that is not allowed."""
    ((_, description),) = contents.objects
    require_loadable(description, name=_NAME, allow=allowed)


def _description(state: Any, names: Sequence[str]) -> bytes:
    """The state without its tensors, and name and kind of device of each, pickled."""
    tensors = list(state.pop_tensors())
    try:
        devices = [tensor.device.type for tensor in tensors]
        hollow = {"names": names, "devices": devices, "state": state}
        return dump_object(hollow, name=_NAME, keeps_meta=True)
    finally:
        state.insert_tensors(tensors)


def _kind_of(state: Any) -> str:
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(state).__mro__}
    if TENSOR_AWARE_CLASS in names:
        return _MEGATRON
    if isinstance(state, MCoreTensorAwareStateDict):
        return "mcore"
    return "basic" if isinstance(state, BasicTensorAwareStateDict) else "own"


def sealed_image(state: Any, rank: int, allowed: Allowed) -> torch.Tensor:
    """The pack of a state that is of no save, in new host memory."""
    contents, layout = split_state(state, rank, "")
    require_allowed(contents, allowed)
    image = host_memory(layout.packs[0].nbytes, is_pinned=False)
    copy_contents(contents, layout, image)
    seal(layout.packs[0], image.numpy(), str(SaveId(0, "0")), 1)
    return image


@dataclass(frozen=True, slots=True)
class ReceivedPack:
    """A pack in memory that a peer has sent, as the place of one file; ``name`` is for messages."""

    name: str
    content: Bytes

    def path(self, name: str) -> str:
        """See Store."""
        return f"{name} {self.name}"

    def read(self, _name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        """See Store."""
        end = self.content.size if nbytes < 0 else byte_offset + nbytes
        return self.content[byte_offset:end].tobytes()

    def read_steps(self, _name: str, byte_offset: int, targets: Sequence[Bytes]) -> Iterator[int]:
        """See Directory. Nothing is copied where the target is that part of the memory itself."""
        for number, target in enumerate(targets, 1):
            part = self.content[byte_offset : byte_offset + target.size]
            if part.ctypes.data != target.ctypes.data:
                target[:] = part
            byte_offset += target.size
            yield number


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A shard in host memory, every byte compared with its digest.

    Attributes:
        info: what its pack says.
        tensors: by key.
        content: the state without them, pickled.
    """

    info: ShardInfo
    tensors: Mapping[str, torch.Tensor]
    content: bytes


def read_shard(place: Any, name: str, deadline: Deadline) -> LoadedShard:
    """Read a shard, or compare that of a ReceivedPack, whose memory becomes its tensors'.

    Raises:
        CorruptCheckpointError: it is damaged, or another shard than its name says.
        IncompleteCheckpointError: it is missing.
    """
    pack, info = run_within(deadline, place.path(name), lambda: open_shard(place, name))
    record, table = pack.record, pack.table
    if isinstance(place, ReceivedPack):
        memory = place.content[record.data_start :]
    else:
        memory = host_memory(record.nbytes - record.data_start, is_pinned=False).numpy()
    labels, starts, ranges, sizes = zip(*pack.tensors, strict=True)
    extents = np.array(sizes, np.int64).reshape(-1, 1)
    reads = BlockReads(
        packs={0: pack.record},
        place=np.array([(0, *at) for at in zip(starts, ranges, strict=True)], np.int64),
        extent=extents,
        offset=0 * extents,
        shape=extents,
        targets=[memory[at : at + size] for at, size in zip(starts, sizes, strict=True)],
        keys=labels,
    )
    tables = {pack.record: pack.digests}
    Transfer(read_jobs(place, reads, tables), _NUM_READERS).wait(deadline.left_s)
    tensors = {}
    for row, (number, (_, start, _)) in enumerate(
        zip(table.array.tolist(), table.place.tolist(), strict=True)
    ):
        dtype, shape = DType(table.facts[number].dtype), table.region(row).shape
        # Each has a storage of its own: saving one tensor would save its neighbours too otherwise.
        part = torch.from_numpy(memory[start : start + math.prod(shape) * dtype.itemsize])
        tensors[table.keys[number]] = part.view(torch_dtype(dtype)).reshape(shape)
    stored = dict(pack.objects)[STATE]
    content = memory[stored.byte_offset : stored.byte_offset + stored.nbytes].tobytes()
    return LoadedShard(info, tensors, content)


def decode_shard(shard: LoadedShard, allowed: Allowed, *, on_host: bool = True) -> Any:
    """The state of a shard.

    With ``on_host``, or without a GPU, its tensors stay there; else each is moved to the device
    that it was on.

    Raises:
        UnsafeObjectError: it needs a class that is not allowed.
        CorruptCheckpointError: its description makes no sense.
    """
    on_host = on_host or not has_gpu()
    shard_id = shard.info.shard_id
    hollow = load_content(shard.content, str(shard_id), _NAME, allowed)
    try:
        state, devices = hollow["state"], hollow["devices"]
        pairs = zip(map(shard.tensors.__getitem__, hollow["names"]), devices, strict=True)
        state.insert_tensors([t if on_host else t.to(device) for t, device in pairs])
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"{shard_id}: the state's description is damaged: {error}"
        ) from error
    return _as_megatrons(state, devices) if shard.info.kind == _MEGATRON else state


def _as_megatrons(state: MCoreTensorAwareStateDict, devices: Sequence[str]) -> Any:
    """The same as a state of Megatron-Core's class; each tensor remembers its device."""
    sharded = state.sharded_state_dict
    values = (v for v in sharded_values(sharded) if not isinstance(v, ShardedObject))
    for tensor, device in zip([v for v in values if v.data is not None], devices, strict=True):
        if device != tensor.data.device.type:
            tensor.orig_device = device
    return tensor_aware_class()(common=state.common_state_dict, sharded_state_dict=sharded)


def joined(states: Sequence[Any], info: ShardInfo, num_ranks: int) -> MCoreTensorAwareStateDict:
    """The states of shards of a save of another number of ranks as one; all share the common state.

    Raises a PlanError if they are not of Megatron-Core.
    """
    if not all(hasattr(state, "sharded_state_dict") for state in states):
        raise PlanError(
            f"iteration {info.shard_id.save.iteration} was saved by {info.world_size} ranks, "
            f"and {num_ranks} load it; states of kind {info.kind} fit the number of ranks that "
            "saved them; MCoreTensorAwareStateDict fits any"
        )
    sharded = {str(number): state.sharded_state_dict for number, state in enumerate(states)}
    return MCoreTensorAwareStateDict(states[0].common_state_dict, sharded)


def read_common(directory: ShardDirectory, allowed: Allowed) -> Any:
    """The common state of the newest save here, of any good shard; None if there is none.

    Blocks on storage.
    """
    place = directory.place
    for file in sorted(directory.find(), key=lambda file: file.shard_id, reverse=True):
        with suppress(CheckpointError):
            pack, _ = open_shard(place, file.name)
            stored, tables = dict(pack.objects)[STATE], {pack.record: pack.digests}
            content = read_content(place, pack.record, stored, STATE.key, tables)
            break
    else:
        return None
    hollow = load_content(content, place.path(file.name), _NAME, allowed)
    return hollow["state"].common_state_dict
