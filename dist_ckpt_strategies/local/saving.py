"""What surrounds the writing of shards: is there room, and what may go afterwards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import PlanError, StorageError
from dist_ckpt_strategies.local.loading import Inventory
from dist_ckpt_strategies.local.plan import build_retention
from dist_ckpt_strategies.local.shard_files import FoundShard, ShardDirectory
from dist_ckpt_strategies.local.shard_format import SaveId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank is about to save.

    Attributes:
        iteration: of the training.
        nbytes: size of its shard.
        members: global ranks of its clique.
        device: tells the file system that it writes to from every other.
        freed_nbytes: of leftovers that it has removed there.
        free_nbytes: room there after that.
        is_async: whether it does so in the background.
    """

    iteration: int
    nbytes: int
    members: tuple[int, ...]
    device: str
    freed_nbytes: int
    free_nbytes: int
    is_async: bool


def require_possible(intents: Mapping[int, Intent], directory: ShardDirectory) -> None:
    """Raise unless the ranks save the same iteration, and each file system has room.

    Equal intents give equal answers, so no rank raises alone. Nobody knows whether a rank looked
    before or after another had removed its leftovers: these count as room either way.

    Args:
        intents: by global rank.
        directory: for messages.

    Raises:
        PlanError: they save different iterations, or some in the background and others not.
        StorageError: a file system lacks room; says how much.
    """
    first = min(intents)
    for rank, intent in intents.items():
        if intent.iteration != intents[first].iteration or intent.iteration < 0:
            raise PlanError(
                f"rank {rank} saves iteration {intent.iteration}, rank {first} saves "
                f"{intents[first].iteration}; expected one number, 0 or more"
            )
        if intent.is_async != intents[first].is_async:
            raise PlanError(
                f"rank {rank} saves with is_async={intent.is_async}, rank {first} with "
                f"is_async={intents[first].is_async}; give the same on all ranks"
            )
    needed: Counter[str] = Counter()
    freed: Counter[str] = Counter()
    for intent in intents.values():
        needed[intent.device] += sum(intents[member].nbytes for member in intent.members)
        freed[intent.device] += intent.freed_nbytes
    free: dict[str, int] = {}
    for intent in intents.values():
        found = intent.free_nbytes + freed[intent.device] - intent.freed_nbytes
        free[intent.device] = min(found, free.get(intent.device, found))
    for rank, intent in intents.items():
        if needed[intent.device] > free[intent.device]:
            raise StorageError(
                f"{directory}: the shards of this save need {needed[intent.device]} bytes on the "
                f"file system of rank {rank}, which has {free[intent.device]} left; free some, or "
                "keep fewer saves or copies",
                path=str(directory),
            )


def require_complete(found: Inventory, save: SaveId) -> None:
    """Raise unless some rank can read each shard of a save.

    Args:
        found: what all ranks have.
        save: the save.

    Raises:
        StorageError: shards that were written are gone, or cannot be read; says whose.
    """
    states = [one.missing for one in found.saves() if one.save == save]
    if () not in states:
        whose = ", ".join(map(str, states[0])) if states else "all"
        raise StorageError(
            f"the local save of iteration {save.iteration} is not whole: no rank can read what was "
            f"written of ranks {whose}"
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


def remove_outdated(
    comm: Communicator,
    directory: ShardDirectory,
    found: Inventory,
    newest: SaveId,
    num_kept: int,
) -> None:
    """Remove the shards of saves that are not kept, in this rank's directory. Rank-local.

    On each node the first rank also does so where ranks kept shards that are on other nodes now,
    or gone, and removes what killed saves have left there. A failure is logged: the save itself
    is complete.

    Args:
        comm: all ranks.
        directory: this rank's node.
        found: what all ranks have, the newest save included.
        newest: the save that has just been completed.
        num_kept: saves to keep.
    """
    complete = [one.save for one in found.saves() if not one.missing]
    kept = build_retention(complete, newest, num_kept)
    try:
        holders = _responsible(comm, directory, found)
        for holder in holders:
            directory.remove_leftovers(holder)
        shards = directory.find()
    except StorageError as error:
        logger.warning("old local checkpoints are still there: %s", error)
        return
    _remove(directory, (p for p in shards if p.holder in holders and p.shard_id.save not in kept))


def _remove(directory: ShardDirectory, shards: Iterable[FoundShard]) -> None:
    for shard in shards:
        try:
            directory.remove(shard)
        except StorageError as error:
            logger.warning("%s is still there: %s", shard.shard_id, error)


def _responsible(comm: Communicator, directory: ShardDirectory, found: Inventory) -> frozenset[int]:
    """The holders whose outdated shards this rank removes."""
    me = comm.global_rank(comm.rank)
    here = [comm.global_rank(rank) for rank in found.neighbours(comm.rank)]
    strangers = set(directory.holders()).difference(here) if me == min(here) else set()
    return frozenset({me, *strangers})
