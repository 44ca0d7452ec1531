"""Load a state dict by a group of ranks: request, plan, read and send.

The ranks of a group talk up to four times before they read: about what they request, about the
objects if there are any, about the arrays, and about the regions of them. Then all ranks of the
world agree, and each group carries out its plan.
"""

import json
import pickle
from collections import defaultdict
from collections.abc import Callable, Sequence
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
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    mapped_values,
    object_id,
    sharded_values,
)
from dist_ckpt_strategies.megatron.types import ShardedTensor
from dist_ckpt_strategies.sharded.checks import require_same_checkpoint
from dist_ckpt_strategies.sharded.load import warn_of_conversions
from dist_ckpt_strategies.storage.host import PageCache, available_nbytes, page_cache_of
from dist_ckpt_strategies.storage.io_pool import ENDING, OPENING, Deadline, run_within
from dist_ckpt_strategies.storage.store import ArrayReader
from dist_ckpt_strategies.two_stage.broadcast import run_group_plan
from dist_ckpt_strategies.two_stage.plan import GroupPlan, build_group_plan, encode_regions
from dist_ckpt_strategies.two_stage.sources import (
    GroupLoad,
    Matched,
    Opened,
    Source,
    StrategySource,
)

_FREE_PER_NBYTES = 2
"""Pages stay in the cache until all ranks have read them if so many times as much is free."""


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

    Args:
        world: all ranks.
        group: the ranks that read together. Their smallest memory budget counts.
        open_source: rank-local.
        state: what this rank requests.
        name: of the checkpoint, for messages.
        options: timeouts and memory bounds.
        allow: classes that objects may be unpickled to.
    """
    loads: list[GroupLoad] = []

    def prepare() -> Message:
        loads.append(plan_by_group(group, open_source, state, options))
        return [loads[0].matched.converted, loads[0].source.identity]

    converted, identities = zip(*run_and_gather(world, prepare), strict=True)
    require_same_checkpoint(world, name, identities)
    load, limit_s = loads[0], ENDING * options.timeout_s
    read = lambda: read_by_group(group, load, options, allow)  # noqa: E731
    loaded = run_collectively(world, lambda: load.source.save.read(read, limit_s))
    warn_of_conversions(world, name, converted)
    return loaded


def plan_by_group(
    comm: Communicator, open_source: Callable[[], Source], state: StateDict, options: Options
) -> GroupLoad:
    """Gather what the ranks request, check it, and plan. Collective.

    No tensor has been filled. The caller runs it within an error check, so that every rank raises
    the ShapeMismatchError, DTypeMismatchError, ArrayNotFoundError or StorageError of one.
    """
    opened: list[tuple[Source, list[Any], list[Any]]] = []

    def request() -> bytes:
        source, values = open_source(), list(sharded_values(state))
        tensors = [value for value in values if isinstance(value, ShardedTensor)]
        objects = [value for value in values if not isinstance(value, ShardedTensor)]
        opened.append((source, tensors, objects))
        cache = _page_cache(comm, source, options)
        names = sorted({source.name(tensor) for tensor in tensors})
        return json.dumps([options.max_inflight_bytes, cache, bool(objects), names]).encode()

    answers = run_and_gather_bytes(comm, request)  # 1
    parsed = {answer: json.loads(answer) for answer in set(answers)}
    budgets, _, have_objects, all_names = zip(*parsed.values(), strict=True)
    source, tensors, objects = opened[0]
    requesters = _requesters(comm, objects) if any(have_objects) else {}  # 2
    caches = [parsed[answer][1] and PageCache(*parsed[answer][1]) for answer in answers]
    if all(cache and cache.is_storage for cache in caches):
        parts = _planned_alone(source, tensors, caches)
    else:
        names = sorted(set(chain.from_iterable(all_names)))
        parts = _planned(comm, source, tensors, names, caches, min(budgets))
    return GroupLoad(source, state, comm.rank, tensors, objects, requesters, *parts)


def _planned_alone(
    source: Source, tensors: Sequence[Any], caches: Sequence[PageCache]
) -> tuple[Sequence[ArraySpec], Matched, GroupPlan]:
    """Have every rank read all that it requests: storage is memory. Rank-local."""
    own = [source.name(tensor) for tensor in tensors]
    names = sorted(set(own))
    number = {name: n for n, name in enumerate(names)}
    arrays = source.find(names)
    match = source.match(tensors, [number[name] for name in own], arrays)
    return arrays, match, GroupPlan((), frozenset(), tuple(cache.name for cache in caches))


def _planned(
    comm: Communicator,
    source: Source,
    tensors: Sequence[Any],
    names: Sequence[str],
    caches: Sequence[PageCache | None],
    budget: int,
) -> tuple[Sequence[ArraySpec], Matched, GroupPlan]:
    """Have one rank read what several request. Collective; ``names`` are those of all ranks."""
    arrays = _found(comm, source, names)  # 3
    matches: list[Matched] = []

    def describe() -> bytes:
        number = {name: n for n, name in enumerate(names)}
        own = [number[source.name(tensor)] for tensor in tensors]
        matches.append(source.match(tensors, own, arrays))
        targets = matches[0].targets
        nbytes = min(budget, sum(target.tensor.nbytes for target in targets))
        regions = encode_regions((target.array, target.region) for target in targets)
        return f"{int(_stays_cached(caches, comm.rank, nbytes))}\n{regions}".encode()

    requests = run_and_gather_bytes(comm, describe)  # 4
    distinct = {request: request.decode().partition("\n") for request in set(requests)}
    fits = all(stays_cached == "1" for stays_cached, _, _ in distinct.values())
    cache_names = tuple(cache.name if cache and fits else None for cache in caches)
    regions = [distinct[request][2] for request in requests]
    plan = build_group_plan(regions, arrays, cache_names, max_inflight_bytes=budget)
    return arrays, matches[0], plan


def _page_cache(comm: Communicator, source: Source, options: Options) -> list[Any] | None:
    """What this rank reads through, if it may share that with others: name, and whether memory."""
    root = source.save.root
    if isinstance(source, StrategySource) or not isinstance(root, Path):
        return None
    if comm.device.type != "cpu":
        return None
    deadline = Deadline.after(OPENING * options.timeout_s)
    cache = run_within(deadline, root, lambda: page_cache_of(root))
    return None if cache is None else [cache.name, cache.is_storage]


def _requesters(comm: Communicator, objects: Sequence[Any]) -> dict[str, list[int]]:
    """Which ranks request each object. Collective."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    own = lambda: sorted({object_id(value).unique_key for value in objects})  # noqa: E731
    for rank, keys in enumerate(run_and_gather(comm, own)):
        for key in keys:
            ranks_of[key].append(rank)
    return dict(sorted(ranks_of.items()))


