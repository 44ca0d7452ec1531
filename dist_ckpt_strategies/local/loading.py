"""Which parts there are in the world; the newest save that is complete, brought to the ranks."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather_bytes
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    NoReplicasAvailableError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.local.part_files import FoundPart, PartDirectory, read_headers
from dist_ckpt_strategies.local.part_format import PartId, SaveId
from dist_ckpt_strategies.local.plan import (
    Completeness,
    ExchangePlan,
    build_exchange_plan,
    build_survey,
    choose_world_sizes,
    spread_parts,
)
from dist_ckpt_strategies.local.retrieve import BadCopy, FileSource, RetrievedPart, run_retrieve
from dist_ckpt_strategies.storage.io_pool import run_with_limit
from dist_ckpt_strategies.storage.time_limit import restart_limit

logger = logging.getLogger(__name__)

_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Copy:
    """A file that holds a part.

    Attributes:
        node: tells the node's directory from every other.
        path: the file, below that directory.
    """

    node: str
    path: str


@dataclass(frozen=True, slots=True)
class Availability:
    """What all ranks together have.

    Attributes:
        nodes: for each rank what tells its node's directory from every other.
        parts: for each rank, the parts that it can read and a copy of each.
        world_sizes: the world size that each part states.
        kinds: how the state of each part is encoded.
        disputed: saves of which some part, left out here, states another world size.
    """

    nodes: tuple[str, ...]
    parts: Mapping[int, Mapping[str, Copy]]
    world_sizes: Mapping[str, int]
    kinds: Mapping[str, str]
    disputed: frozenset[SaveId]

    def ids(self, rank: int) -> Collection[str]:
        """The parts that a rank can read."""
        return self.parts[rank].keys()

    def neighbours(self, rank: int) -> list[int]:
        """The ranks that see the same directory, this one too."""
        return [other for other, node in enumerate(self.nodes) if node == self.nodes[rank]]

    def since(self, iteration: int) -> Availability:
        """The same without saves of earlier iterations."""
        if iteration <= 0:
            return self
        world_sizes = {
            part_id: size
            for part_id, size in self.world_sizes.items()
            if PartId.require(part_id).save.iteration >= iteration
        }
        return replace(self, world_sizes=world_sizes)

    def survey(self) -> tuple[Completeness, ...]:
        """What there is of each save, the newest first."""
        return build_survey(
            (PartId.require(part_id), size) for part_id, size in self.world_sizes.items()
        )


def gather_listings(
    comm: Communicator, directory: PartDirectory, session_id: str
) -> tuple[bytes, ...]:
    """What each rank has, by the headers of its files; what has none that is good is passed over.

    Collective. Ranks that see one directory send one list. ``availability_of`` takes it.

    Args:
        comm: all ranks.
        directory: this rank's node.
        session_id: parts of other sessions are passed over.
    """

    def listing() -> bytes:
        rows = []
        for found, part in read_headers(_found(directory)):
            if isinstance(part, CheckpointError):
                logger.warning("a local checkpoint is not used: %s", part)
                continue
            if part.session_id != session_id:
                continue
            path = str(found.path.relative_to(directory.root))
            rows.append([str(found.part_id), path, part.world_size, part.kind])
        return json.dumps([directory.name(), rows]).encode()

    list_with_limit = partial(run_with_limit, listing, directory)
    listings = tuple(agree_and_gather_bytes(comm, list_with_limit))
    restart_limit()  # peers that came late are not storage that is slow
    return listings


def _found(directory: PartDirectory) -> list[FoundPart]:
    """The files of this node; a disk that cannot be listed has none, others have the copies."""
    try:
        return directory.find()
    except StorageError as error:
        logger.warning("no local checkpoints from %s: %s", directory, error)
        return []


def availability_of(
    listings: Sequence[bytes], excluded: Collection[Copy] = frozenset()
) -> Availability:
    """What all ranks together have.

    Args:
        listings: what each has, as ``gather_listings`` gathers it.
        excluded: copies that are known to be damaged; equal on all ranks.
    """
    found = {text: _Listing.parse(text).without(excluded) for text in set(listings)}
    stated = {(row.part_id, row.world_size) for one in found.values() for row in one.rows}
    sizes = choose_world_sizes(stated)
    parts: dict[bytes, dict[str, Copy]] = {text: {} for text in found}
    kinds: dict[str, str] = {}
    for text in dict.fromkeys(listings):
        for row in found[text].rows:
            if row.world_size == sizes[row.part_id.save]:
                kinds[str(row.part_id)] = row.kind
                parts[text].setdefault(str(row.part_id), row.copy)
    return Availability(
        tuple(found[text].node for text in listings),
        {rank: parts[text] for rank, text in enumerate(listings)},
        {part_id: sizes[PartId.require(part_id).save] for part_id in kinds},
        kinds,
        frozenset(part_id.save for part_id, size in stated if size != sizes[part_id.save]),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """A file with a good header."""

    part_id: PartId
    copy: Copy
    world_size: int
    kind: str


@dataclass(frozen=True, slots=True)
class _Listing:
    """What one node has."""

    node: str
    rows: tuple[_Row, ...]

    @classmethod
    def parse(cls, text: bytes) -> _Listing:
        node, rows = json.loads(text)
        return cls(
            node,
            tuple(_Row(PartId.require(id_), Copy(node, path), *rest) for id_, path, *rest in rows),
        )

    def without(self, excluded: Collection[Copy]) -> _Listing:
        return replace(self, rows=tuple(row for row in self.rows if row.copy not in excluded))


@dataclass(frozen=True, slots=True)
class LocalParts:
    """The parts that the ranks of a node can read.

    Attributes:
        directory: the node's.
        session_id: parts of other sessions are passed over.
        message_nbytes: bound on what travels at once.
    """

    directory: PartDirectory
    session_id: str
    message_nbytes: int


def find_newest(
    comm: Communicator, local: LocalParts, resharded: Collection[str]
) -> Completeness | None:
    """The newest save of which every part is somewhere, by the headers. Collective.

    Args:
        comm: all ranks.
        local: this rank's node.
        resharded: kinds of state that another number of ranks can use.
    """
    listings = gather_listings(comm, local.directory, local.session_id)
    return agree(comm, lambda: _newest(comm, availability_of(listings), resharded))


def load_newest(
    comm: Communicator, local: LocalParts, resharded: Collection[str], at_least: int = 0
) -> tuple[RetrievedPart, ...]:
    """This rank's part of the newest save whose parts can all be read undamaged.

    Collective. Copies that turn out to be damaged are left out, and the search begins anew.

    Args:
        comm: all ranks.
        local: this rank's node.
        resharded: kinds of state that another number of ranks can use; each rank gets some of the
            parts then.
        at_least: saves of iterations before this one are left alone.

    Raises:
        CheckpointNotFoundError: there is no local checkpoint at all.
        NoReplicasAvailableError: of each save some part is lost; says which.
        PlanError: it was saved by another number of ranks.
    """
    damaged: dict[Copy, str] = {}
    while True:
        listings = gather_listings(comm, local.directory, local.session_id)
        facts = _Facts(listings, dict(damaged), resharded, at_least)
        found = _Found(comm, local.directory, facts)
        retrieval = run_retrieve(
            comm, found.decide, found.open_source, message_nbytes=local.message_nbytes
        )
        if not retrieval.bad:
            logger.debug("rank %s: %s", comm.global_rank(comm.rank), retrieval.report)
            return tuple(retrieval.parts.values())
        damaged |= {found.copy_of(bad): bad.reason for bad in retrieval.bad}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What decides which save is loaded; equal on all ranks.

    Attributes:
        listings: what each rank has.
        damaged: copies that are left out, and why.
        resharded: see ``load_newest``.
        at_least: see ``load_newest``.
    """

    listings: Sequence[bytes]
    damaged: Mapping[Copy, str]
    resharded: Collection[str]
    at_least: int


