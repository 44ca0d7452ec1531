"""Load a state dict by a group of ranks that share the reading, from any kind of checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.bases import ShardedTensor
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.sharded.plan_load import build_load_plan
from dist_ckpt_strategies.storage.base import ArrayReader
from dist_ckpt_strategies.storage.file_systems import PageCache, available_nbytes, page_cache_of
from dist_ckpt_strategies.storage.time_limit import restart_limit
from dist_ckpt_strategies.two_stage.broadcast import Target, run_group_plan
from dist_ckpt_strategies.two_stage.objects import (
    NO_SHARES,
    ObjectShares,
    send_objects,
    share_objects,
    unpickled,
)
from dist_ckpt_strategies.two_stage.plan import GroupPlan, build_group_plan, encode_regions

Prepare = Callable[[Sequence[Any], Mapping[str, ArraySpec]], tuple[list[torch.Tensor], Any]]
"""For ShardedTensors and the arrays of their keys: the tensors to fill, and anything to report."""

_FREE_PER_NBYTES = 2
"""Pages stay in the cache until all have read them if so many times as much memory is free."""


class Source(Protocol):
    """Where a group load gets its arrays and objects from."""

    may_cut: bool
    """Whether a region may be read in slices, by several ranks."""

    def open(self) -> Path | None:
        """Open the checkpoint; the directory that it is in, if it is read from there. Rank-local.

        The first call; may raise what opening a checkpoint raises.
        """
        ...

    def name(self, tensor: Any) -> str:
        """The name of the array that a ShardedTensor is a region of."""
        ...

    def find(self, names: Sequence[str], comm: Communicator) -> Sequence[ArraySpec]:
        """The arrays of these names, the same on all ranks. Collective."""
        ...

    def open_reader(self, *, fills_page_cache: bool) -> ArrayReader:
        """What reads the arrays; called after all ranks know that the load can be carried out."""
        ...

    def object_content(self, unique_key: str) -> bytes:
        """The pickled form of an object."""
        ...

    def object_path(self, object_id: ObjectId) -> str:
        """Where an object is stored, for messages."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GroupLoad:
    """A load by a group of ranks of which every request has been checked; nothing is filled.

    Attributes:
        state_dict: what this rank requests.
        tensors: the ShardedTensors in it.
        objects: the ShardedObjects in it.
        names: of the arrays, by their numbers.
        arrays: the same.
        results: the tensors that are filled, one for each ShardedTensor.
        padding: those of which storage lacks a part, which becomes zeros.
        targets: the regions of the results that are read.
        plan: who reads what.
        shares: who reads which objects.
        noted: what ``Prepare`` returned to report.
    """

    state_dict: StateDict
    tensors: Sequence[Any]
    objects: Sequence[Any]
    names: Sequence[str]
    arrays: Sequence[ArraySpec]
    results: Sequence[torch.Tensor]
    padding: Sequence[torch.Tensor]
    targets: Sequence[Target]
    plan: GroupPlan
    shares: ObjectShares
    noted: Any

    def read_by(self, rank: int) -> list[int]:
        """The numbers of the arrays of which this rank, given as ``rank``, reads a region."""
        batches = chain.from_iterable(self.plan.rounds)
        found = {s.array for b in batches if b.reader == rank for s in b.slices}
        shared = self.plan.shared
        found |= {t.array for t in self.targets if (t.array, t.region) not in shared}
        return sorted(found)


def prepare_group_load(
    state_dict: StateDict, source: Source, comm: Communicator, options: Options, prepare: Prepare
) -> GroupLoad:
    """Gather what the ranks of a group request, check it, and plan.

    Collective over the group; what follows its last collective is for the caller to run within an
    error check of its own.

    Args:
        state_dict: what this rank requests.
        source: where it is.
        comm: the group.
        options: memory budget; the smallest of the group counts.
        prepare: gives the tensors to fill; may raise what speaks against filling them.

    Raises:
        ShapeMismatchError, DTypeMismatchError, ArrayNotFoundError, StorageError: on every rank
            where one failed.
    """
    tensors: list[Any] = []
    objects: list[Any] = []

    def request() -> bytes:
        root = source.open()
        for value in sharded_values(state_dict):
            (tensors if isinstance(value, ShardedTensor) else objects).append(value)
        cache = None if root is None or comm.device.type != "cpu" else page_cache_of(root)
        told = None if cache is None else [cache.name, cache.is_storage]
        names = sorted({source.name(tensor) for tensor in tensors})
        return json.dumps([options.max_inflight_bytes, bool(objects), told, names]).encode()

    answers = agree_and_gather_bytes(comm, request)
    restart_limit()
    group = agree(comm, lambda: _Group.of(answers))
    arrays = source.find(group.names, comm)
    held: list[tuple[list[torch.Tensor], list[torch.Tensor], list[Target], Any]] = []

    def describe() -> bytes:
        held.append(_targets(tensors, source, group.names, arrays, prepare))
        targets = held[0][2]
        fits = group.fits_page_cache(comm.rank, sum(target.tensor.nbytes for target in targets))
        regions = encode_regions((target.array, target.region) for target in targets)
        return f"{int(fits)}\n{regions}".encode()

    requests = agree_and_gather_bytes(comm, describe)
    shares = share_objects(objects, comm) if group.has_objects else NO_SHARES
    results, padding, targets, noted = held[0]
    plan = _planned(requests, arrays, group, may_cut=source.may_cut)
    return GroupLoad(
        state_dict,
        tensors,
        objects,
        group.names,
        arrays,
        results,
        padding,
        targets,
        plan,
        shares,
        noted,
    )


