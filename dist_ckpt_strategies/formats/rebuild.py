"""Make the index of a checkpoint anew from its packs alone. Nothing is deleted.

Each pack says which save it is of, and how many packs that save has. A save is whole if all of them
are there with whole headers and digests, and their blocks make up every array. Blocks themselves
are not read: loads and ``verify`` compare them, with the new index as with the lost one.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from dist_ckpt_strategies.core.blocks import merged, plain_text, with_objects
from dist_ckpt_strategies.core.coverage import require_coverage
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CorruptCheckpointError,
    IncompatibleVersionError,
    IncompleteCheckpointError,
    PlanError,
    StrategyError,
    some_of,
)
from dist_ckpt_strategies.formats.index import (
    INDEX_NAME,
    FullIndex,
    NewSave,
    PackSummary,
    array_segments,
    joined_tables,
)
from dist_ckpt_strategies.formats.locations import (
    PACKS,
    Location,
    marker_of,
    place_of,
    require_something,
)
from dist_ckpt_strategies.formats.pack_commit import (
    commit,
    new_save_id,
    open_full_index,
    read_pointer,
    require_packs,
)
from dist_ckpt_strategies.formats.pack_header import OpenedPack, open_pack
from dist_ckpt_strategies.formats.pack_read import read_content
from dist_ckpt_strategies.formats.pack_write import FOLDER, file_of
from dist_ckpt_strategies.storage.bucket import Place, content_of
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME
from dist_ckpt_strategies.storage.folders import files_below
from dist_ckpt_strategies.storage.io_pool import Job, Transfer

logger = logging.getLogger(__name__)

_FILE = re.compile(rf"{FOLDER}/([0-9a-f]{{2}})/(\1[0-9a-f]{{14}})\.safetensors")
_NUM_THREADS = 16


@dataclass(frozen=True, slots=True)
class RebuiltIndex:
    """The save that a new index names.

    Attributes:
        save_id: of the save, as its packs say; empty where they say none.
        num_packs: of the save.
        num_arrays: of the save.
        num_objects: shards of objects.
        passed_over: newer saves that are not whole and damaged packs, with the reasons.
    """

    save_id: str
    num_packs: int
    num_arrays: int
    num_objects: int
    passed_over: tuple[str, ...]


def rebuild_index(location: Location, *, force: bool = False) -> RebuiltIndex | None:
    """Replace a lost or damaged index by one that is made from the packs. Rank-local.

    The newest save whose packs are whole and make up every array counts. ``common.pt`` and
    ``metadata.json`` are written where they are missing, damaged or of another save, also if the
    index is whole. No save may be under way at that place. ``force``: replace a whole index, too.

    Returns:
        The save that counts now; None where the index is whole, and stays.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: no save is whole; says what each of them lacks.
        StrategyError: the checkpoint at that place is of another format.
        CheckpointChangedError: a save has replaced the index meanwhile.
    """
    store = place_of(location)
    _require_no_other_format(store)
    seen = content_of(store, INDEX_NAME)

    def require_unchanged() -> None:
        if content_of(store, INDEX_NAME) != seen:
            raise CheckpointChangedError(f"{store}: a save has replaced {INDEX_NAME}; begin anew")

    if not force and seen is not None and (index := _whole_index(store)) is not None:
        _write_lost_copies(store, index, require_unchanged)
        return None
    files = map(_FILE.fullmatch, files_below(store, FOLDER))
    names = sorted(match[2] for match in files if match)
    if not names:
        require_something(location)
        raise IncompleteCheckpointError(f"{location} holds no packs", path=str(location))
    opened, damaged = _opened(store, names)
    groups = defaultdict(list)
    for pack in opened:
        groups[pack.save_id].append(pack)
    why: list[str] = []
    for save_id in sorted(groups, reverse=True):
        try:
            num_arrays, save = _whole_save(store, groups[save_id])
        except (PlanError, CorruptCheckpointError, IncompleteCheckpointError) as error:
            why.append(f"save {save_id or 'without an id'}: {plain_text(error.message)}")
            continue
        commit(store, save, require_unchanged, deletes_replaced=False)
        counts = (
            len(save.packs),
            num_arrays,
            sum(len(of_pack.objects) for of_pack in save.summaries),
        )
        return RebuiltIndex(save_id, *counts, (*why, *damaged))
    raise IncompleteCheckpointError(
        f"{location}: no save is whole: {some_of([*why, *damaged], 20)}", path=str(location)
    )


def _require_no_other_format(store: Place) -> None:
    marker = marker_of(store)
    if marker is not None and marker.sharded_format != PACKS.sharded_format:
        raise StrategyError(
            f"{store} holds a checkpoint of {marker.sharded_format}, by its {MARKER_NAME}; to make "
            f"an index of packs that lie beside it, move {FOLDER} to an empty directory"
        )


def _whole_index(store: Place) -> FullIndex | None:
    """The index, if ``index`` and the full one are whole, and every pack is there that it names."""
    with suppress(CorruptCheckpointError, IncompleteCheckpointError):
        if (pointer := read_pointer(store)) is not None:
            index = open_full_index(store, pointer)
            for _ in index.tables():
                pass
            index.objects()
            require_packs(store, index.packs().values())
            return index
    return None


def _write_lost_copies(store: Place, index: FullIndex, require: Callable[[], None]) -> None:
    """Write what Megatron-Core reads beside packs, where it is missing or damaged."""
    if (where := index.common) is None:
        return
    common = read_content(store, index.packs()[where.pack], where, "common state", {})
    lost = {} if content_of(store, COMMON_NAME) == common else {COMMON_NAME: common}
    lost |= {} if marker_of(store) == PACKS else {MARKER_NAME: PACKS.to_json()}
    if not lost:  # the place may be read-only
        return
    with store.locked():
        require()  # a later save has copies of its own
        for name, content in lost.items():
            store.write(name, content)
            logger.warning("%s was missing or damaged, and is written anew", store.path(name))


def _opened(store: Place, names: Sequence[str]) -> tuple[list[OpenedPack], list[str]]:
    """The packs whose header and table are whole, by rank and name; what is wrong with others."""
    opened: list[OpenedPack] = []
    damaged: list[str] = []

    def look(name: str) -> None:
        try:
            opened.append(open_pack(store, name))
        except (
            CorruptCheckpointError,
            IncompleteCheckpointError,
            IncompatibleVersionError,
        ) as error:
            damaged.append(error.message)

    jobs = [Job("", store.path(file_of(name)), partial(look, name)) for name in names]
    Transfer(jobs, _NUM_THREADS).wait()
    return sorted(opened, key=lambda p: (p.record.rank, p.record.name)), sorted(damaged)


def _whole_save(store: Place, packs: Sequence[OpenedPack]) -> tuple[int, NewSave]:
    """The number of arrays of the save that these packs are of, and the save.

    Raises:
        IncompleteCheckpointError: a pack is missing.
        CorruptCheckpointError: the common state is damaged.
        CoverageError, PlanError: the packs do not make up every array.
    """
    counts = {pack.num_packs for pack in packs}
    if counts not in ({0}, {len(packs)}):
        raise IncompleteCheckpointError(
            f"{len(packs)} of its {max(counts)} packs are whole, those of ranks "
            f"{some_of(sorted({str(pack.record.rank) for pack in packs}), 20)}"
        )
    ranks = np.array([pack.record.rank for pack in packs], np.int64)
    ids = [[name for name, _ in pack.objects] for pack in packs]
    listed = map(with_objects, (pack.table for pack in packs), ids)
    proved, sources, differing = merged(listed)
    for key, one, other in differing:
        raise PlanError(f"{key}: ranks {ranks[one]} and {ranks[other]} describe it differently")
    require_coverage(proved, ranks[sources])
    table, _, _ = joined_tables([pack.table for pack in packs], [1] * len(packs))
    summaries = [PackSummary((p.record,), p.objects, p.common) for p in packs]
    contents = [
        read_content(store, pack.record, pack.common, "common state", {})
        for pack in packs
        if pack.common is not None
    ]
    if len(contents) > 1:
        raise PlanError("several packs hold a common state")
    features = sorted({name for pack in packs for name in pack.features})
    facts = {"ranks": len(set(ranks.tolist())), "created": time.time(), "features": features}
    copies = (contents[0], PACKS.to_json()) if contents else ()
    segments = array_segments(table)
    return len(table.keys), NewSave(new_save_id(store), segments, summaries, facts, *copies)
