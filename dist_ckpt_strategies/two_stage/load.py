"""Load a state dict by a group of ranks: request, plan, broadcast."""

import copy
import json
import math
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_and_gather_bytes
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.formats.checkpoints import StoredCheckpoint, common_digest
from dist_ckpt_strategies.formats.locations import Location, OpenedSave, located, require_path
from dist_ckpt_strategies.formats.objects import Allowed, dump_object, load_content, object_path
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    message_of,
    object_id,
    shard_spec,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.load import destination, matched
from dist_ckpt_strategies.storage.file_systems import PageCache, available_nbytes, page_cache_of
from dist_ckpt_strategies.storage.io_pool import Transfer, restart_limit, uncounted
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayReader, HostArray
from dist_ckpt_strategies.two_stage.broadcast import Target, run_group_plan
from dist_ckpt_strategies.two_stage.plan import GroupPlan, build_group_plan, encode_regions

_FREE_PER_NBYTES = 2
"""Pages stay in the cache until all ranks have read them if so many times as much is free."""


class CheckpointLoad:
    """A load by the ranks of a group: call ``prepare``, then ``run``.

    ``base`` is the strategy of this package that reads. ``state_dict`` is what this rank requests.
    The smallest memory budget of the group counts. ``prepare`` sets ``save``, which is loaded.
    """

    save: OpenedSave
    _checkpoint: StoredCheckpoint
    identity: str
    """Of the checkpoint, after ``prepare``; see ``require_same_checkpoint``."""

    def __init__(
        self,
        base: Any,
        checkpoint_dir: str | Location,
        state_dict: StateDict,
        comm: Communicator,
        options: Options,
    ) -> None:
        self._base, self._checkpoint_dir, self._state_dict = base, checkpoint_dir, state_dict
        self._comm, self._options = comm, options
        self._tensors: list[Any] = []
        self._objects: list[Any] = []
        self._arrays: Sequence[ArraySpec] = ()
        self._plan = GroupPlan((), frozenset(), ())
        self._results: list[torch.Tensor] = []
        self._targets: list[Target] = []
        self._padding: list[torch.Tensor] = []
        self._requesters: dict[str, list[int]] = {}

    def prepare(self) -> Any:
        """Gather what the ranks request, check it, and plan; what this rank will convert.

        Collective. No tensor has been filled. The caller runs it within an error check, so that
        every rank raises the ShapeMismatchError, DTypeMismatchError, ArrayNotFoundError or
        StorageError of one.
        """
        comm = self._comm
        answers = run_and_gather_bytes(comm, self._request)
        restart_limit()
        parsed = {answer: json.loads(answer) for answer in set(answers)}
        budgets, _, have_objects, all_names = zip(*parsed.values(), strict=True)
        if any(have_objects):
            self._find_requesters()
        caches = [parsed[answer][1] and PageCache(*parsed[answer][1]) for answer in answers]
        if all(cache and cache.is_storage for cache in caches):
            return self._prepare_alone([cache.name for cache in caches])
        budget, names = min(budgets), sorted(set(chain.from_iterable(all_names)))
        self._arrays = self._find(names)
        converted: list[Any] = []

        def describe() -> bytes:
            numbers = {name: number for number, name in enumerate(names)}
            own = [numbers[self._name(tensor)] for tensor in self._tensors]
            converted.append(self._choose_targets([(n, self._arrays[n]) for n in own]))
            nbytes = min(budget, sum(target.tensor.nbytes for target in self._targets))
            regions = encode_regions((target.array, target.region) for target in self._targets)
            return f"{int(_stays_cached(caches, comm.rank, nbytes))}\n{regions}".encode()

        requests = run_and_gather_bytes(comm, describe)
        distinct = {request: request.decode().partition("\n") for request in set(requests)}
        fits = all(stays_cached == "1" for stays_cached, _, _ in distinct.values())
        cache_names = tuple(cache.name if cache and fits else None for cache in caches)
        regions = [distinct[request][2] for request in requests]
        self._plan = build_group_plan(regions, self._arrays, cache_names, max_inflight_bytes=budget)
        return converted[0]

    def _prepare_alone(self, cache_names: Sequence[str]) -> Any:
        """Plan that every rank reads all that it requests, where storage is memory. Rank-local."""
        self._plan = GroupPlan((), frozenset(), tuple(cache_names))
        found = self._checkpoint.find(sorted({tensor.key for tensor in self._tensors}))
        self._arrays = [*found.values()]
        numbers = {key: number for number, key in enumerate(found)}
        own = [numbers[tensor.key] for tensor in self._tensors]
        return self._choose_targets([(number, self._arrays[number]) for number in own])

    def run(self, allow: Allowed) -> tuple[StateDict, BroadcastReport]:
        """Read and send everything; a state dict of the structure of the request.

        Collective. The caller runs it within an error check, so that every rank raises the
        StorageError of one.
        """
        comm = self._comm

        def open_reader() -> ArrayReader:
            for tensor in self._padding:
                tensor.zero_()
            return self._open_reader()

        report = run_group_plan(
            self._plan, self._arrays, self._targets, open_reader, comm, self._options
        )
        contents = self._object_contents() if self._requesters else {}
        loaded: dict[int, Any] = {}
        for found in self._objects:
            name = object_id(found)
            content, path = contents[name.unique_key], self._object_path(name)
            loaded[id(found)] = load_content(content, path, name.unique_key, allow)
        loaded |= {id(t): r for t, r in zip(self._tensors, self._results, strict=True)}
        return mapped_values(lambda value: loaded[id(value)], self._state_dict), report

    def _request(self) -> bytes:
        root = self._open()
        for value in sharded_values(self._state_dict):
            (self._tensors if isinstance(value, ShardedTensor) else self._objects).append(value)
        cache = None if root is None or self._comm.device.type != "cpu" else page_cache_of(root)
        fields = None if cache is None else [cache.name, cache.is_storage]
        names = sorted({self._name(tensor) for tensor in self._tensors})
        budget = self._options.max_inflight_bytes
        return json.dumps([budget, fields, bool(self._objects), names]).encode()

    def _find_requesters(self) -> None:
        """Learn which ranks request each object. Collective."""
        found: dict[str, list[int]] = defaultdict(list)
        own = lambda: sorted({object_id(found).unique_key for found in self._objects})  # noqa: E731
        for rank, keys in enumerate(run_and_gather(self._comm, own)):
            for key in keys:
                found[key].append(rank)
        self._requesters = dict(sorted(found.items()))

    def _objects_read(self) -> list[str]:
        """The unique keys of the objects that this rank reads, sorted: requesters take turns."""
        requesters = enumerate(self._requesters.items())
        return [key for n, (key, ranks) in requesters if ranks[n % len(ranks)] == self._comm.rank]

    def _object_contents(self) -> dict[str, bytes]:
        """Read this rank's objects, and gather the shared ones. Collective."""
        contents: dict[str, bytes] = {}

        def read() -> bytes:
            own = self._objects_read()
            contents.update({key: self._object_content(key) for key in own})
            shared = [key for key in own if len(self._requesters[key]) > 1]
            sizes = json.dumps([[key, len(contents[key])] for key in shared])
            return b"\n".join([sizes.encode(), b"".join(contents[key] for key in shared)])

        for answer in run_and_gather_bytes(self._comm, read):
            sizes, _, content = answer.partition(b"\n")
            start = 0
            for key, nbytes in json.loads(sizes):
                contents[key] = content[start : start + nbytes]
                start += nbytes
        return contents

    def _open(self) -> Path | None:
        root = located(self._checkpoint_dir, self._options)
        checkpoint = self._base.open_checkpoint(root, self._options, self._comm)
        self._checkpoint, self.save = checkpoint, checkpoint.save
        self.identity = checkpoint.identity
        return root if isinstance(root, Path) else None

    def _name(self, tensor: Any) -> str:
        return str(tensor.key)

    def _find(self, names: Sequence[str]) -> list[ArraySpec]:
        """The metadata of each array is read by one rank."""
        rank, size = self._comm.rank, self._comm.size

        def look_up() -> bytes:
            found = self._checkpoint.find(names[rank::size])
            return pickle.dumps([found[key] for key in names[rank::size]])

        answers = run_and_gather_bytes(self._comm, look_up)
        shares = [pickle.loads(answer) for answer in answers]  # noqa: S301 - from ranks of this job
        return [shares[n % size][n // size] for n in range(len(names))]

    def _choose_targets(self, found: Sequence[tuple[int, ArraySpec]]) -> Any:
        stored = {array.key: array for _, array in found}
        is_strict, specs = self._options.strict_dtype, map(shard_spec, self._tensors)
        plan, converted = matched(self._tensors, specs, stored, is_strict=is_strict)
        self._results = [self._base.destination_of(tensor) for tensor in self._tensors]
        for (number, _), read, tensor, result in zip(
            found, plan, self._tensors, self._results, strict=True
        ):
            if read.source is not None:
                view = _in_array_dims(result, tensor)
                if read.target is not None:
                    view = view[read.target.slices()]
                self._targets.append(Target(number, read.source, view))
            if read.is_padded:
                self._padding.append(result.detach())
        return converted

    def _open_reader(self) -> ArrayReader:
        return self._checkpoint.array_reader()

    def _object_content(self, unique_key: str) -> bytes:
        found = ObjectId.parse(unique_key)
        assert found is not None  # noqa: S101 - made from an ObjectId on another rank
        return self._checkpoint.object_content(found)

    def _object_path(self, object_id: ObjectId) -> str:
        return self._checkpoint.object_path(object_id)


def _stays_cached(caches: Sequence[PageCache | None], rank: int, wanted_nbytes: int) -> bool:
    """Whether what the ranks of this host read stays in its page cache for long enough."""
    num_sharing = sum(caches[rank] == other for other in caches)
    if caches[rank] is None or num_sharing == 1:
        return True
    return _FREE_PER_NBYTES * num_sharing * wanted_nbytes <= available_nbytes()


class StrategyLoad(CheckpointLoad):
    """A load by any strategy, which is called once with all shards and objects this rank reads.

    Each distinct shard counts as an array of its own, which is read whole.
    """

    _root: Path
    _loaded: StateDict

    def _open(self) -> None:
        name = type(self._base).__name__
        if self._options.strict_dtype:
            raise StrategyError(
                f"strict_dtype: {name} converts by itself; pass strict_dtype=True to "
                "dist_ckpt_strategies.load instead"
            )
        self._root = require_path(located(self._checkpoint_dir, self._options), name)
        self.save = OpenedSave(self._root)
        self.identity = common_digest(self._root)

    def _name(self, tensor: Any) -> str:
        """Replicas have the same name."""
        shard_spec(tensor)  # raises if it is invalid
        message = message_of(tensor)
        message[3] = 0  # the replica
        return json.dumps(message)

    def _find(self, names: Sequence[str]) -> list[ArraySpec]:
        """The name describes the shard."""
        found = []
        for name in names:
            spec = shard_spec(value_from_message(json.loads(name)))
            shape = spec.region.shape
            chunk = tuple(max(1, size) for size in shape)
            found.append(ArraySpec(name, shape, spec.dtype, chunk, is_raw=False))
        return found

    def _choose_targets(self, found: Sequence[tuple[int, ArraySpec]]) -> Any:
        self._results = [destination(tensor) for tensor in self._tensors]
        self._targets = [
            Target(number, Region.whole(array.shape), _in_array_dims(result, tensor))
            for (number, array), result, tensor in zip(
                found, self._results, self._tensors, strict=True
            )
            if result.numel()
        ]
        return ()

    def _open_reader(self) -> ArrayReader:
        """Calls the strategy. Collective over the world."""
        batches = chain.from_iterable(self._plan.rounds)
        numbers = {s.array for b in batches if b.reader == self._comm.rank for s in b.slices}
        shared = self._plan.shared
        numbers |= {t.array for t in self._targets if (t.array, t.region) not in shared}
        requested = {self._name(tensor): tensor for tensor in self._tensors}
        # torch_dist changes the ShardedTensors that it is given, and loses empty nested dicts.
        own: StateDict = {n: copy.copy(requested[self._arrays[n].key]) for n in sorted(numbers)}
        objects = {object_id(found).unique_key: found for found in self._objects}
        own |= {key: objects[key] for key in self._objects_read()}
        with uncounted():  # the strategy's time is its own
            self._loaded = self._base.load(own, self._root)
        return _MemoryReader({self._arrays[n].key: self._in_memory(n) for n in sorted(numbers)})

    def _in_memory(self, number: int) -> HostArray:
        tensor: torch.Tensor = self._loaded[number]
        array = self._arrays[number]
        if tensor.numel() != math.prod(array.shape):
            key = json.loads(array.key)[0]
            raise PlanError(
                f"{key}: shape {tuple(tensor.shape)} loaded, {array.shape} expected", key=key
            )
        return to_host([tensor.to(getattr(torch, array.dtype.value)).reshape(array.shape)])[0]

    def _object_content(self, unique_key: str) -> bytes:
        return dump_object(self._loaded[unique_key], name=unique_key)

    def _object_path(self, object_id: ObjectId) -> str:
        return str(object_path(self._root, object_id))


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
        return Transfer((), 0)


def _in_array_dims(result: torch.Tensor, tensor: Any) -> torch.Tensor:
    """The tensor with the dims that a ShardedTensor prepends."""
    return result.detach()[(None,) * tensor.prepend_axis_num]
