"""Load a state dict by a group of ranks: request, plan, broadcast."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, array_from_wire, array_to_wire
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.object_files import object_path
from dist_ckpt_strategies.formats.objects import Allowed, dump_object, load_content
from dist_ckpt_strategies.megatron.bases import ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    message_of,
    object_id,
    shard_spec,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.sharded.plan_load import build_load_plan
from dist_ckpt_strategies.storage.base import (
    ArrayRead,
    ArrayReader,
    HostArray,
    StoredCheckpoint,
    Transfer,
)
from dist_ckpt_strategies.storage.file_systems import PageCache, available_nbytes, page_cache_of
from dist_ckpt_strategies.storage.io_pool import run_pooled
from dist_ckpt_strategies.storage.time_limit import restart_limit
from dist_ckpt_strategies.two_stage.broadcast import Target, run_group_plan
from dist_ckpt_strategies.two_stage.plan import GroupPlan, build_group_plan, encode_regions

_FREE_PER_NBYTES = 2
"""Pages stay in the cache until all ranks have read them if so many times as much is free."""


@dataclass(frozen=True, slots=True)
class Filling:
    """What a load fills on this rank.

    Attributes:
        results: one tensor for each ShardedTensor.
        targets: the regions of arrays that are read into them.
        padding: those that storage covers in part only; they are zeroed first.
        report: for the caller of ``prepare``.
    """

    results: Sequence[torch.Tensor]
    targets: Sequence[Target]
    padding: Sequence[torch.Tensor] = ()
    report: Any = ()


class Source(Protocol):
    """Where a group load reads arrays and objects."""

    def open(self) -> Path | None:
        """Open the checkpoint; its directory, if arrays are read from files there. Called first."""
        ...

    def name(self, tensor: Any) -> str:
        """The name of the array that a ShardedTensor is a region of."""
        ...

    def find(self, names: Sequence[str], comm: Communicator) -> list[ArraySpec]:
        """The arrays of these names, the same on all ranks. Collective."""
        ...

    def filling(self, tensors: Sequence[Any], found: Sequence[tuple[int, ArraySpec]]) -> Filling:
        """What is filled for ShardedTensors, given number and description of their arrays."""
        ...

    def open_reader(self, load: GroupLoad, *, fills_page_cache: bool) -> ArrayReader:
        """The reader of the arrays. Called when every rank knows that its request is valid."""
        ...

    def object_content(self, unique_key: str) -> bytes:
        """The stored content of an object."""
        ...

    def object_path(self, object_id: ObjectId) -> str:
        """Where an object is stored, for messages."""
        ...


class GroupLoad:
    """A load by the ranks of a group: call ``prepare``, then ``run``.

    Args:
        state_dict: what this rank requests.
        source: where it is stored.
        comm: the group.
        options: timeout and memory budget; the smallest budget of the group counts.

    Attributes:
        tensors: the requested ShardedTensors.
        objects: the requested ShardedObjects.
        arrays: what any rank of the group requests regions of.
        filling: what is filled on this rank.
        plan: who reads which region.
    """

    arrays: Sequence[ArraySpec]
    filling: Filling
    plan: GroupPlan

    def __init__(
        self, state_dict: StateDict, source: Source, comm: Communicator, options: Options
    ) -> None:
        self._state_dict, self._source = state_dict, source
        self._comm, self._options = comm, options
        self.tensors: list[Any] = []
        self.objects: list[Any] = []
        self._object_readers: dict[str, int] = {}
        self._shared_objects: set[str] = set()

    def prepare(self) -> Any:
        """Gather what the ranks request, check it, and plan; the report of ``Source.filling``.

        Collective. No tensor has been filled. The caller runs it within an error check.

        Raises:
            ShapeMismatchError, DTypeMismatchError, ArrayNotFoundError, StorageError: on every rank
                if one failed.
        """
        comm, source = self._comm, self._source
        answers = agree_and_gather_bytes(comm, self._request)
        restart_limit()
        parsed = {answer: json.loads(answer) for answer in set(answers)}
        budgets, _, have_objects, all_names = zip(*parsed.values(), strict=True)
        budget, names = min(budgets), sorted(set(chain.from_iterable(all_names)))
        caches = [parsed[answer][1] and PageCache(*parsed[answer][1]) for answer in answers]
        self.arrays = source.find(names, comm)

        def describe() -> bytes:
            numbers = {name: number for number, name in enumerate(names)}
            own = [numbers[source.name(tensor)] for tensor in self.tensors]
            self.filling = source.filling(self.tensors, [(n, self.arrays[n]) for n in own])
            targets = self.filling.targets
            wanted_nbytes = min(budget, sum(target.tensor.nbytes for target in targets))
            regions = encode_regions((target.array, target.region) for target in targets)
            return f"{int(_stays_cached(caches, comm.rank, wanted_nbytes))}\n{regions}".encode()

        requests = agree_and_gather_bytes(comm, describe)
        if any(have_objects):
            self._assign_objects()
        distinct = {request: request.decode().partition("\n") for request in set(requests)}
        fits = all(stays_cached == "1" for stays_cached, _, _ in distinct.values())
        cache_names = tuple(cache.name if cache and fits else None for cache in caches)
        if all(cache and cache.is_storage for cache in caches):
            self.plan = GroupPlan((), frozenset(), cache_names)  # every rank reads from memory
            return self.filling.report
        regions = [distinct[request][2] for request in requests]
        self.plan = build_group_plan(regions, self.arrays, cache_names, max_inflight_bytes=budget)
        return self.filling.report

    def run(self, allowed: Callable[[], Allowed]) -> tuple[StateDict, BroadcastReport]:
        """Read and send everything; a state dict of the structure of the request. Collective.

        Args:
            allowed: returns the classes that objects may be unpickled to.

        Raises:
            StorageError: on every rank if one failed.
        """
        comm, source, filling = self._comm, self._source, self.filling

        def open_reader() -> ArrayReader:
            for tensor in filling.padding:
                tensor.zero_()
            caches = self.plan.page_caches
            cache = caches[comm.rank]
            fills_page_cache = cache is not None and caches.count(cache) > 1
            return source.open_reader(self, fills_page_cache=fills_page_cache)

        report = run_group_plan(
            self.plan, self.arrays, filling.targets, open_reader, comm, self._options
        )
        contents = self._object_contents() if self._object_readers else {}

        def finish() -> StateDict:
            allow = allowed() if self.objects else ()
            loaded: dict[int, Any] = {}
            for found in self.objects:
                name = object_id(found)
                content, path = contents[name.unique_key], source.object_path(name)
                loaded[id(found)] = load_content(content, path, name.unique_key, allow)
            loaded |= {id(t): r for t, r in zip(self.tensors, filling.results, strict=True)}
            return mapped_values(lambda value: loaded[id(value)], self._state_dict)

        return agree(comm, finish), report

    def arrays_read(self) -> list[int]:
        """The numbers of the arrays of which this rank reads a region."""
        batches = chain.from_iterable(self.plan.rounds)
        found = {s.array for b in batches if b.reader == self._comm.rank for s in b.slices}
        targets, shared = self.filling.targets, self.plan.shared
        found |= {t.array for t in targets if (t.array, t.region) not in shared}
        return sorted(found)

    def objects_read(self) -> list[str]:
        """The unique keys of the objects that this rank reads, sorted."""
        return [key for key, rank in self._object_readers.items() if rank == self._comm.rank]

    def _request(self) -> bytes:
        root = self._source.open()
        for value in sharded_values(self._state_dict):
            (self.tensors if isinstance(value, ShardedTensor) else self.objects).append(value)
        cache = None if root is None or self._comm.device.type != "cpu" else page_cache_of(root)
        told = None if cache is None else [cache.name, cache.is_storage]
        names = sorted({self._source.name(tensor) for tensor in self.tensors})
        budget = self._options.max_inflight_bytes
        return json.dumps([budget, told, bool(self.objects), names]).encode()

    def _assign_objects(self) -> None:
        """Give each object that any rank requests a reader among its requesters. Collective."""

        def names() -> list[str]:
            return sorted({object_id(found).unique_key for found in self.objects})

        requesters: dict[str, list[int]] = {}
        for rank, found in enumerate(agree_and_gather(self._comm, names)):
            for key in found:
                requesters.setdefault(key, []).append(rank)
        for number, key in enumerate(sorted(requesters)):
            ranks = requesters[key]
            self._object_readers[key] = ranks[number % len(ranks)]
            if len(ranks) > 1:
                self._shared_objects.add(key)

    def _object_contents(self) -> dict[str, bytes]:
        """Read this rank's objects, and gather the shared ones. Collective."""
        contents: dict[str, bytes] = {}

        def read() -> bytes:
            own = self.objects_read()
            contents.update({key: self._source.object_content(key) for key in own})
            shared = [key for key in own if key in self._shared_objects]
            sizes = json.dumps([[key, len(contents[key])] for key in shared])
            return b"\n".join([sizes.encode(), b"".join(contents[key] for key in shared)])

        for answer in agree_and_gather_bytes(self._comm, read):
            sizes, _, content = answer.partition(b"\n")
            start = 0
            for key, nbytes in json.loads(sizes):
                contents[key] = content[start : start + nbytes]
                start += nbytes
        return contents


