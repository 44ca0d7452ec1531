"""Save and load of ("zarr", 1) between Megatron-Core's types and the plan and its runner.

The strategy classes and the entry points share these four functions.
"""

from __future__ import annotations

import difflib
import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import may_overlap, require_plain, torch_dtype
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    DuplicateWriterError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.megatron.bases import ShardedObject, ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main,
    mapped_values,
    metadata_object,
    metadata_tensor,
    object_id,
    shard_data,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.plan.load import build_load_plan
from dist_ckpt_strategies.plan.save import ObjectHolding, SavePlan, build_save_plan
from dist_ckpt_strategies.run.load import run_load
from dist_ckpt_strategies.run.report import LoadReport, SaveReport
from dist_ckpt_strategies.run.save import run_save
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.shard import (
    RankShards,
    ShardId,
    ShardSpec,
    shard_from_wire,
    shard_to_wire,
)
from dist_ckpt_strategies.storage.base import ArrayStore
from dist_ckpt_strategies.storage.file_access import file_access
from dist_ckpt_strategies.storage.files import require_directory, storage_error
from dist_ckpt_strategies.storage.objects import (
    Allowed,
    dump_object,
    object_ids,
    object_path,
    read_object,
    remove_object,
    write_dumped,
)
from dist_ckpt_strategies.storage.publication import (
    has_withdrawn_marker,
    is_finished,
    leave_token,
    make_way,
    remove_token,
    require_token,
    withdraw_marker,
)
from dist_ckpt_strategies.storage.stores import open_array_store
from dist_ckpt_strategies.storage.transfers import Job, run_pooled
from dist_ckpt_strategies.storage.zarr2 import Zarr2Layout

_OBJECT_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Holdings:
    """What one rank brings to a save; its objects as the bytes that will be written."""

    specs: tuple[ShardSpec, ...]
    tensors: dict[ShardId, torch.Tensor]
    objects: dict[ObjectId, bytes]


