"""Which local shard files there are in the world, and the load of the newest complete save."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
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
    build_exchange_plan,
    build_survey,
    spread_shards,
)
from dist_ckpt_strategies.local.replicate import FilledShard
from dist_ckpt_strategies.local.retrieve import FileSource, Retrieval, run_retrieve
from dist_ckpt_strategies.local.shard_files import ShardDirectory, ShardReader
from dist_ckpt_strategies.local.shard_format import LocalShardId
from dist_ckpt_strategies.storage.io_pool import run_with_limit
from dist_ckpt_strategies.storage.time_limit import restart_limit

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

    @classmethod
    def of(
        cls,
        listings: Sequence[bytes],
        excluded: Collection[Copy] = frozenset(),
        at_least: int = 0,
    ) -> Inventory:
        """What the ranks have by their listings.

        Args:
            listings: what each has, as ``gather_listings`` gathers it.
            excluded: copies that are known to be damaged.
            at_least: saves of iterations before this one are left out.
        """
        nodes: dict[bytes, str] = {}
        copies: dict[bytes, tuple[Copy, ...]] = {}
        for text in set(listings):
            node, rows = json.loads(text)
            found = (
                Copy(node, path, LocalShardId.require(id_), *rest) for id_, path, *rest in rows
            )
            nodes[text] = node
            copies[text] = tuple(
                one
                for one in found
                if one.shard_id.save.iteration >= at_least and one not in excluded
            )
        return cls(
            tuple(map(nodes.__getitem__, listings)), tuple(map(copies.__getitem__, listings))
        )

    def saves(self) -> tuple[Completeness, ...]:
        """What there is of each save, the newest first."""
        distinct = {copy for copies in set(self.copies) for copy in copies}
        return build_survey((copy.shard_id, copy.world_size, copy.kind) for copy in distinct)

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

    def neighbours(self, rank: int) -> list[int]:
        """The ranks that see the same directory, this one too."""
        return [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]


def gather_listings(
    comm: Communicator, directory: ShardDirectory, session_id: str
) -> tuple[bytes, ...]:
    """What each rank has, by the headers of its files; damaged ones are left out.

    Collective. Ranks that see one directory send one list. ``Inventory.of`` takes it.

    Args:
        comm: all ranks.
        directory: this rank's node.
        session_id: files of other sessions are left out.
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
                rows.append([str(one.shard_id), path, shard.world_size, shard.kind])
        return json.dumps([directory.name(), rows]).encode()

    list_with_limit = partial(run_with_limit, listing, directory)
    listings = tuple(run_and_gather_bytes(comm, list_with_limit))
    restart_limit()  # peers that came late are not storage that is slow
    return listings


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The files that the ranks of a node can read.

    Attributes:
        directory: the node's.
        session_id: files of other sessions are left out.
        message_nbytes: bound on what travels at once.
    """

    directory: ShardDirectory
    session_id: str
    message_nbytes: int


def find_newest(
    comm: Communicator, local: LocalShards, resharded: Collection[str]
) -> Completeness | None:
    """The newest save of which every shard is somewhere, by the headers. Collective.

    Args:
        comm: all ranks.
        local: this rank's node.
        resharded: kinds of state that another number of ranks can use.
    """
    listings = gather_listings(comm, local.directory, local.session_id)
    return run_collectively(comm, lambda: _newest(comm, Inventory.of(listings).saves(), resharded))


def load_newest(
    comm: Communicator, local: LocalShards, resharded: Collection[str], at_least: int = 0
) -> tuple[FilledShard, ...]:
    """This rank's shard of the newest save whose shards can all be read undamaged.

    Collective. Copies that turn out to be damaged are left out, and the search begins anew.

    Args:
        comm: all ranks.
        local: this rank's node.
        resharded: kinds of state that another number of ranks can use; each rank gets some of the
            shards then.
        at_least: saves of iterations before this one are left alone.

    Raises:
        CheckpointNotFoundError: there is no local checkpoint at all.
        NoReplicasAvailableError: of each save some shard is lost; says which.
        PlanError: it was saved by another number of ranks.
    """
    damaged: dict[Copy, str] = {}
    while True:
        retrieval, found = _retrieve(comm, local, damaged, resharded, at_least)
        if not retrieval.bad:
            logger.debug("rank %s: %s", comm.global_rank(comm.rank), retrieval.report)
            return tuple(retrieval.shards.values())
        damaged |= {found[bad.rank][bad.shard_id]: bad.reason for bad in retrieval.bad}


def _retrieve(
    comm: Communicator,
    local: LocalShards,
    damaged: Mapping[Copy, str],
    resharded: Collection[str],
    at_least: int,
) -> tuple[Retrieval, Mapping[int, Mapping[str, Copy]]]:
    listings = gather_listings(comm, local.directory, local.session_id)
    found: dict[int, dict[str, Copy]] = {}

    def decide() -> ExchangePlan:
        inventory = Inventory.of(listings, damaged, at_least)
        target = _target(comm, inventory.saves(), tuple(damaged.values()), local, resharded)
        found.update(inventory.of_save(target))
        return _plan(comm, found, target)

    def open_source(shard_id: str) -> FileSource:
        copy = found[comm.rank].get(shard_id)
        return FileSource(shard_id, local.directory.root / copy.path if copy else None)

    return run_retrieve(comm, decide, open_source, message_nbytes=local.message_nbytes), found


def _target(
    comm: Communicator,
    saves: Sequence[Completeness],
    reasons: Sequence[str],
    local: LocalShards,
    resharded: Collection[str],
) -> Completeness:
    """The save to load."""
    target = _newest(comm, saves, resharded)
    if target is None:
        if not saves and not reasons:
            raise CheckpointNotFoundError(
                f"no local checkpoint below {local.directory} on any node",
                path=str(local.directory),
            )
        why = "; ".join([*map(_why_not, saves), *reasons])
        raise NoReplicasAvailableError(None, f"no local checkpoint is complete: {why}")
    if not _fits(comm, target, resharded):
        raise PlanError(
            f"iteration {target.save.iteration} was saved by {target.world_size} ranks, and "
            f"{comm.size} load it; shards of kind {', '.join(sorted(target.kinds))} fit the "
            "number of ranks that saved them; MCoreTensorAwareStateDict fits any"
        )
    return target


def _newest(
    comm: Communicator, saves: Sequence[Completeness], resharded: Collection[str]
) -> Completeness | None:
    """The newest save that is complete.

    Where its files state several worlds, none of which fits, it is passed over: it could keep the
    saves before it from being loaded.
    """
    worlds = [one.save for one in saves]
    complete = (one for one in saves if not one.missing)
    usable = (one for one in complete if worlds.count(one.save) == 1 or _fits(comm, one, resharded))
    return next(usable, None)


def _fits(comm: Communicator, one: Completeness, resharded: Collection[str]) -> bool:
    return one.world_size == comm.size or one.kinds.issubset(resharded)


def _why_not(one: Completeness) -> str:
    if not one.missing:
        return f"iteration {one.save.iteration}: its shards state different numbers of ranks"
    shown = ", ".join(map(str, one.missing[:_MAX_SHOWN]))
    more = len(one.missing) - _MAX_SHOWN
    text = f"{shown} and {more} more" if more > 0 else shown
    return f"iteration {one.save.iteration}: no rank has the shards of ranks {text}"


def _plan(
    comm: Communicator, found: Mapping[int, Mapping[str, Copy]], target: Completeness
) -> ExchangePlan:
    if target.world_size != comm.size:
        return build_exchange_plan(found, spread_shards(target.save, target.world_size, found))
    wanted = {
        rank: [str(LocalShardId(target.save, comm.global_rank(rank)))] for rank in range(comm.size)
    }
    return build_exchange_plan(found, wanted)
