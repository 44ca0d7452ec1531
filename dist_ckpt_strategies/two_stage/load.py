"""Load a state dict by a group of ranks: request, plan, read and send.

The ranks of a group talk three times before they read: about what they request, about the arrays
and objects of these names, and about the regions of arrays. Then all ranks of the world agree, and
each group carries out its plan.
"""

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_and_gather_bytes,
    run_collectively,
)
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.report import BroadcastReport
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.megatron.shards import StateDict, mapped_values, object_id, sharded_values
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.agreement import require_same_checkpoint
from dist_ckpt_strategies.sharded.load import warn_of_conversions
from dist_ckpt_strategies.storage.host import available_nbytes, page_cache_of
from dist_ckpt_strategies.storage.io_pool import ENDING, OPENING, Deadline, run_within
from dist_ckpt_strategies.storage.store import BeginReads
from dist_ckpt_strategies.two_stage.broadcast import READING, run_group_plan
from dist_ckpt_strategies.two_stage.plan import GroupPlan, build_group_plan, encode_regions
from dist_ckpt_strategies.two_stage.sources import Matched, Opened, OwnSource, Source

_FREE_PER_NBYTES = 2
"""Pages stay in the cache until all ranks have read them if so many times as much is free."""


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """The load of one rank of a group.

    Attributes:
        tensors: ShardedTensors that this rank requests.
        objects: ShardedObjects that it requests, by unique key; of equal ones any.
        readers: the rank that reads each object of the group, and whether others request it too.
        arrays: that ``plan`` and ``matched`` number.
    """

    source: Source
    tensors: Sequence[Any]
    objects: Mapping[str, Any]
    readers: Mapping[str, tuple[int, bool]]
    arrays: Sequence[ArraySpec]
    matched: Matched
    plan: GroupPlan


def load_by_group(  # noqa: PLR0913, PLR0917
    world: Communicator,
    group: Communicator,
    open_source: Callable[[], Source],
    state: StateDict,
    name: object,
    options: Options,
    allow: Allowed,
) -> tuple[StateDict, BroadcastReport]:
    """Load what this rank requests; a state dict of the same structure. Collective over the world.

    Ranks of a ``group`` read together: their smallest memory budget counts. ``open_source`` is
    rank-local.
    """
    loads: list[GroupLoad] = []

    def prepare() -> Message:
        loads.append(plan_by_group(group, open_source, state, options))
        return [loads[0].matched.converted, loads[0].source.identity]

    converted, identities = zip(*run_and_gather(world, prepare), strict=True)
    require_same_checkpoint(world, name, identities)
    load, limit_s = loads[0], ENDING * options.timeout_s
    read = lambda: read_by_group(group, load, state, options, allow)  # noqa: E731
    loaded = run_collectively(world, lambda: load.source.save.read(read, limit_s))
    warn_of_conversions(world, name, converted)
    return loaded


def plan_by_group(
    comm: Communicator, open_source: Callable[[], Source], state: StateDict, options: Options
) -> GroupLoad:
    """Gather what the ranks request, check it, and plan. Collective.

    No tensor has been filled. The caller runs it within an error check, so that every rank raises
    the PlanError, ArrayNotFoundError or StorageError of one.
    """
    requests: list[tuple[Source, list[Any], dict[str, Any]]] = []

    def request() -> bytes:
        source, values = open_source(), list(sharded_values(state))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        objects = {object_id(v).unique_key: v for v in values if not isinstance(v, ShardedTensor)}
        requests.append((source, tensors, objects))
        cache = _page_cache(comm, source, options)
        names = sorted(set(map(source.name, tensors)))
        return json.dumps([options.max_inflight_bytes, cache, names]).encode()

    answers = run_and_gather_bytes(comm, request)  # 1
    parsed = {answer: json.loads(answer) for answer in set(answers)}
    budgets, _, all_names = zip(*parsed.values(), strict=True)
    caches = [parsed[answer][1] or ["", False] for answer in answers]
    source, tensors, objects = requests[0]
    if all(is_storage for _, is_storage in caches):  # each reads alone: storage is memory
        arrays = source.find(parsed[answers[comm.rank]][2])
        readers = dict.fromkeys(objects, (comm.rank, False))
        matched, nothing = source.match(tensors, arrays), GroupPlan((), frozenset(), ())
        return GroupLoad(source, tensors, objects, readers, arrays, matched, nothing)
    names = sorted(set(chain.from_iterable(all_names)))
    cache_names = [name for name, _ in caches]
    return _planned(comm, *requests[0], names, cache_names, min(budgets))


def _page_cache(comm: Communicator, source: Source, options: Options) -> tuple[str, bool] | None:
    """Name and kind of the page cache that this rank shares with its host; None if it may not."""
    root = source.save.root
    if not isinstance(source, OwnSource) or not isinstance(root, Path) or comm.device.type != "cpu":
        return None
    deadline = Deadline.after(OPENING * options.timeout_s)
    return run_within(deadline, root, lambda: page_cache_of(root))