class _Found:
    """What there is by the facts, and this rank's copies of it."""

    def __init__(self, comm: Communicator, directory: PartDirectory, facts: _Facts) -> None:
        self._comm = comm
        self._directory = directory
        self._facts = facts
        self._parts: Mapping[int, Mapping[str, Copy]] = {}

    def decide(self) -> ExchangePlan:
        """Who gets what from whom; errors as ``load_newest``."""
        facts = self._facts
        found = availability_of(facts.listings, facts.damaged).since(facts.at_least)
        self._parts = found.parts
        reasons = tuple(facts.damaged.values())
        target = _target(self._comm, found, reasons, self._directory, facts.resharded)
        return _plan(self._comm, found, target)

    def open_source(self, part_id: str) -> FileSource:
        """This rank's copy of a part."""
        copy = self._parts[self._comm.rank].get(part_id)
        return FileSource(part_id, self._directory.root / copy.path if copy else None)

    def copy_of(self, bad: BadCopy) -> Copy:
        """The file that turned out to be damaged."""
        return self._parts[bad.rank][bad.part_id]


def _target(
    comm: Communicator,
    found: Availability,
    reasons: Sequence[str],
    directory: PartDirectory,
    resharded: Collection[str],
) -> Completeness:
    """The save to load."""
    target = _newest(comm, found, resharded)
    if target is None:
        survey = found.survey()
        if not survey and not reasons:
            raise CheckpointNotFoundError(
                f"no local checkpoint below {directory} on any node", path=str(directory)
            )
        why = "; ".join([*map(_why_not, survey), *reasons])
        raise NoReplicasAvailableError(None, f"no local checkpoint is complete: {why}")
    if not _fits(comm, found, target, resharded):
        kinds = ", ".join(sorted(_kinds(found, target)))
        raise PlanError(
            f"iteration {target.save.iteration} was saved by {target.world_size} ranks, and "
            f"{comm.size} load it; parts of kind {kinds} fit the "
            "number of ranks that saved them; MCoreTensorAwareStateDict fits any"
        )
    return target