def run_group_load(
    load: GroupLoad,
    source: Source,
    comm: Communicator,
    options: Options,
    allowed: Callable[[], Allowed],
) -> tuple[StateDict, BroadcastReport]:
    """Read what the ranks of a group request, each region and object once, and pass it on.

    Collective over the group.

    Args:
        load: from ``prepare_group_load``.
        source: the same.
        comm: the group.
        options: timeout and memory budget.
        allowed: gives the classes that objects may be unpickled to.

    Raises:
        StorageError: on every rank where one failed.
    """

    def open_reader() -> ArrayReader:
        for tensor in load.padding:
            tensor.zero_()
        caches = load.plan.page_caches
        cache = caches[comm.rank]
        return source.open_reader(fills_page_cache=cache is not None and caches.count(cache) > 1)

    report = run_group_plan(load.plan, load.arrays, load.targets, open_reader, comm, options)
    contents = send_objects(
        load.shares,
        comm,
        lambda: {key: source.object_content(key) for key in load.shares.read_by(comm.rank)},
    )

    def finish() -> StateDict:
        loaded = unpickled(load.objects, contents, source.object_path, allowed)
        loaded |= {id(t): r for t, r in zip(load.tensors, load.results, strict=True)}
        return mapped_values(lambda value: loaded[id(value)], load.state_dict)

    return agree(comm, finish), report


@dataclass(frozen=True, slots=True)
class _Group:
    """What the ranks of a group request, taken together.

    Attributes:
        names: of all arrays, sorted.
        has_objects: whether any rank requests objects.
        budget: the smallest of the memory bounds.
        caches: the page cache of each rank.
    """

    names: Sequence[str]
    has_objects: bool
    budget: int
    caches: Sequence[PageCache | None]

    @classmethod
    def of(cls, answers: Sequence[bytes]) -> _Group:
        """From the answer of each rank."""
        parsed = {answer: json.loads(answer) for answer in set(answers)}
        budgets, have_objects, _, names = zip(*parsed.values(), strict=True)
        told = [parsed[answer][2] for answer in answers]
        return cls(
            sorted(set(chain.from_iterable(names))),
            any(have_objects),
            min(budgets),
            [None if cache is None else PageCache(*cache) for cache in told],
        )

    @property
    def is_in_memory(self) -> bool:
        """Whether the checkpoint lies in memory that every rank reads like its own."""
        return all(cache is not None and cache.is_storage for cache in self.caches)

    def fits_page_cache(self, rank: int, wanted_nbytes: int) -> bool:
        """Whether what the ranks on this one's host read stays in the cache for long enough."""
        cache = self.caches[rank]
        num_sharing = sum(cache == other for other in self.caches)
        if cache is None or num_sharing == 1:
            return True
        needed = _FREE_PER_NBYTES * num_sharing * min(wanted_nbytes, self.budget)
        return needed <= available_nbytes()


def _targets(
    tensors: Sequence[Any],
    source: Source,
    names: Sequence[str],
    arrays: Sequence[ArraySpec],
    prepare: Prepare,
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[Target], Any]:
    """The tensors to fill, those to zero first, the regions to read, and what to report."""
    numbers = {name: number for number, name in enumerate(names)}
    own = [numbers[source.name(tensor)] for tensor in tensors]
    stored = {tensor.key: arrays[number] for tensor, number in zip(tensors, own, strict=True)}
    plan = build_load_plan([shard_spec(tensor) for tensor in tensors], stored)
    results, noted = prepare(tensors, stored)
    targets = []
    for read in plan.reads:
        tensor = results[read.number].detach()
        tensor = tensor[(None,) * tensors[read.number].prepend_axis_num]
        if read.source is not None and read.target is not None:
            targets.append(Target(own[read.number], read.source, tensor[read.target.slices()]))
    padding = [results[read.number].detach() for read in plan.reads if read.is_padded]
    return results, padding, targets, noted


def _planned(
    requests: Sequence[bytes], arrays: Sequence[ArraySpec], group: _Group, *, may_cut: bool
) -> GroupPlan:
    parsed = {request: request.decode().partition("\n") for request in set(requests)}
    fits = all(parsed[request][0] == "1" for request in requests)
    caches = [cache.name if cache is not None and fits else None for cache in group.caches]
    if group.is_in_memory:
        return GroupPlan((), frozenset(), tuple(caches))
    return build_group_plan(
        [parsed[request][2] for request in requests],
        arrays,
        caches,
        max_inflight_bytes=group.budget,
        may_cut=may_cut,
    )