_Facts = list[Any]
"""What a rank holds, as far as the plan depends on it, of JSON types."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """One rank's share of a plan, and what it followed from.

    Attributes:
        facts: digest of what all ranks hold.
        plan: this rank's share.
        keys: of all arrays and objects.
    """

    facts: str
    plan: SavePlan
    keys: frozenset[str]


class PlanMemory:
    """Keeps the last plan, because a training run saves the same shards again and again.

    One to each strategy. It holds no tensor.
    """

    def __init__(self) -> None:
        self.last: _Planned | None = None


def save_format1(
    state_dict: StateDict,
    root: Path,
    comm: Communicator,
    options: Options,
    memory: PlanMemory,
    *,
    keeps_old: bool = False,
) -> SaveReport:
    """Write the sharded part of a checkpoint, durably, but not its marker.

    Collective. An earlier checkpoint in the directory loses its marker before anything else.

    Args:
        state_dict: what to save.
        root: the checkpoint directory, which exists.
        comm: ranks that save together.
        options: timeout and memory budget.
        memory: the plan is taken from here if every rank holds what it held at the last save.
        keeps_old: leave the earlier checkpoint whole until this one is known to be one that can be
            saved. Not where the caller has replaced ``common.pt`` already.

    Raises:
        PlanError: the main replicas do not make up the arrays.
        CheckpointExistsError: the directory holds other arrays, and no marker.
        StorageError: a write failed here; a PeerError of the same class on the other ranks.
    """
    held: list[tuple[_Holdings, ArrayStore, _Facts]] = []
    is_checkpoint = False

    def describe() -> Any:
        nonlocal is_checkpoint
        if comm.rank == 0:
            require_directory(root)
            if not keeps_old:
                withdraw_marker(root)
            is_checkpoint = is_finished(root) if keeps_old else has_withdrawn_marker(root)
        mine = _holdings(state_dict)
        facts = _facts(mine, options)
        held.append((mine, open_array_store(root, options), facts))
        return [_digest(facts), memory.last and memory.last.facts, uuid.uuid4().hex]

    answers = agree_and_gather(comm, describe)
    mine, store, facts = held[0]
    token = answers[0][-1]
    planned = _planned(comm, facts, [(digest, last) for digest, last, _ in answers], memory)

    def clear() -> None:
        make_way(root, planned.keys, is_checkpoint=is_checkpoint)
        leave_token(root, token)

    def write_objects() -> None:
        if comm.rank == 0:
            remove_token(root, token)  # every rank has seen it
        _write_objects(root, mine.objects, options)

    agree_on_first(comm, clear)
    owner = f"rank {comm.global_rank(0)}"
    agree(comm, lambda: require_token(root, token, owner, options.timeout_s))
    return run_save(planned.plan, mine.tensors, store, comm, options, also=write_objects)


def _facts(mine: _Holdings, options: Options) -> _Facts:
    shards = [shard_to_wire(spec) for spec in mine.specs]
    objects = [(found.key, found.offset, found.shape) for found in sorted(mine.objects)]
    return [shards, objects, options.max_inflight_bytes]


def _digest(facts: Any) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())


def _planned(
    comm: Communicator,
    own: _Facts,
    described: Sequence[tuple[str, str | None]],
    memory: PlanMemory,
) -> _Planned:
    """The last plan, if all ranks have one that follows from what they hold now; else a new one.

    Collective.

    Args:
        comm: ranks that save together.
        own: what this rank holds.
        described: for each rank the digest of that, and what its last plan followed from.
        memory: this rank's last plan.
    """
    digest = _digest([mine for mine, _ in described])
    if memory.last is not None and all(last == digest for _, last in described):
        return memory.last
    everyone = comm.all_gather(own)
    memory.last = None
    memory.last = agree(comm, lambda: _new_plan(comm, digest, everyone))
    return memory.last


def _new_plan(comm: Communicator, digest: str, everyone: Sequence[_Facts]) -> _Planned:
    requests: list[RankShards] = []
    holdings: list[ObjectHolding] = []
    for rank, (shards, objects, _) in enumerate(everyone):
        global_rank = comm.global_rank(rank)
        requests.append(RankShards(global_rank, tuple(map(shard_from_wire, shards))))
        holdings += [
            ObjectHolding(ObjectId(key, tuple(offset), tuple(shape)), global_rank)
            for key, offset, shape in objects
        ]
    budget = min(budget for _, _, budget in everyone)
    plan = build_save_plan(requests, holdings, max_inflight_bytes=budget)
    keys = {creation.array.key for creation in plan.creations}
    return _Planned(
        digest,
        plan.share_of(comm.global_rank(comm.rank)),
        frozenset(keys.union(holding.id.key for holding in holdings)),
    )


def load_format1(
    state_dict: StateDict,
    root: Path,
    comm: Communicator,
    options: Options,
    allowed: Callable[[], Allowed],
    deliver: Callable[[Any, torch.Tensor], torch.Tensor],
) -> tuple[StateDict, LoadReport]:
    """Read what the state dict asks for; a state dict of the same structure, and a report.

    Collective, with one meeting. A ShardedTensor with data of the stored dtype is filled in place
    and its own tensor is loaded. Otherwise that is a new tensor of the stored dtype.

    Args:
        state_dict: what to load.
        root: the checkpoint directory.
        comm: ranks that load together.
        options: timeout and memory budget.
        allowed: gives the classes that objects may be unpickled to.
        deliver: turns a ShardedTensor and what was loaded for it into the result.

    Raises:
        ShapeMismatchError, ArrayNotFoundError, StorageError: on every rank where one failed.
    """

    def read() -> tuple[dict[int, Any], LoadReport]:
        values = list(sharded_values(state_dict))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        objects = [value for value in values if isinstance(value, ShardedObject)]
        found, report = _read(tensors, root, options)
        loaded = {id(v): deliver(v, t) for v, t in zip(tensors, found, strict=True)}
        return loaded | _read_objects(objects, root, allowed, options), report

    loaded, report = agree(comm, read)
    return mapped_values(lambda value: loaded[id(value)], state_dict), report


def stored_metadata(root: Path, *, with_objects: bool) -> StateDict:
    """ShardedTensors (and objects) without data for all that a checkpoint holds. Rank-local.

    Raises:
        CheckpointNotFoundError: the directory does not exist.
        CorruptCheckpointError: the description of an array cannot be read.
    """
    require_directory(root)
    layout = Zarr2Layout(root)
    found: StateDict = {key: metadata_tensor(layout.find(key)) for key in layout.keys()}
    if with_objects:
        found.update({name.unique_key: metadata_object(name) for name in object_ids(root)})
    return found


def remove_arrays(root: Path, key_prefix: str) -> int:
    """Remove every array and object whose key starts with a prefix; returns how many.

    Rank-local: one rank calls it.
    """
    require_directory(root)
    layout = Zarr2Layout(root)
    keys = [key for key in layout.keys() if key.startswith(key_prefix)]
    for key in sorted(keys, key=len, reverse=True):
        layout.remove(key)
    names = [name for name in object_ids(root) if name.key.startswith(key_prefix)]
    for name in names:
        remove_object(root, name)
    return len(keys) + len(names)


def _holdings(state_dict: StateDict) -> _Holdings:
    specs: list[ShardSpec] = []
    tensors: dict[ShardId, torch.Tensor] = {}
    objects: dict[ObjectId, bytes] = {}
    for value in sharded_values(state_dict):
        if isinstance(value, ShardedObject):
            if is_main(value):
                name = object_id(value)
                _require_new(name, objects)
                objects[name] = dump_object(value.data, name=name.unique_key)
            continue
        spec = shard_spec(value)
        specs.append(spec)
        if spec.is_main:
            if value.data is not None:
                require_plain(value.data, key=spec.key)
            tensors[spec.id] = shard_data(value)
    return _Holdings(tuple(specs), tensors, objects)


def _require_new(name: ObjectId, objects: Mapping[ObjectId, bytes]) -> None:
    if name in objects:
        raise DuplicateWriterError(
            f"{name.unique_key}: two main replicas on this rank; give one of them another "
            "replica_id",
            key=name.key,
        )


def _write_objects(root: Path, objects: Mapping[ObjectId, bytes], options: Options) -> None:
    jobs = (
        Job(name.key, object_path(root, name), partial(write_dumped, root, name, content))
        for name, content in objects.items()
    )
    run_pooled(jobs, _OBJECT_THREADS, _unexpected).wait(options.timeout_s)
    Zarr2Layout(root).sync_directories({name.key for name in objects})


def _unexpected(job: Job, error: Exception) -> StorageError:
    return storage_error(job.key, job.path, error)


def _read(
    tensors: Sequence[Any], root: Path, options: Options
) -> tuple[list[torch.Tensor], LoadReport]:
    """The loaded tensor of each ShardedTensor."""
    layout = Zarr2Layout(root)
    stored = find_arrays(layout, {tensor.key for tensor in tensors}, options)
    plan = build_load_plan([shard_spec(tensor) for tensor in tensors], stored)
    results = [destination(tensor, stored[tensor.key]) for tensor in tensors]
    targets = [
        result.detach()[(None,) * tensor.prepend_axis_num]
        for result, tensor in zip(results, tensors, strict=True)
    ]
    report = run_load(plan, targets, open_array_store(root, options), options)
    return results, report


def destination(tensor: Any, array: ArraySpec) -> torch.Tensor:
    """The tensor that will hold the result: the caller's own where it fits."""
    dtype = torch_dtype(array.dtype)
    data: torch.Tensor | None = tensor.data
    if data is None:
        return torch.empty(tuple(tensor.local_shape), dtype=dtype, device="cpu")
    require_plain(data, key=tensor.key)
    fits = data.dtype == dtype and data.shape == tuple(tensor.local_shape)
    if fits and not may_overlap(data):
        return data
    return torch.empty(tuple(tensor.local_shape), dtype=dtype, device=data.device)