def _newest(
    comm: Communicator, found: Availability, resharded: Collection[str]
) -> Completeness | None:
    """The newest save that is complete.

    Where its parts disagree on its world, and those that are whole are not for this one, it is
    passed over: it could keep the saves before it from being loaded.
    """
    complete = (one for one in found.survey() if not one.missing)
    usable = (
        one
        for one in complete
        if one.save not in found.disputed or _fits(comm, found, one, resharded)
    )
    return next(usable, None)


def _fits(
    comm: Communicator, found: Availability, one: Completeness, resharded: Collection[str]
) -> bool:
    return one.world_size == comm.size or _kinds(found, one).issubset(resharded)


def _kinds(found: Availability, one: Completeness) -> set[str]:
    return {found.kinds[str(PartId(one.save, rank))] for rank in range(one.world_size)}


def _why_not(one: Completeness) -> str:
    if not one.missing:
        return f"iteration {one.save.iteration}: its parts state different numbers of ranks"
    return f"iteration {one.save.iteration}: nobody has the parts of ranks {_few(one.missing)}"


def _few(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return shown if len(ranks) <= _MAX_SHOWN else f"{shown} and {len(ranks) - _MAX_SHOWN} more"


def _plan(comm: Communicator, found: Availability, target: Completeness) -> ExchangePlan:
    available = {rank: found.ids(rank) for rank in range(comm.size)}
    if target.world_size != comm.size:
        shares = spread_parts(target.save, target.world_size, available)
        return build_exchange_plan(available, shares)
    wanted = {rank: [str(PartId(target.save, comm.global_rank(rank)))] for rank in range(comm.size)}
    return build_exchange_plan(available, wanted)
