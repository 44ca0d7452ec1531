"""What each rank has written, and the save that it makes up together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Self

import numpy as np

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.core.blocks import BlockTable, Column, merged
from dist_ckpt_strategies.formats.index import StoredObject, build_full_index
from dist_ckpt_strategies.formats.pack import Layout, StoredBytes
from dist_ckpt_strategies.formats.pack_commit import NewSave
from dist_ckpt_strategies.formats.pack_write import PackRecord


@dataclass(frozen=True, slots=True)
class PackSummary:
    """What one rank has written, but for its blocks, which are in the table of its layout.

    Attributes:
        packs: in the order of its layout.
        objects: shards of objects, and where they are.
        common: where the common state is; None if this rank has not written it.
    """

    packs: tuple[PackRecord, ...]
    objects: tuple[tuple[ObjectId, StoredBytes], ...] = ()
    common: StoredBytes | None = None

    @classmethod
    def of(cls, layout: Layout, packs: Sequence[PackRecord]) -> Self:
        """The summary of a layout that was written."""
        return cls(tuple(packs), layout.objects, layout.common)

    def to_message(self) -> list[Any]:
        """The summary in JSON types."""
        objects = [[*astuple(name), *astuple(where)] for name, where in self.objects]
        return [[astuple(p) for p in self.packs], objects, self.common and astuple(self.common)]

    @classmethod
    def from_message(cls, message: list[Any]) -> Self:
        """The summary that ``to_message`` made a message of."""
        packs, objects, common = message
        return cls(
            tuple(PackRecord(*record) for record in packs),
            tuple(
                (ObjectId(key, tuple(offset), tuple(shape)), StoredBytes(*where))
                for key, offset, shape, *where in objects
            ),
            common and StoredBytes(*common),
        )


def joined_tables(
    tables: Sequence[BlockTable], num_packs: Sequence[int]
) -> tuple[BlockTable, Column, list[tuple[str, int, int]]]:
    """The blocks of all ranks, as ``merged`` returns them; packs are numbered through."""
    table, sources, differing = merged(tables)
    starts = np.cumsum([0, *num_packs])
    table.place[:, 0] += starts[sources]
    return table, sources, differing


def build_save(
    save_id: str,
    segments: Sequence[tuple[bytes, list[Any]]],
    summaries: Sequence[PackSummary],
    facts: dict[str, Any],
) -> NewSave:
    """The indexes of a save, for ``commit``.

    Args:
        save_id: of the save.
        segments: what ``array_segments`` made of the blocks of all ranks.
        summaries: of all ranks, in the order of ``joined_tables``.
        facts: further fields of the full index.
    """
    packs: list[PackRecord] = []
    objects: list[StoredObject] = []
    common = None
    for summary in summaries:
        first = len(packs)
        packs += summary.packs
        objects += (StoredObject(name, _moved(at, first)) for name, at in summary.objects)
        if summary.common is not None:
            common = _moved(summary.common, first)
    index, pointer = build_full_index(save_id, segments, objects, packs, common, facts)
    return NewSave(pointer, index, packs)


def _moved(stored: StoredBytes, first_pack: int) -> StoredBytes:
    pack, *where = astuple(stored)
    return StoredBytes(first_pack + pack, *where)