def _planned(  # noqa: PLR0913, PLR0917
    comm: Communicator,
    source: Source,
    tensors: Sequence[Any],
    objects: Mapping[str, Any],
    names: Sequence[str],
    caches: Sequence[str],
    budget: int,
) -> GroupLoad:
    """Have one rank read what several request. Collective; ``names`` are those of all ranks.

    ``caches``: the name of the page cache that each rank reads through; empty without one.
    """
    rank, size = comm.rank, comm.size

    def look_up() -> bytes:
        return pickle.dumps((source.find(names[rank::size]), sorted(objects)))

    answers = run_and_gather_bytes(comm, look_up)  # 2: each name is looked up by one rank
    shares, keys = zip(*map(pickle.loads, answers), strict=True)
    arrays = [shares[n % size][n // size] for n in range(len(names))]
    matched: list[Matched] = []

    def describe() -> bytes:
        matched.append(source.match(tensors, arrays))
        targets = matched[0].targets
        nbytes = min(budget, sum(tensor.nbytes for _, _, tensor in targets))
        regions = encode_regions((array, region) for array, region, _ in targets)
        return f"{int(_stays_cached(caches, rank, nbytes))}\n{regions}".encode()

    answers = run_and_gather_bytes(comm, describe)  # 3
    distinct = {answer: answer.decode().partition("\n") for answer in set(answers)}
    fits = all(stays_cached == "1" for stays_cached, _, _ in distinct.values())
    cache_names = tuple(name or None if fits else None for name in caches)
    regions = [distinct[answer][2] for answer in answers]
    plan = build_group_plan(regions, arrays, cache_names, max_inflight_bytes=budget)
    return GroupLoad(source, tensors, objects, _object_readers(keys), arrays, matched[0], plan)


def _object_readers(keys: Sequence[Sequence[str]]) -> dict[str, tuple[int, bool]]:
    """The rank that reads each object, and whether others request it too: requesters take turns."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, of_rank in enumerate(keys):
        for key in of_rank:
            ranks_of[key].append(rank)
    return {
        key: (ranks[n % len(ranks)], len(ranks) > 1)
        for n, (key, ranks) in enumerate(sorted(ranks_of.items()))
    }


def _stays_cached(caches: Sequence[str], rank: int, wanted_nbytes: int) -> bool:
    """Whether what the ranks of this host read stays in its page cache for long enough."""
    num_sharing = sum(caches[rank] == other for other in caches)
    if not caches[rank] or num_sharing == 1:
        return True
    return _FREE_PER_NBYTES * num_sharing * wanted_nbytes <= available_nbytes()


def read_by_group(
    comm: Communicator, load: GroupLoad, state: StateDict, options: Options, allow: Allowed
) -> tuple[StateDict, BroadcastReport]:
    """Read and send everything; a state dict of the structure of the request. Collective.

    The caller runs it within an error check, so that every rank raises the StorageError of one.
    """
    opened: list[Opened] = []

    def open_reads() -> BeginReads:
        for tensor in load.matched.padding:
            tensor.zero_()
        by_name = {load.source.name(tensor): tensor for tensor in load.tensors}
        tensors = {name: by_name[name] for name in _arrays_read(load, comm.rank)}
        objects = {key: load.objects[key] for key in _objects_read(load, comm.rank)}
        opened.append(load.source.opened(tensors, objects))
        return opened[0].begin_reads

    targets = load.matched.targets
    report = run_group_plan(load.plan, load.arrays, targets, open_reads, comm, options)
    contents = _object_contents(comm, load, opened[0], READING * options.timeout_s)
    filled = dict(zip(map(id, load.tensors), load.matched.results, strict=True))

    def loaded(value: Any) -> Any:
        if id(value) in filled:
            return filled[id(value)]
        key = object_id(value).unique_key
        path, content = contents[key]
        return load_content(content, path, key, allow)

    return mapped_values(loaded, state), report


def _arrays_read(load: GroupLoad, rank: int) -> list[str]:
    """The names of the arrays of which this rank reads anything."""
    batches = chain.from_iterable(load.plan.rounds)
    numbers = {each.array for b in batches if b.reader == rank for each in b.slices}
    numbers |= {n for n, region, _ in load.matched.targets if (n, region) not in load.plan.shared}
    return [load.arrays[n].key for n in sorted(numbers)]


def _objects_read(load: GroupLoad, rank: int) -> list[str]:
    return [key for key, (reader, _) in load.readers.items() if reader == rank]


def _object_contents(
    comm: Communicator, load: GroupLoad, opened: Opened, limit_s: float
) -> dict[str, tuple[str, bytes]]:
    """Path and content of objects: this rank's, and those that ranks share. Collective."""
    contents: dict[str, tuple[str, bytes]] = {}

    def read(key: str) -> None:
        name = object_id(load.objects[key])
        contents[key] = opened.object_path(name), opened.object_content(name)

    def read_all() -> bytes:
        for key in _objects_read(load, comm.rank):
            run_within(Deadline.after(limit_s), key, partial(read, key))
        return pickle.dumps({key: found for key, found in contents.items() if load.readers[key][1]})

    if not any(is_shared for _, is_shared in load.readers.values()):
        read_all()
        return contents
    for answer in run_and_gather_bytes(comm, read_all):
        contents |= pickle.loads(answer)  # noqa: S301 - from ranks of this job
    return contents
