"""Which local shard files all ranks have: what is loaded, what a save needs, and what goes."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

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
from dist_ckpt_strategies.local.replicate import FilledShard
from dist_ckpt_strategies.local.retrieve import FileSource, Retrieval, run_retrieve
from dist_ckpt_strategies.local.shard_files import FoundShard, ShardDirectory, ShardReader
from dist_ckpt_strategies.local.shard_format import RESHARDED_KINDS, LocalShardId, SaveId
from dist_ckpt_strategies.storage.io_pool import restart_limit, run_with_limit

logger = logging.getLogger(__name__)

_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Copy:
    """A file with a good header.

    Attributes:
        node: tells the node's directory from every other.
        path: the file, below that directory.
        shard_id: what it holds.
        world_size: ranks that took part in the save, as the file states.
        kind: how the state is encoded.
    """

    node: str
    path: str
    shard_id: LocalShardId
    world_size: int
    kind: str


@dataclass(frozen=True, slots=True)
class Inventory:
    """What all ranks together have.

    Attributes:
        nodes: for each rank what tells its node's directory from every other.
        copies: for each rank the files that it can read.
    """

    nodes: tuple[str, ...]
    copies: tuple[tuple[Copy, ...], ...]

    def saves(self) -> tuple[Completeness, ...]:
        """What there is of each save, the newest first."""
        distinct = {copy for copies in set(self.copies) for copy in copies}
        return group_saves((copy.shard_id, copy.world_size, copy.kind) for copy in distinct)

    def of_save(self, save: Completeness) -> dict[int, dict[str, Copy]]:
        """A copy of each shard of a save that a rank can read, by rank and id."""
        by_node = {
            copies: {
                str(copy.shard_id): copy
                for copy in reversed(copies)
                if (copy.shard_id.save, copy.world_size) == (save.save, save.world_size)
            }
            for copies in set(self.copies)
        }
        return {rank: by_node[copies] for rank, copies in enumerate(self.copies)}


def gather_inventory(
    comm: Communicator,
    directory: ShardDirectory,
    session_id: str,
    *,
    excluded: Collection[Copy] = frozenset(),
    at_least: int = 0,
) -> Inventory:
    """What each rank has, by the headers of its files; damaged ones are left out. Collective.

    Ranks that see one directory send one list.

    Args:
        comm: all ranks.
        directory: this rank's node.
        session_id: files of other sessions are left out.
        excluded: copies that are known to be damaged.
        at_least: saves of iterations before this one are left out.
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
                    shard = reader.stored.shard
            except CheckpointError as error:
                logger.warning("a local checkpoint is not used: %s", error)
                continue
            if shard.session_id == session_id:
                path = str(one.path.relative_to(directory.root))
                rows.append([path, str(one.shard_id), shard.world_size, shard.kind])
        return json.dumps([directory.name(), rows]).encode()

    listings = run_and_gather_bytes(comm, partial(run_with_limit, listing, directory))
    restart_limit()  # peers that came late are not storage that is slow
    nodes: dict[bytes, str] = {}
    copies: dict[bytes, tuple[Copy, ...]] = {}
    for text in set(listings):
        node, rows = json.loads(text)
        found = (Copy(node, path, LocalShardId.require(id_), *rest) for path, id_, *rest in rows)
        nodes[text] = node
        copies[text] = tuple(
            one for one in found if one.shard_id.save.iteration >= at_least and one not in excluded
        )
    return Inventory(tuple(nodes[text] for text in listings), tuple(copies[t] for t in listings))


def newest_save(found: Inventory) -> Completeness | None:
    """The newest save of which every shard is somewhere, by the headers.

    Where its files state several worlds, none of which fits, it is passed over: it could keep the
    saves before it from being loaded.
    """
    saves = found.saves()
    worlds = [one.save for one in saves]
    complete = (one for one in saves if not one.missing)
    usable = (one for one in complete if worlds.count(one.save) == 1 or _fits(found, one))
    return next(usable, None)


