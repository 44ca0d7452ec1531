"""What surrounds the writing of parts: is there room, and what may go afterwards."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import PlanError, StorageError
from dist_ckpt_strategies.local.availability import Availability
from dist_ckpt_strategies.plan.retention import build_retention, outdated
from dist_ckpt_strategies.spec.part import SaveId
from dist_ckpt_strategies.storage.part_files import PartDirectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Intent:
    """What one rank is about to save.

    Attributes:
        iteration: of the training.
        nbytes: size of its part.
        members: global ranks of its clique.
        device: tells the file system that it writes to from every other.
        free_nbytes: room there.
    """

    iteration: int
    nbytes: int
    members: tuple[int, ...]
    device: str
    free_nbytes: int


def require_possible(intents: Mapping[int, Intent], directory: PartDirectory) -> None:
    """Raise unless the ranks save the same iteration, and each file system has room.

    Args:
        intents: by global rank.
        directory: for messages.

    Raises:
        PlanError: they save different iterations.
        StorageError: a file system lacks room; says how much.
    """
    first = min(intents)
    for rank, intent in intents.items():
        if intent.iteration != intents[first].iteration or intent.iteration < 0:
            raise PlanError(
                f"rank {rank} saves iteration {intent.iteration}, rank {first} saves "
                f"{intents[first].iteration}; expected one number, 0 or more"
            )
    needed: Counter[str] = Counter()
    free: dict[str, int] = {}
    for intent in intents.values():
        needed[intent.device] += sum(intents[member].nbytes for member in intent.members)
        found = free.get(intent.device, intent.free_nbytes)
        free[intent.device] = min(found, intent.free_nbytes)
    for rank, intent in intents.items():
        if needed[intent.device] > free[intent.device]:
            raise StorageError(
                f"{directory}: the parts of this save need {needed[intent.device]} bytes on the "
                f"file system of rank {rank}, which has {free[intent.device]} left; free some, or "
                "keep fewer saves or copies",
                path=str(directory),
            )


def remove_outdated(
    comm: Communicator,
    directory: PartDirectory,
    found: Availability,
    newest: SaveId,
    num_kept: int,
) -> None:
    """Remove the parts of saves that are not kept, in this rank's directory. Rank-local.

    On each node the first rank also does so where ranks kept parts that are on other nodes now,
    or gone. A failure is logged: the save itself is complete.

    Args:
        comm: all ranks.
        directory: this rank's node.
        found: what all ranks have, the newest save included.
        newest: the save that has just been completed.
        num_kept: saves to keep.
    """
    complete = [one.save for one in found.survey() if not one.missing]
    kept = build_retention(complete, newest, num_kept)
    try:
        holders = _responsible(comm, directory, found)
        parts = directory.find()
        doomed = set(outdated([one.part_id for one in parts], kept))
        for one in parts:
            if one.part_id in doomed and one.holder in holders:
                directory.remove(one)
    except StorageError as error:
        logger.warning("old local checkpoints are still there: %s", error)


def _responsible(
    comm: Communicator, directory: PartDirectory, found: Availability
) -> frozenset[int]:
    """The holders whose outdated parts this rank removes."""
    me = comm.global_rank(comm.rank)
    here = [comm.global_rank(rank) for rank in found.neighbours(comm.rank)]
    strangers = set(directory.holders()).difference(here) if me == min(here) else set()
    return frozenset({me, *strangers})
