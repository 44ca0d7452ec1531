"""Checkpoints that hold the trained part of a model alone, and name the one with all the rest.

The index of such a checkpoint has ``base``: the place of the other, and the digest of its index.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import groupby
from typing import TypedDict

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PlanError,
)
from dist_ckpt_strategies.formats.locations import Location, holds_packs, located, require_something
from dist_ckpt_strategies.formats.pack import Digests
from dist_ckpt_strategies.formats.pack_checkpoint import OpenedSave, PackCheckpoint, pointer_at
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import ArrayRead

BASE = "base"


class NamedBase(TypedDict):
    """A base as an index names it: absolute directory or URL, and the digest of its index."""

    path: str
    digest: str


def base_to_name(options: Options, place: Place) -> NamedBase | None:
    """The base that a save to a place is to name; None without ``options.base``.

    Blocks on storage.

    Raises:
        PlanError: it is no checkpoint of packs; or the save would replace it, or a base of it.
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: a base of it is missing.
    """
    if not options.base:
        return None
    root = located(options.base, options, what="base")
    require_something(root)
    if not (holds_packs(root) and pointer_at(root)):
        raise PlanError(
            f"base {root}: expected a finished checkpoint of format ('safetensors', 1), whose "
            "digest the save names; dist-ckpt convert BASE NEW --to pack makes one of others"
        )
    base = open_packs(root, options.with_changes(base=""))
    if os.path.realpath(str(place)) in {
        os.path.realpath(str(one.save.root)) for one in layers(base)
    }:
        raise PlanError(
            f"{place}: the save would replace a checkpoint that its base {root} is or needs; save "
            "to another place"
        )
    return NamedBase(path=str(root), digest=base.identity)


def open_packs(root: Location, options: Options, save: OpenedSave | None = None) -> PackCheckpoint:
    """The checkpoint at a place, and the base that it names, if any. Rank-local.

    Raises:
        IncompleteCheckpointError: the base is not where it was; ``options.base`` says where.
        PlanError: another checkpoint is there than the one that it was saved with.
        CheckpointError: as PackCheckpoint.
    """
    checkpoint = PackCheckpoint(root, options, save)
    named: NamedBase | None = checkpoint.index.facts.get(BASE)
    if named is None:
        return checkpoint
    where = located(options.base or named["path"], options, what="base")
    try:
        base = open_packs(where, options.with_changes(base="") if options.base else options)
    except (CheckpointNotFoundError, IncompleteCheckpointError) as error:
        raise IncompleteCheckpointError(
            f"{root} holds the trained part of a model, and all else is in its base "
            f"{named['path']}; {where}: {error.message}; say where it is by base=, or by "
            "the variable DIST_CKPT_BASE",
            path=str(where),
        ) from error
    if base.identity != named["digest"]:
        raise PlanError(
            f"{root} was saved with the base {named['path']} of digest {named['digest']}; "
            f"{where} has digest {base.identity}: it is another checkpoint, or was saved again; "
            "give the one of that digest by base=, or by the variable DIST_CKPT_BASE"
        )
    return CheckpointOverBase(root, options, checkpoint.save, base)


def layers(checkpoint: PackCheckpoint) -> Iterator[PackCheckpoint]:
    """The checkpoint, then its base, and the base of that."""
    yield checkpoint
    if isinstance(checkpoint, CheckpointOverBase):
        yield from layers(checkpoint.base)


class CheckpointOverBase(PackCheckpoint):
    """A checkpoint completed by its ``base``; see PackCheckpoint."""

    def __init__(
        self, root: Location, options: Options, save: OpenedSave, base: PackCheckpoint
    ) -> None:
        super().__init__(root, options, save)
        self._root, self.base = root, base
        self._own, self._own_objects = set(super().keys()), set(super().object_ids())

    def keys(self) -> Iterator[str]:
        """The keys of all arrays of both, sorted."""
        return (key for key, _ in groupby(merge(super().keys(), self.base.keys())))

    def blocks(self, key: str) -> Iterator[tuple[Region, int]]:
        """See PackCheckpoint."""
        return super().blocks(key) if key in self._own else self.base.blocks(key)

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """See PackCheckpoint."""
        wanted = set(keys)
        of_base = self.base.find(wanted - self._own) if wanted - self._own else {}
        return dict(sorted((of_base | super().find(wanted & self._own)).items()))

    def digests(self, keys: Iterable[str]) -> dict[tuple[str, Region], Digests]:
        """See PackCheckpoint."""
        wanted = set(keys)
        return self.base.digests(wanted - self._own) | super().digests(wanted & self._own)

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See PackCheckpoint; both are read at the same time."""
        mine = [read for read in reads if read.array.key in self._own]
        rest = [read for read in reads if read.array.key not in self._own]
        if not (mine and rest):
            return super().begin_reads(mine) if mine else self.base.begin_reads(rest)
        begin = super().begin_reads
        both = (lambda: begin(mine).wait(), lambda: self.base.begin_reads(rest).wait())
        return Transfer([Job(None, self._root, run) for run in both], len(both))

    def object_ids(self) -> Iterator[ObjectId]:
        """All shards of objects, sorted; of a key that this checkpoint has, only its own."""
        keys = {name.key for name in self._own_objects}
        rest = (name for name in self.base.object_ids() if name.key not in keys)
        return merge(super().object_ids(), rest)

    def object_path(self, object_id: ObjectId) -> str:
        """See PackCheckpoint."""
        is_own = object_id in self._own_objects
        return super().object_path(object_id) if is_own else self.base.object_path(object_id)

    def object_content(self, object_id: ObjectId) -> bytes:
        """See PackCheckpoint."""
        if object_id in self._own_objects:
            return super().object_content(object_id)
        return self.base.object_content(object_id)
