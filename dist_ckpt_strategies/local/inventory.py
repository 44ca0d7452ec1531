"""Which local shard files all ranks have: what is loaded, what a save needs, and what goes."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import chain, takewhile
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NoReplicasAvailableError,
    NoUsableCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.local.packs import LoadedShard
from dist_ckpt_strategies.local.plan import (
    Completeness,
    ExchangePlan,
    LocalShardId,
    SaveId,
    build_exchange_plan,
    build_retention,
    group_saves,
)
from dist_ckpt_strategies.local.retrieve import Copy, run_retrieve
from dist_ckpt_strategies.local.shard_files import TRAINING_NAME, ShardDirectory, open_shard
from dist_ckpt_strategies.storage.io_pool import restart_limit, run_with_limit

logger = logging.getLogger(__name__)

_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Inventory:
    """What all ranks together have.

    For each rank, ``nodes`` has the first one that sees the same directory; ``copies`` has what
    there is in each of these directories, by that first rank. ``has_finished`` says whether any
    save has come to its end: shards that are missing were lost then. ``foreign`` tells of saves of
    another training, if there are any, ``unread`` of errors: what is missing may be there then.
    """

    nodes: Sequence[int]
    copies: Mapping[int, list[Copy]]
    has_finished: bool
    foreign: str | None
    unread: Sequence[str]

    def saves(self) -> tuple[Completeness, ...]:
        """What there is of each save, the newest first."""
        return group_saves(
            (copy.shard_id, copy.world_size) for copy in chain.from_iterable(self.copies.values())
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

    def newest(self) -> Completeness | None:
        """The newest save of which every shard is somewhere, by the descriptions."""
        return next((one for one in self.saves() if not one.missing), None)

    def missing_text(self) -> str:
        """What each save lacks that is newer than the newest complete one."""
        return "; ".join(map(_why_not, takewhile(lambda one: one.missing, self.saves())))


def gather_inventory(
    comm: Communicator,
    directory: ShardDirectory,
    session_id: str,
    at_least: int = 0,
    begin: Callable[[], object] = lambda: None,
) -> Inventory:
    """What the ranks have of a session, by what the files state; damaged ones are left out.

    Collective: two gathers, of a few bytes for each save and shard that a rank keeps. Files of
    other sessions and trainings, of iterations before ``at_least``, and of courses that the
    training has left, are left out too. ``begin`` is called first.
    """

    def describe() -> list[str]:
        begin()
        training = "" if comm.rank else run_with_limit(directory.training_id, directory)
        return [directory.name(), training]

    names, (own, *_) = zip(*run_and_gather(comm, describe), strict=True)
    nodes = nodes_of(names)
    restart_limit()  # peers that came late are not storage that is slow
    answers = run_and_gather(comm, lambda: listing(directory, comm.rank, nodes, own))
    restart_limit()
    return build_inventory(directory, nodes, answers, own, session_id, at_least)


def nodes_of(names: Sequence[str]) -> list[int]:
    """For each rank the first one that sees the same directory, by the directories' names."""
    first: dict[str, int] = {}
    return [first.setdefault(name, rank) for rank, name in enumerate(names)]


def build_inventory(
    directory: ShardDirectory,
    nodes: Sequence[int],
    answers: Sequence[Message],
    training_id: str,
    session_id: str,
    at_least: int = 0,
) -> Inventory:
    """The inventory, given the ``listing`` of every rank."""
    copies: dict[int, list[Copy]] = {node: [] for node in nodes}
    for node, (_, rows, *_) in zip(nodes, answers, strict=True):
        for holder, iteration, stamp, world_size, session, sizes in rows:
            if session == session_id and iteration >= at_least:
                for rank, nbytes in sizes:
                    shard_id = LocalShardId(SaveId(iteration, stamp), rank)
                    copies[node].append(Copy(holder, shard_id, world_size, nbytes))
    newest = max((SaveId(*save) for *_, save, _ in answers if save), default=None)
    foreign = _foreign(directory, training_id, newest) if newest else None
    unread = [f"rank {rank}: {text}" for rank, (*_, text) in enumerate(answers) if text]
    return Inventory(nodes, copies, any(has for has, *_ in answers), foreign, unread)


def listing(
    directory: ShardDirectory, rank: int, nodes: Sequence[int], training_id: str
) -> list[Any]:
    """What a rank tells of the files that it looks after on its node. Rank-local.

    That is whether a save of the training ended, good shards, the newest save of another training,
    and an error: others have the copies.
    """

    def look() -> list[Any]:
        try:
            return _listed(directory, _holders_of(rank, nodes, directory), training_id)
        except StorageError as error:
            logger.warning("no local checkpoints from %s: %s", directory, error)
            return [False, [], None, str(error)]

    return run_with_limit(look, directory)


def _listed(directory: ShardDirectory, holders: Sequence[int], training_id: str) -> list[Any]:
    kept: defaultdict[tuple[Any, ...], list[tuple[int, int]]] = defaultdict(list)
    foreign, unread = None, ""
    for found in directory.find(holders):
        save = found.shard_id.save
        if save.training_id != training_id:
            foreign = max(save, foreign or save)
        if save.training_id != training_id or directory.has_left(save):
            continue
        try:
            pack, info = open_shard(directory.place, found.name)
        except CheckpointError as error:
            logger.warning("a local checkpoint is not used: %s", error)
            if not isinstance(error, CorruptCheckpointError):
                unread = str(error)
            continue
        key = (found.holder, save.iteration, save.stamp, info.world_size, info.session_id)
        kept[key].append((found.shard_id.global_rank, pack.record.nbytes))
    rows = [[*key, sizes] for key, sizes in kept.items()]
    finished = directory.has_finished(holders, training_id)
    return [finished, rows, foreign and astuple(foreign), unread]