def _found(comm: Communicator, source: Source, names: Sequence[str]) -> list[ArraySpec]:
    """The arrays of these names; each is looked up by one rank. Collective."""
    rank, size = comm.rank, comm.size
    if isinstance(source, StrategySource):
        return source.find(names)
    answers = run_and_gather_bytes(comm, lambda: pickle.dumps(source.find(names[rank::size])))
    shares = [pickle.loads(answer) for answer in answers]  # noqa: S301 - from ranks of this job
    return [shares[n % size][n // size] for n in range(len(names))]


def _stays_cached(caches: Sequence[PageCache | None], rank: int, wanted_nbytes: int) -> bool:
    """Whether what the ranks of this host read stays in its page cache for long enough."""
    num_sharing = sum(caches[rank] == other for other in caches)
    if caches[rank] is None or num_sharing == 1:
        return True
    return _FREE_PER_NBYTES * num_sharing * wanted_nbytes <= available_nbytes()


def read_by_group(
    comm: Communicator, load: GroupLoad, options: Options, allow: Allowed
) -> tuple[StateDict, BroadcastReport]:
    """Read and send everything; a state dict of the structure of the request. Collective.

    The caller runs it within an error check, so that every rank raises the StorageError of one.
    """
    opened: list[Opened] = []

    def open_reader() -> ArrayReader:
        for tensor in load.matched.padding:
            tensor.zero_()
        opened.append(load.source.opened(load))
        return opened[0].reader

    targets = load.matched.targets
    report = run_group_plan(load.plan, load.arrays, targets, open_reader, comm, options)
    contents = _object_contents(comm, load, opened[0]) if load.requesters else {}
    loaded: dict[int, Any] = {}
    for value in load.objects:
        name = object_id(value)
        content, path = contents[name.unique_key], opened[0].object_path(name)
        loaded[id(value)] = load_content(content, path, name.unique_key, allow)
    results = zip(load.tensors, load.matched.results, strict=True)
    loaded |= {id(tensor): result for tensor, result in results}
    return mapped_values(lambda value: loaded[id(value)], load.state), report


def _object_contents(comm: Communicator, load: GroupLoad, opened: Opened) -> dict[str, bytes]:
    """Read this rank's objects, and gather the shared ones. Collective."""
    contents: dict[str, bytes] = {}

    def read() -> bytes:
        own = load.objects_read()
        contents.update({key: opened.object_content(key) for key in own})
        shared = [key for key in own if len(load.requesters[key]) > 1]
        sizes = json.dumps([[key, len(contents[key])] for key in shared])
        return b"\n".join([sizes.encode(), b"".join(contents[key] for key in shared)])

    for answer in run_and_gather_bytes(comm, read):
        sizes, _, content = answer.partition(b"\n")
        start = 0
        for key, nbytes in json.loads(sizes):
            contents[key] = content[start : start + nbytes]
            start += nbytes
    return contents
