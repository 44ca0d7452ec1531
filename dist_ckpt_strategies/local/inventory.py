"""Which local shard files all ranks have: what is loaded, what a save needs, and what goes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather_bytes, run_collectively
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NoReplicasAvailableError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.local.plan import (
    Completeness,
    ExchangePlan,
    assign_shards,
    build_exchange_plan,
    build_retention,
    group_saves,
)
from dist_ckpt_strategies.local.shard_files import ShardDirectory, ShardReader
from dist_ckpt_strategies.local.shard_format import (
    RESHARDED_KINDS,
    FilledShard,
    LocalShardId,
    SaveId,
)
from dist_ckpt_strategies.local.transfer import run_retrieve
from dist_ckpt_strategies.storage.io_pool import restart_limit, run_with_limit

logger = logging.getLogger(__name__)

_MAX_SHOWN = 8


class Copy(NamedTuple):
    """A file whose description is good.

    Attributes:
        path: the file, below its node's directory.
        shard_id: what it holds.
        world_size: ranks that took part in the save, as the file states.
        kind: how the state is encoded.
    """

    path: str
    shard_id: LocalShardId
    world_size: int
    kind: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """What all ranks together have.

    Attributes:
        nodes: for each rank what tells its node's directory from every other.
        copies: for each node its files.
    """

    nodes: tuple[str, ...]
    copies: Mapping[str, Sequence[Copy]]

    def saves(self) -> tuple[Completeness, ...]:
        """What there is of each save, the newest first."""
        return group_saves(
            (copy.shard_id, copy.world_size, copy.kind)
            for copy in chain.from_iterable(self.copies.values())
        )

    def of_save(self, save: Completeness) -> dict[int, dict[str, Copy]]:
        """A copy of each shard of a save that a rank can read, by rank and id."""
        by_node = {
            node: {
                str(copy.shard_id): copy
                for copy in reversed(copies)
                if (copy.shard_id.save, copy.world_size) == (save.save, save.world_size)
            }
            for node, copies in self.copies.items()
        }
        return {rank: by_node[node] for rank, node in enumerate(self.nodes)}

    def without(self, excluded: Collection[tuple[str, str]], at_least: int) -> Inventory:
        """The same without some files, by node and path, and without earlier iterations."""
        kept = {
            node: [
                copy
                for copy in copies
                if copy.shard_id.save.iteration >= at_least and (node, copy.path) not in excluded
            ]
            for node, copies in self.copies.items()
        }
        return Inventory(self.nodes, kept)

    def newest(self) -> Completeness | None:
        """The newest save of which every shard is somewhere, by the descriptions."""
        return next((one for one in self.saves() if not one.missing), None)


def gather_inventory(comm: Communicator, directory: ShardDirectory, session_id: str) -> Inventory:
    """What each rank has of a session, by what its files state; damaged ones are left out.

    Collective. Ranks that see one directory send one list.
    """

    def listing() -> bytes:
        rows = []
        try:
            found = directory.find()
        except StorageError as error:  # others have the copies
            logger.warning("no local checkpoints from %s: %s", directory, error)
            found = []
        for one in found:
            try:
                with ShardReader(one.path) as reader:
                    shard = reader.shard
            except CheckpointError as error:
                logger.warning("a local checkpoint is not used: %s", error)
                continue
            if shard.session_id == session_id:
                path = str(one.path.relative_to(directory.root))
                rows.append([path, str(one.shard_id), shard.world_size, shard.kind])
        return json.dumps([directory.name(), rows]).encode()

    listings = run_and_gather_bytes(comm, partial(run_with_limit, listing, directory))
    restart_limit()  # peers that came late are not storage that is slow
    nodes: list[str] = []
    copies: dict[str, list[Copy]] = {}
    parsed = {text: json.loads(text) for text in set(listings)}
    for text in listings:
        node, rows = parsed[text]
        nodes.append(node)
        if node not in copies:
            copies[node] = [
                Copy(path, LocalShardId.require(id_), *rest) for path, id_, *rest in rows
            ]
    return Inventory(tuple(nodes), copies)


def load_newest(
    comm: Communicator,
    directory: ShardDirectory,
    session_id: str,
    *,
    max_inflight_nbytes: int,
    at_least: int = 0,
) -> tuple[FilledShard, ...]:
    """This rank's shard of the newest save whose shards can all be read undamaged.

    Collective. Copies that turn out to be damaged are left out, and others are used. Where another
    number of ranks saved it, each rank gets some of the shards.

    Args:
        comm: all ranks.
        directory: this rank's node.
        session_id: files of other sessions are left out.
        max_inflight_nbytes: bound on what travels at once.
        at_least: saves of iterations before this one are left alone.

    Raises:
        CheckpointNotFoundError: there is no local checkpoint at all.
        NoReplicasAvailableError: of each save some shard is lost; says which.
        PlanError: it was saved by another number of ranks.
    """
    everything = gather_inventory(comm, directory, session_id)
    damaged: dict[tuple[str, str], str] = {}
    while True:
        inventory = everything.without(damaged, at_least)
        readable: dict[int, dict[str, Copy]] = {}
        decide = partial(_decide, comm, directory, inventory, list(damaged.values()), readable)
        found = run_retrieve(comm, decide, max_inflight_nbytes=max_inflight_nbytes)
        if not found.bad:
            return tuple(found.shards.values())
        for (rank, id_), reason in found.bad.items():
            damaged[inventory.nodes[rank], readable[rank][id_].path] = reason
        restart_limit()


def _decide(
    comm: Communicator,
    directory: ShardDirectory,
    inventory: Inventory,
    reasons: Sequence[str],
    readable: dict[int, dict[str, Copy]],
) -> tuple[ExchangePlan, dict[str, Path]]:
    """Who reads what of the newest save for whom, and this rank's copies; fills ``readable``."""
    target = inventory.newest()
    if target is None:
        saves = inventory.saves()
        if not saves and not reasons:
            raise CheckpointNotFoundError(
                f"no local checkpoint below {directory} on any node", path=str(directory)
            )
        why = "; ".join([*map(_why_not, saves), *reasons])
        raise NoReplicasAvailableError(None, f"no local checkpoint is complete: {why}")
    if target.world_size != comm.size and not target.kinds.issubset(RESHARDED_KINDS):
        raise PlanError(
            f"iteration {target.save.iteration} was saved by {target.world_size} ranks, and "
            f"{comm.size} load it; shards of kind {', '.join(sorted(target.kinds))} fit "
            "the number of ranks that saved them; MCoreTensorAwareStateDict fits any"
        )
    readable.update(inventory.of_save(target))
    wanted = assign_shards(target.save, target.world_size, readable)
    if target.world_size == comm.size:
        wanted = {rank: (str(LocalShardId(target.save, rank)),) for rank in range(comm.size)}
    own = {id_: directory.root / copy.path for id_, copy in readable[comm.rank].items()}
    return build_exchange_plan(readable, wanted), own