def find_arrays(layout: Zarr2Layout, keys: Iterable[str], options: Options) -> dict[str, ArraySpec]:
    """The arrays of these keys; where one is missing the error names similar ones."""
    found: dict[str, ArraySpec] = {}

    def find(key: str) -> None:
        try:
            found[key] = layout.find(key)
        except ArrayNotFoundError as error:
            raise _not_found(layout, key) from error

    jobs = (Job(key, layout.metadata_path(key), partial(find, key)) for key in sorted(keys))
    num_threads = file_access(layout.root).num_metadata_threads
    run_pooled(jobs, num_threads, _unexpected).wait(options.timeout_s)
    return found


def _not_found(layout: Zarr2Layout, key: str) -> ArrayNotFoundError:
    require_directory(layout.root)
    keys = list(layout.keys())
    near = difflib.get_close_matches(key, keys, n=3)
    hint = f"; similar keys: {', '.join(near)}" if near else ""
    return ArrayNotFoundError(
        f"{key}: no such array among the {len(keys)} in {layout.root}{hint}",
        key=key,
        path=str(layout.directory(key)),
    )


def _read_objects(
    objects: Sequence[Any], root: Path, allowed: Callable[[], Allowed], options: Options
) -> dict[int, Any]:
    if not objects:
        return {}
    allow = allowed()
    loaded: dict[int, Any] = {}

    def read(wanted: Any) -> None:
        loaded[id(wanted)] = read_object(root, object_id(wanted), allow)

    jobs = (
        Job(found.key, object_path(root, object_id(found)), partial(read, found))
        for found in objects
    )
    run_pooled(jobs, 1, _unexpected).wait(options.timeout_s)
    return loaded


def copy_into_own_data(tensor: Any, loaded: torch.Tensor) -> torch.Tensor:
    """Put a loaded tensor into the ShardedTensor's data, cast to its dtype; returns that data.

    Raises:
        StrategyError: there is no data to load into.
    """
    if tensor.data is None:
        raise StrategyError(
            f"{tensor.key}: load_directly_on_device needs a ShardedTensor with data"
        )
    own: torch.Tensor = tensor.data
    if own is not loaded:
        own.data.copy_(loaded)
    return own