def load_newest(
    comm: Communicator,
    directory: ShardDirectory,
    session_id: str,
    *,
    max_inflight_nbytes: int,
    at_least: int = 0,
) -> tuple[FilledShard, ...]:
    """This rank's shard of the newest save whose shards can all be read undamaged.

    Collective. Copies that turn out to be damaged are left out, and the search begins anew. Where
    another number of ranks saved it, each rank gets some of the shards.

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
    damaged: dict[Copy, str] = {}
    while True:
        inventory = gather_inventory(
            comm, directory, session_id, excluded=damaged, at_least=at_least
        )
        reasons = tuple(damaged.values())
        retrieval, readable = _retrieve(comm, directory, inventory, reasons, max_inflight_nbytes)
        if not retrieval.bad:
            return tuple(retrieval.shards.values())
        damaged |= {readable[rank][id_]: reason for (rank, id_), reason in retrieval.bad.items()}


def _retrieve(
    comm: Communicator,
    directory: ShardDirectory,
    inventory: Inventory,
    reasons: Sequence[str],
    max_inflight_nbytes: int,
) -> tuple[Retrieval, Mapping[int, Mapping[str, Copy]]]:
    """Retrieve the newest save; also returns the copies of it that each rank can read."""
    readable: dict[int, dict[str, Copy]] = {}

    def decide() -> ExchangePlan:
        target = _target(inventory, reasons, directory)
        readable.update(inventory.of_save(target))
        if target.world_size != comm.size:
            wanted = assign_shards(target.save, target.world_size, readable)
        else:
            wanted = {
                rank: (str(LocalShardId(target.save, comm.global_rank(rank))),)
                for rank in range(comm.size)
            }
        return build_exchange_plan(readable, wanted)

    def open_source(shard_id: str) -> FileSource:
        copy = readable[comm.rank].get(shard_id)
        return FileSource(shard_id, directory.root / copy.path if copy else None)

    found = run_retrieve(comm, decide, open_source, max_inflight_nbytes=max_inflight_nbytes)
    return found, readable


def _target(
    inventory: Inventory, reasons: Sequence[str], directory: ShardDirectory
) -> Completeness:
    """The save to load."""
    target = newest_save(inventory)
    if target is None:
        saves = inventory.saves()
        if not saves and not reasons:
            raise CheckpointNotFoundError(
                f"no local checkpoint below {directory} on any node", path=str(directory)
            )
        why = "; ".join([*map(_why_not, saves), *reasons])
        raise NoReplicasAvailableError(None, f"no local checkpoint is complete: {why}")
    if not _fits(inventory, target):
        raise PlanError(
            f"iteration {target.save.iteration} was saved by {target.world_size} ranks, and "
            f"{len(inventory.nodes)} load it; shards of kind {', '.join(sorted(target.kinds))} fit "
            "the number of ranks that saved them; MCoreTensorAwareStateDict fits any"
        )
    return target


def _fits(found: Inventory, one: Completeness) -> bool:
    return one.world_size == len(found.nodes) or one.kinds.issubset(RESHARDED_KINDS)


def _why_not(one: Completeness) -> str:
    if not one.missing:
        return f"iteration {one.save.iteration}: its shards state different numbers of ranks"
    shown = ", ".join(map(str, one.missing[:_MAX_SHOWN]))
    more = len(one.missing) - _MAX_SHOWN
    text = f"{shown} and {more} more" if more > 0 else shown
    return f"iteration {one.save.iteration}: no rank has the shards of ranks {text}"


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank is about to save.

    Attributes:
        iteration: of the training.
        nbytes: size of its shard.
        members: global ranks of its clique.
        device: tells the file system that it writes to from every other.
        freed_nbytes: of stale files that it has removed there.
        free_nbytes: room there after that.
        is_async: whether it does so in the background.
    """

    iteration: int
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


def remove_save(directory: ShardDirectory, holder: int, save: SaveId) -> None:
    """Remove what a rank keeps of a save that has failed. Rank-local; a failure is logged.

    Args:
        directory: this rank's node.
        holder: this rank, counted globally.
        save: the save.
    """
    try:
        shards = directory.find()
    except StorageError as error:
        logger.warning("shards of a save that failed are still there: %s", error)
        return
    _remove(directory, (p for p in shards if p.holder == holder and p.shard_id.save == save))


def complete_save(
    comm: Communicator, directory: ShardDirectory, session_id: str, newest: SaveId, num_kept: int
) -> None:
    """Raise unless all shards of a save are there, then remove the saves that are not kept.

    Collective. On each node the first rank also removes shards that were kept for ranks that are
    on other nodes now, or gone, and what killed saves have left there. A removal that fails is
    logged: the save itself is complete.

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
        states = [one.missing for one in saves if one.save == newest]
        if () not in states:
            whose = ", ".join(map(str, states[0])) if states else "all"
            raise StorageError(
                f"the local save of iteration {newest.iteration} is not whole: no rank can read "
                f"what was written of ranks {whose}"
            )
        kept = build_retention([one.save for one in saves if not one.missing], newest, num_kept)
        me = comm.rank
        here = [rank for rank, node in enumerate(found.nodes) if node == found.nodes[me]]
        try:
            others = set(directory.holders()).difference(here) if me == here[0] else set()
            holders = {me, *others}
            for holder in holders:
                directory.remove_stale_files(holder)
            shards = directory.find()
        except StorageError as error:
            logger.warning("old local checkpoints are still there: %s", error)
            return
        outdated = (p for p in shards if p.holder in holders and p.shard_id.save not in kept)
        _remove(directory, outdated)

    run_collectively(comm, clean_up)


def _remove(directory: ShardDirectory, shards: Iterable[FoundShard]) -> None:
    for shard in shards:
        try:
            directory.remove(shard)
        except StorageError as error:
            logger.warning("%s is still there: %s", shard.shard_id, error)
