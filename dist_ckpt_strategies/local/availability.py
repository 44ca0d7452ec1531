"""Which parts there are in the world, and who can read them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.errors import CheckpointError, StorageError
from dist_ckpt_strategies.local.part_files import FoundPart, PartDirectory, read_headers
from dist_ckpt_strategies.local.part_format import PartId, SaveId
from dist_ckpt_strategies.local.plan import (
    Completeness,
    build_survey,
    choose_world_sizes,
)
from dist_ckpt_strategies.storage.io_pool import run_with_limit
from dist_ckpt_strategies.storage.time_limit import restart_limit

logger = logging.getLogger(__name__)


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
            if isinstance(part, CheckpointError) or part.session_id != session_id:
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


def path_of(directory: PartDirectory, copy: Copy) -> Path:
    """The file of a copy on this rank's node."""
    return directory.root / copy.path
