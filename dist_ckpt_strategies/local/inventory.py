"""Which local shard files all ranks have, and which of them go once a save is complete."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import chain, takewhile
from math import inf

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CorruptCheckpointError,
    StorageError,
    some_of,
)
from dist_ckpt_strategies.local.plan import (
    LocalShardId,
    Save,
    SaveId,
    build_retention,
    missing_ranks,
)
from dist_ckpt_strategies.local.shard_files import (
    TRAINING_NAME,
    ShardDirectory,
    ShardFile,
    open_shard,
)
from dist_ckpt_strategies.storage.io_pool import (
    OPENING,
    WORK,
    Deadline,
    raise_if_cancelled,
    run_within,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The shards that all ranks together have.

    Attributes:
        nodes: for each rank the first one that sees the same directory.
        copies: what there is in each of these directories, by that first rank.
        has_finished: whether any save has come to its end: shards that are missing were lost then.
        foreign: tells of saves of another training; empty if there are none.
        unread: errors: what is missing may be there then.
    """

    nodes: Sequence[int]
    copies: Mapping[int, list[ShardFile]]
    has_finished: bool
    foreign: str
    unread: Sequence[str]

    def missing(self) -> dict[Save, list[int]]:
        """The ranks of each save whose shards no rank has; the newest save first."""
        files = chain.from_iterable(self.copies.values())
        return missing_ranks((file.shard_id, file.world_size) for file in files)

    def of_save(self, save: Save) -> dict[int, dict[str, ShardFile]]:
        """A copy of each shard of a save that a rank can read, by rank and id."""
        by_node = {
            node: {
                str(copy.shard_id): copy
                for copy in reversed(copies)
                if (copy.shard_id.save, copy.world_size) == save
            }
            for node, copies in self.copies.items()
        }
        return {rank: by_node[node] for rank, node in enumerate(self.nodes)}

    def newest(self) -> Save | None:
        """The newest save of which every shard is somewhere, by the descriptions."""
        return next((save for save, ranks in self.missing().items() if not ranks), None)

    def missing_text(self) -> str:
        """Missing shards of each save newer than the newest complete one, in words."""
        texts = []
        for (save, _), ranks in takewhile(lambda lacking: lacking[1], self.missing().items()):
            lost = some_of([*map(str, ranks)], 8)
            texts.append(f"iteration {save.iteration}: no rank has the shards of ranks {lost}")
        return "; ".join(texts)


def gather_inventory(
    comm: Communicator,
    directory: ShardDirectory,
    session_id: str,
    timeout_s: float,
    begin: Callable[[], object],
    between: tuple[int, float] = (0, inf),
) -> Inventory:
    """The ranks' shards of a session, by the files' descriptions; damaged ones are left out.

    Collective: two gathers, of a few bytes for each save and shard that a rank keeps. Files of
    other sessions and trainings, of iterations not ``between`` these two, and of courses that the
    training has left, are left out too. ``begin`` is called first.
    """

    def describe() -> list[str]:
        begin()
        deadline = Deadline.after(OPENING * timeout_s)
        name = run_within(deadline, directory, directory.name)
        return [name, "" if comm.rank else run_within(deadline, directory, directory.training_id)]

    names, (training_id, *_) = zip(*run_and_gather(comm, describe), strict=True)  # 1
    nodes = nodes_of(names)

    def look() -> Message:
        deadline = Deadline.after(WORK * timeout_s)
        return listing(directory, comm.rank, nodes, training_id, session_id, deadline)

    answers = run_and_gather(comm, look, follows=True)  # 2
    return build_inventory(directory, nodes, answers, training_id, between)


def nodes_of(names: Sequence[str]) -> list[int]:
    """For each rank the first one that sees the same directory, by the directories' names."""
    first: dict[str, int] = {}
    return [first.setdefault(name, rank) for rank, name in enumerate(names)]