def _stays_cached(caches: Sequence[PageCache | None], rank: int, wanted_nbytes: int) -> bool:
    """Whether what the ranks of this host read stays in its page cache for long enough."""
    num_sharing = sum(caches[rank] == other for other in caches)
    if caches[rank] is None or num_sharing == 1:
        return True
    return _FREE_PER_NBYTES * num_sharing * wanted_nbytes <= available_nbytes()


class CheckpointSource:
    """A checkpoint of a format of this package; see Source.

    Args:
        open_checkpoint: opens it; its location, and what reads it.
        tensors_to_fill: for ShardedTensors and the arrays of their keys, the tensors to fill and a
            report. May raise if they cannot be filled.
    """

    _checkpoint: StoredCheckpoint

    def __init__(
        self,
        open_checkpoint: Callable[[], tuple[Location, StoredCheckpoint]],
        tensors_to_fill: Callable[
            [Sequence[Any], Mapping[str, ArraySpec]], tuple[list[torch.Tensor], Any]
        ],
    ) -> None:
        self._open = open_checkpoint
        self._tensors_to_fill = tensors_to_fill

    def open(self) -> Path | None:
        """See Source."""
        location, self._checkpoint = self._open()
        return location if isinstance(location, Path) else None

    def name(self, tensor: Any) -> str:
        """See Source."""
        return str(tensor.key)

    def find(self, names: Sequence[str], comm: Communicator) -> list[ArraySpec]:
        """See Source. The metadata of each array is read by one rank."""

        def look_up() -> bytes:
            share = names[comm.rank :: comm.size]
            found = self._checkpoint.find(share)
            return json.dumps([array_to_wire(found[key]) for key in share]).encode()

        shares = [json.loads(share) for share in agree_and_gather_bytes(comm, look_up)]
        return [array_from_wire(shares[n % comm.size][n // comm.size]) for n in range(len(names))]

    def filling(self, tensors: Sequence[Any], found: Sequence[tuple[int, ArraySpec]]) -> Filling:
        """See Source."""
        stored = {array.key: array for _, array in found}
        plan = build_load_plan([shard_spec(tensor) for tensor in tensors], stored)
        results, report = self._tensors_to_fill(tensors, stored)
        targets = []
        for read in plan.reads:
            tensor = _in_array_dims(results[read.number], tensors[read.number])
            if read.source is not None and read.target is not None:
                number, _ = found[read.number]
                targets.append(Target(number, read.source, tensor[read.target.slices()]))
        padding = [results[read.number].detach() for read in plan.reads if read.is_padded]
        return Filling(results, targets, padding, report)

    def open_reader(self, load: GroupLoad, *, fills_page_cache: bool) -> ArrayReader:  # noqa: ARG002
        """See Source."""
        checkpoint = self._checkpoint
        return checkpoint.buffered_reader if fills_page_cache else checkpoint.array_reader

    def object_content(self, unique_key: str) -> bytes:
        """See Source."""
        found = ObjectId.parse(unique_key)
        assert found is not None  # noqa: S101 - made from an ObjectId on another rank
        return self._checkpoint.object_content(found)

    def object_path(self, object_id: ObjectId) -> str:
        """See Source."""
        return self._checkpoint.object_path(object_id)


class StrategySource:
    """Any load strategy, called once with all shards and objects that this rank reads; see Source.

    Each distinct shard counts as an array of its own, which is read whole.

    Args:
        open_directory: returns the checkpoint's directory, or raises.
        load: loads a flat state dict from it. Collective over the world.
        destination: returns the tensor to fill for a ShardedTensor.
    """

    _root: Path

    def __init__(
        self,
        open_directory: Callable[[], Path],
        load: Callable[[StateDict, Path], StateDict],
        destination: Callable[[Any], torch.Tensor],
    ) -> None:
        self._open, self._base_load, self._destination = open_directory, load, destination
        self._loaded: StateDict = {}

    def open(self) -> Path | None:
        """See Source. Ranks send what is in their memory."""
        self._root = self._open()
        return None

    def name(self, tensor: Any) -> str:
        """See Source. Replicas have the same name."""
        shard_spec(tensor)  # raises if it is invalid
        message = message_of(tensor)
        message[3] = 0  # the replica
        return json.dumps(message)

    def find(self, names: Sequence[str], comm: Communicator) -> list[ArraySpec]:  # noqa: ARG002
        """See Source. The name describes the shard."""
        found = []
        for name in names:
            spec = shard_spec(value_from_message(json.loads(name)))
            shape = spec.region.shape
            chunk = tuple(max(1, extent) for extent in shape)
            found.append(ArraySpec(name, shape, spec.dtype, chunk, is_raw=False))
        return found

    def filling(self, tensors: Sequence[Any], found: Sequence[tuple[int, ArraySpec]]) -> Filling:
        """See Source."""
        results = [self._destination(tensor) for tensor in tensors]
        targets = [
            Target(number, Region.whole(array.shape), _in_array_dims(result, tensor))
            for (number, array), result, tensor in zip(found, results, tensors, strict=True)
            if result.numel()
        ]
        return Filling(results, targets)

    def open_reader(self, load: GroupLoad, *, fills_page_cache: bool) -> ArrayReader:  # noqa: ARG002
        """See Source. Calls the strategy."""
        requested = {self.name(tensor): tensor for tensor in load.tensors}
        # torch_dist changes the ShardedTensors that it is given, and loses empty nested dicts.
        own: StateDict = {
            number: copy.copy(requested[load.arrays[number].key]) for number in load.arrays_read()
        }
        objects = {object_id(found).unique_key: found for found in load.objects}
        own |= {key: objects[key] for key in load.objects_read()}
        self._loaded = self._base_load(own, self._root)
        return _MemoryReader(self._arrays_in_memory(load))

    def object_content(self, unique_key: str) -> bytes:
        """See Source."""
        return dump_object(self._loaded[unique_key], name=unique_key)

    def object_path(self, object_id: ObjectId) -> str:
        """See Source."""
        return str(object_path(self._root, object_id))

    def _arrays_in_memory(self, load: GroupLoad) -> dict[str, HostArray]:
        found = {}
        for number in load.arrays_read():
            tensor: torch.Tensor = self._loaded[number]
            array = load.arrays[number]
            if tensor.numel() != math.prod(array.shape):
                key = json.loads(array.key)[0]
                raise PlanError(
                    f"{key}: shape {tuple(tensor.shape)} loaded, {array.shape} expected", key=key
                )
            shaped = tensor.to(getattr(torch, array.dtype.value)).reshape(array.shape)
            found[array.key] = to_host([shaped])[0]
        return found


class _MemoryReader:
    """An ArrayReader of arrays in memory, which are read whole."""

    def __init__(self, arrays: Mapping[str, HostArray]) -> None:
        self._arrays = arrays

    def begin_reads(self, reads: Iterable[ArrayRead]) -> Transfer:
        """See ArrayReader. An array that was loaded into the target's memory is not copied."""
        for read in reads:
            source = self._arrays[read.array.key]
            if source.ctypes.data != read.target.ctypes.data:
                np.copyto(read.target, source)
        return run_pooled((), 0)


def _in_array_dims(result: torch.Tensor, tensor: Any) -> torch.Tensor:
    """The tensor with the dims that a ShardedTensor prepends."""
    return result.detach()[(None,) * tensor.prepend_axis_num]
