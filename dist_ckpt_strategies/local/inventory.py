"""Which local shard files all ranks have: what is loaded, what a save needs, and what goes."""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import partial
from itertools import chain, takewhile
from typing import Any, NamedTuple

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NoReplicasAvailableError,
    NoUsableCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.local.plan import (
    Completeness,
    ExchangePlan,
    build_exchange_plan,
    build_retention,
    group_saves,
)
from dist_ckpt_strategies.local.shard_files import TRAINING_NAME, ShardDirectory, ShardReader
from dist_ckpt_strategies.local.shard_format import FilledShard, LocalShardId, SaveId
from dist_ckpt_strategies.local.transfer import run_retrieve
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.io_pool import restart_limit, run_with_limit

logger = logging.getLogger(__name__)

_MAX_SHOWN = 8


class Copy(NamedTuple):
    """A file whose description is good, in the directory of its holder."""

    holder: int
    shard_id: LocalShardId
    world_size: int


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
    comm: Communicator, directory: ShardDirectory, session_id: str, at_least: int = 0
) -> Inventory:
    """What the ranks have of a session, by what the files state; damaged ones are left out.

    Collective: two gathers, of a few bytes for each save and shard that a rank keeps. Files of
    other sessions and trainings, of iterations before ``at_least``, and of courses that the
    training has left, are left out too.
    """
    first: dict[str, int] = {}

    def begin() -> list[str]:
        training = "" if comm.rank else run_with_limit(directory.training_id, directory)
        return [directory.name(), training]

    names, (own, *_) = zip(*run_and_gather(comm, begin), strict=True)
    nodes = [first.setdefault(name, rank) for rank, name in enumerate(names)]
    restart_limit()  # peers that came late are not storage that is slow

    def listing() -> list[Any]:
        try:
            return _listed(directory, _holders_of(comm.rank, nodes, directory), own)
        except StorageError as error:  # others have the copies
            logger.warning("no local checkpoints from %s: %s", directory, error)
            return [False, [], None, str(error)]

    copies: dict[int, list[Copy]] = {node: [] for node in nodes}
    everyone = run_and_gather(comm, partial(run_with_limit, listing, directory))
    restart_limit()
    for node, (_, rows, *_) in zip(nodes, everyone, strict=True):
        for holder, iteration, stamp, world_size, session, ranks in rows:
            if session == session_id and iteration >= at_least:
                save = SaveId(iteration, stamp)
                shards = (LocalShardId(save, rank) for rank in ranks)
                copies[node] += [Copy(holder, shard, world_size) for shard in shards]
    newest = max((SaveId(*save) for *_, save, _ in everyone if save), default=None)
    foreign = _foreign(directory, own, newest) if newest else None
    unread = [f"rank {rank}: {text}" for rank, (*_, text) in enumerate(everyone) if text]
    return Inventory(nodes, copies, any(has for has, *_ in everyone), foreign, unread)


def _listed(directory: ShardDirectory, holders: Sequence[int], own: str) -> list[Any]:
    """Whether holders ended a save of a training, its good shards, the newest other, an error."""
    kept: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    foreign, unread = None, ""
    for one in directory.find(holders):
        save = one.shard_id.save
        if save.training_id != own:
            foreign = max(save, foreign or save)
            continue
        if directory.has_left(save):
            continue
        try:
            shard = ShardReader(one.path).shard
        except CheckpointError as error:
            logger.warning("a local checkpoint is not used: %s", error)
            if not isinstance(error, CorruptCheckpointError):
                unread = str(error)
            continue
        key = (one.holder, save.iteration, save.stamp, shard.world_size, shard.session_id)
        kept[key].append(one.shard_id.global_rank)
    rows = [[*key, ranks] for key, ranks in kept.items()]
    return [directory.has_finished(holders, own), rows, foreign and astuple(foreign), unread]


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


def load_newest(
    comm: Communicator,
    directory: ShardDirectory,
    session_id: str,
    *,
    max_inflight_nbytes: int,
    at_least: int = 0,
) -> list[FilledShard]:
    """This rank's shard of the newest save whose shards can all be read undamaged.

    Collective. Copies that turn out to be damaged are left out, and others are used. Where another
    number of ranks saved it, each rank gets some of the shards. Saves of iterations before
    ``at_least`` are left alone. Errors are those of the manager's ``load``.
    """
    inventory = gather_inventory(comm, directory, session_id, at_least)
    reasons = [*inventory.unread]
    while True:
        try:
            readable, plan = _plan(inventory, reasons, directory)
        except CheckpointError as error:  # on all ranks alike
            error.at_rank(comm.rank)
            raise
        own = {id_: directory.path_of(*copy[:2]) for id_, copy in readable[comm.rank].items()}
        shards, bad = run_retrieve(comm, plan, own, max_inflight_nbytes=max_inflight_nbytes)
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


def complete_save(
    comm: Communicator, directory: ShardDirectory, session_id: str, newest: SaveId, num_kept: int
) -> None:
    """Raise unless all shards of a save are there, then remove the saves that are not kept.

    Collective. The ranks of a node also remove shards of ranks that are on other nodes now, or
    gone, and what killed saves have left there. Shards that were written and are gone, or cannot be
    read, are a StorageError. After an error of reading, a save stays if it may be complete.
    """
    found = gather_inventory(comm, directory, session_id)

    def clean_up() -> None:
        saves = found.saves()
        missing = [one.missing for one in saves if one.save == newest]
        if () not in missing:
            whose = ", ".join(map(str, missing[0])) if missing else "all"
            raise StorageError(
                f"the local save of iteration {newest.iteration} is incomplete: no rank can read "
                f"the shards of ranks {whose}; check these nodes' disks, and save again"
            )
        complete = [one.save for one in saves if not one.missing]
        holders = [comm.rank]
        with _failures_logged():
            directory.note_finished(comm.rank, newest.training_id)
            holders = _holders_of(comm.rank, found.nodes, directory)
            for holder in holders:
                directory.remove_stale_files(holder)

        def is_outdated(save: SaveId) -> bool:
            maybe = [save] if found.unread and not directory.has_left(save) else []
            kept = build_retention([*complete, *maybe], newest, num_kept)
            return save.training_id == newest.training_id and save not in kept

        remove_shards(directory, holders, is_outdated)

    run_collectively(comm, clean_up)


def remove_shards(
    directory: ShardDirectory, holders: Collection[int], is_outdated: Callable[[SaveId], bool]
) -> None:
    """Remove what ranks keep of outdated saves, or of one that failed. A failure is logged."""
    with _failures_logged():
        for found in directory.find(holders):
            if is_outdated(found.shard_id.save):
                with _failures_logged():
                    Directory(found.path.parent).delete([found.path.name])


@contextmanager
def _failures_logged() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("old local shards cannot be removed: %s", error)