def _foreign(directory: ShardDirectory, own: str, save: SaveId) -> str:
    """What a message says of local checkpoints of another training."""
    return (
        f"{directory}: the local checkpoint of iteration {save.iteration} is of training "
        f"{save.training_id or '(unknown)'}, this one is {own or '(unknown: bind the manager)'}, "
        f"as {TRAINING_NAME} in a training's checkpoint root says; it is neither loaded nor "
        "removed; give this training a session_id or a directory of its own"
    )


def _holders_of(rank: int, nodes: Sequence[int], directory: ShardDirectory) -> list[int]:
    """The ranks whose shards a rank looks after on its node.

    That is, itself, and a share of those that are on other nodes now, or gone.
    """
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    others = sorted(set(directory.holders()).difference(here))
    return [rank, *others[here.index(rank) :: len(here)]]


def load_newest(  # noqa: PLR0913
    comm: Communicator,
    directory: ShardDirectory,
    session_id: str,
    *,
    max_inflight_nbytes: int,
    timeout_s: float,
    at_least: int = 0,
    begin: Callable[[], object] = lambda: None,
) -> list[LoadedShard]:
    """This rank's shard of the newest save whose shards can all be read undamaged.

    Collective. Copies that turn out to be damaged are left out, and others are used. Where another
    number of ranks saved it, each rank gets some of the shards. Saves of iterations before
    ``at_least`` are left alone; ``begin`` is called first. Errors are those of the manager's
    ``load``.
    """
    inventory = gather_inventory(comm, directory, session_id, at_least, begin)
    reasons = [*inventory.unread]
    while True:
        try:
            readable, plan = _plan(inventory, reasons, directory)
        except CheckpointError as error:  # on all ranks alike
            error.at_rank(comm.rank)
            raise
        shards, bad = run_retrieve(
            comm,
            plan,
            readable,
            directory.place,
            max_inflight_nbytes=max_inflight_nbytes,
            timeout_s=timeout_s,
        )
        if not bad:
            return shards
        reasons += bad.values()
        for rank, id_ in bad:
            copies = inventory.copies[inventory.nodes[rank]]
            if readable[rank][id_] in copies:  # two ranks of a node may have read the same one
                copies.remove(readable[rank][id_])
        restart_limit()


def _plan(
    inventory: Inventory, reasons: Sequence[str], directory: ShardDirectory
) -> tuple[dict[int, dict[str, Copy]], ExchangePlan]:
    """Copies of the shards of the newest save, by rank and id, and who reads which for whom."""
    target, size = inventory.newest(), len(inventory.nodes)
    if target is None:
        missing = inventory.missing_text()
        if not reasons and not (missing and inventory.has_finished):
            text = f"no local checkpoint below {directory} on any node"
            text += missing and f", but what a save that was killed has left: {missing}"
            if inventory.foreign:
                raise NoUsableCheckpointError(f"{text}; {inventory.foreign}", path=str(directory))
            raise CheckpointNotFoundError(text, path=str(directory))
        why = "; ".join(filter(None, [missing, *reasons]))
        raise NoReplicasAvailableError(
            None,
            f"no local checkpoint is complete: {why}; start on the nodes that have the shards, or "
            "remove those that are left to go without them",
        )
    readable = inventory.of_save(target)
    num_shards = target.world_size  # another number than that of the ranks, if others saved it
    wanted = {
        rank: [
            str(LocalShardId(target.save, number))
            for number in range(rank % num_shards, num_shards, size)
        ]
        for rank in range(size)
    }
    return readable, build_exchange_plan(readable, wanted)


def _why_not(one: Completeness) -> str:
    shown = ", ".join(map(str, one.missing[:_MAX_SHOWN]))
    more = len(one.missing) - _MAX_SHOWN
    text = f"{shown} and {more} more" if more > 0 else shown
    return f"iteration {one.save.iteration}: no rank has the shards of ranks {text}"


def remove_outdated(
    rank: int, directory: ShardDirectory, before: Inventory, newest: SaveId, num_kept: int
) -> None:
    """Remove what a rank looks after of saves that are not kept, once one is complete. Rank-local.

    So go shards of ranks that are on other nodes now, or gone, and what killed saves have left.
    Where something could not be read ``before``, a save stays that may be complete.
    """
    complete = [found.save for found in before.saves() if not found.missing]
    holders = [rank]
    with _failures_logged():
        directory.note_finished(rank, newest.training_id)
        holders = _holders_of(rank, before.nodes, directory)
        for holder in holders:
            directory.remove_stale_files(holder)

    def is_outdated(save: SaveId) -> bool:
        maybe = [save] if before.unread and not directory.has_left(save) else []
        kept = build_retention([*complete, *maybe], newest, num_kept)
        return save.training_id == newest.training_id and save not in kept

    with _failures_logged():
        for found in directory.find(holders):
            if is_outdated(found.shard_id.save):
                with _failures_logged():
                    directory.place.delete([found.name])


@contextmanager
def _failures_logged() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("old local shards cannot be removed: %s", error)