def build_inventory(
    directory: ShardDirectory,
    nodes: Sequence[int],
    answers: Sequence[Message],
    training_id: str,
    between: tuple[int, float] = (0, inf),
) -> Inventory:
    """The inventory, given the ``listing`` of every rank."""
    copies: dict[int, list[ShardFile]] = {node: [] for node in nodes}
    for node, answer in zip(nodes, answers, strict=True):
        for holder, iteration, stamp, rank, *sizes in answer["files"]:
            if between[0] <= iteration <= between[1]:
                shard_id = LocalShardId(SaveId(iteration, stamp), rank)
                copies[node].append(ShardFile(holder, shard_id, *sizes))
    foreign = ""
    if others := [SaveId(*answer["foreign"]) for answer in answers if answer["foreign"]]:
        newest = max(others)
        foreign = (
            f"{directory}: the local checkpoint of iteration {newest.iteration} is of training "
            f"{newest.training_id or '(unknown)'}, this one is "
            f"{training_id or '(unknown: bind the manager)'}, as {TRAINING_NAME} in a training's "
            "checkpoint root says; it is neither loaded nor removed; give this training a "
            "session_id or a directory of its own"
        )
    texts = [(rank, answer["unread"]) for rank, answer in enumerate(answers)]
    unread = [f"rank {rank}: {text}" for rank, text in texts if text]
    return Inventory(nodes, copies, any(a["has_finished"] for a in answers), foreign, unread)


def listing(
    directory: ShardDirectory,
    rank: int,
    nodes: Sequence[int],
    training_id: str,
    session_id: str,
    deadline: Deadline,
) -> Message:
    """A rank's description of the files that it looks after on its node. Rank-local.

    That is whether a save of the training ended, good shards, the newest save of another training,
    and an error: others have the copies.
    """

    def look() -> Message:
        try:
            holders = _holders_of(rank, nodes, directory)
            return _listed(directory, holders, training_id, session_id)
        except StorageError as error:
            logger.warning("no local checkpoints from %s: %s", directory, error)
            return {"has_finished": False, "files": [], "foreign": None, "unread": str(error)}

    return run_within(deadline, directory, look)


def _listed(
    directory: ShardDirectory, holders: Sequence[int], training_id: str, session_id: str
) -> Message:
    files, foreign, unread = [], None, ""
    for file in directory.find(holders):
        raise_if_cancelled()
        save = file.shard_id.save
        if save.training_id != training_id:
            foreign = max(save, foreign or save)
        if save.training_id != training_id or directory.has_left(save):
            continue
        try:
            pack, info = open_shard(directory.place, file.name)
        except CheckpointError as error:
            logger.warning("a local checkpoint is not used: %s", error)
            if not isinstance(error, CorruptCheckpointError):
                unread = str(error)
            continue
        if info.session_id == session_id:
            which = file.holder, save.iteration, save.stamp, file.shard_id.global_rank
            files.append([*which, info.world_size, pack.record.nbytes])
    has_finished = directory.has_finished(holders, training_id)
    others = foreign and astuple(foreign)
    return {"has_finished": has_finished, "files": files, "foreign": others, "unread": unread}


def _holders_of(rank: int, nodes: Sequence[int], directory: ShardDirectory) -> list[int]:
    """The ranks whose shards a rank looks after on its node.

    That is, itself, and a share of those that are on other nodes now, or gone.
    """
    here = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    others = sorted(set(directory.holders()).difference(here))
    return [rank, *others[here.index(rank) :: len(here)]]


def remove_outdated(
    rank: int,
    directory: ShardDirectory,
    before: Inventory,
    newest: SaveId,
    num_kept: int,
    deadline: Deadline,
) -> None:
    """Remove what a rank looks after of saves that are not kept, once one is complete. Rank-local.

    So go shards of ranks that are on other nodes now, or gone, and what killed saves have left.
    Where something could not be read ``before``, a save stays that may be complete. A failure is
    logged.
    """
    complete = [save for (save, _), missing in before.missing().items() if not missing]

    def is_outdated(save: SaveId) -> bool:
        maybe = [save] if before.unread and not directory.has_left(save) else []
        kept = build_retention([*complete, *maybe], newest, num_kept)
        return save.training_id == newest.training_id and save not in kept

    def remove() -> None:
        holders = [rank]
        with _failures_logged():
            directory.note_finished(rank, newest.training_id)
            holders = _holders_of(rank, before.nodes, directory)
            for holder in holders:
                directory.remove_stale_files(holder)
        for file in directory.find(holders):
            raise_if_cancelled()
            if is_outdated(file.shard_id.save):
                with _failures_logged():
                    directory.place.delete([file.name])

    with _failures_logged():
        run_within(deadline, directory, remove)


@contextmanager
def _failures_logged() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        logger.warning("old local shards cannot be removed: %s", error)