def _why_not(one: Completeness) -> str:
    shown = ", ".join(map(str, one.missing[:_MAX_SHOWN]))
    more = len(one.missing) - _MAX_SHOWN
    text = f"{shown} and {more} more" if more > 0 else shown
    return f"iteration {one.save.iteration}: no rank has the shards of ranks {text}"


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank is about to save.

    Attributes:
        iteration: of the training.
        stamp: the save's, if this is the first rank.
        nbytes: size of its shard.
        members: global ranks of its clique.
        device: tells the file system that it writes to from every other.
        freed_nbytes: of stale files that it has removed there.
        free_nbytes: room there after that.
        is_async: whether it does so in the background.
    """

    iteration: int
    stamp: str
    nbytes: int
    members: Sequence[int]
    device: str
    freed_nbytes: int
    free_nbytes: int
    is_async: bool


def require_possible(intents: Sequence[Intent], directory: ShardDirectory) -> None:
    """Raise unless the ranks save the same iteration, and each file system has room.

    Equal intents give equal answers, so no rank raises alone. A rank may have looked before or
    after another removed its stale files: these count as room either way.

    Args:
        intents: by rank.
        directory: for messages.

    Raises:
        PlanError: they save different iterations, or some in the background and others not.
        StorageError: a file system lacks room; says how much.
    """
    first = intents[0]
    for rank, intent in enumerate(intents):
        if intent.iteration != first.iteration or intent.iteration < 0:
            raise PlanError(
                f"rank {rank} saves iteration {intent.iteration}, rank 0 saves {first.iteration}; "
                "expected one number, 0 or more"
            )
        if intent.is_async != first.is_async:
            raise PlanError(
                f"rank {rank} saves with is_async={intent.is_async}, rank 0 with "
                f"is_async={first.is_async}; give the same on all ranks"
            )
    needed: Counter[str] = Counter()
    freed: Counter[str] = Counter()
    for intent in intents:
        needed[intent.device] += sum(intents[member].nbytes for member in intent.members)
        freed[intent.device] += intent.freed_nbytes
    free: dict[str, int] = {}
    for intent in intents:
        found = intent.free_nbytes + freed[intent.device] - intent.freed_nbytes
        free[intent.device] = min(found, free.get(intent.device, found))
    for rank, intent in enumerate(intents):
        if needed[intent.device] > free[intent.device]:
            raise StorageError(
                f"{directory}: the shards of this save need {needed[intent.device]} bytes on the "
                f"file system of rank {rank}, which has {free[intent.device]} left; free some, or "
                "keep fewer saves or copies",
                path=str(directory),
            )


def complete_save(
    comm: Communicator, directory: ShardDirectory, session_id: str, newest: SaveId, num_kept: int
) -> None:
    """Raise unless all shards of a save are there, then remove the saves that are not kept.

    Collective. On each node the first rank also removes shards that were kept for ranks that are
    on other nodes now, or gone, and what killed saves have left there.

    Args:
        comm: all ranks.
        directory: this rank's node.
        session_id: of the save.
        newest: the save that has just been made.
        num_kept: saves to keep.

    Raises:
        StorageError: shards that were written are gone, or cannot be read; says whose.
    """
    found = gather_inventory(comm, directory, session_id)

    def clean_up() -> None:
        saves = found.saves()
        missing = [one.missing for one in saves if one.save == newest]
        if () not in missing:
            whose = ", ".join(map(str, missing[0])) if missing else "all"
            raise StorageError(
                f"the local save of iteration {newest.iteration} is not whole: no rank can read "
                f"what was written of ranks {whose}"
            )
        kept = build_retention([one.save for one in saves if not one.missing], newest, num_kept)
        me = comm.rank
        here = [rank for rank, node in enumerate(found.nodes) if node == found.nodes[me]]
        holders = {me}
        with _failures_logged():
            if me == here[0]:
                holders.update(set(directory.holders()).difference(here))
            for holder in holders:
                directory.remove_stale_files(holder)
        remove_shards(directory, holders, lambda save: save not in kept)

    run_collectively(comm, clean_up)


def remove_shards(
    directory: ShardDirectory, holders: Collection[int], is_outdated: Callable[[SaveId], bool]
) -> None:
    """Remove what ranks keep of outdated saves, or of one that failed. A failure is logged."""
    with _failures_logged():
        for found in directory.find():
            if found.holder in holders and is_outdated(found.shard_id.save):
                with _failures_logged():
                    directory.remove(found)


@contextmanager
def _failures_logged() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("shards that no load needs are still there: %s", error)
