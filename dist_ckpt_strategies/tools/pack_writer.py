"""Write a converted checkpoint as packs. Each task is one pack; nothing is staged or renamed."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from operator import add, itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import DType, Region, groups, runs
from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.formats.commit import require_own_place
from dist_ckpt_strategies.formats.index import NewSave, PackSummary, array_segments
from dist_ckpt_strategies.formats.locations import PACKS, place_of
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests, PackLayout, lay_out
from dist_ckpt_strategies.formats.pack_commit import commit, read_pointer
from dist_ckpt_strategies.formats.pack_write import (
    FOLDER,
    PackRecord,
    delete_files,
    file_of,
    new_pack_name,
    write_pack,
)
from dist_ckpt_strategies.storage.store import ArrayRead, Bytes
from dist_ckpt_strategies.tools.plan_convert import FileTask, WriteItem
from dist_ckpt_strategies.tools.writers import Objects, Read, Target

_OBJECTS_NBYTES = 64 << 20
"""Of one pack, which is in memory when it is written; a larger object goes alone."""

_OBJECT_NBYTES = 8 << 10
"""The least size that an object counts for: so a pack has some thousands at most."""


def write_packs(target: Target, task: FileTask, read: Read) -> PackRecord:
    """See ``Write``. Gives the pack's record.

    All packs are in the name of rank 0, whichever rank writes them.
    """
    stored = [target.digests.get((item.source.key, item.region)) for item in task.items]
    present = [digests for digests in stored if digests is not None]
    digests = np.concatenate(present) if stored and len(present) == len(stored) else None
    pack = target.plan.layout.packs[int(task.name)]
    return _write(target, pack, _batches(target, task, read), digests)


def _write(
    target: Target,
    pack: PackLayout,
    contents: Iterable[Sequence[Bytes]],
    digests: Digests | None = None,
) -> PackRecord:
    name, store = new_pack_name(), place_of(target.root)
    target.written.append(file_of(name))
    save_id = target.save_id
    record, _ = write_pack(store, name, pack, contents, save_id=save_id, rank=0, digests=digests)
    return record


def _batches(target: Target, task: FileTask, read: Read) -> Iterator[list[Bytes]]:
    """The bytes of a pack's blocks, some ranges of one or many small ones at a time."""
    nbytes = max(1, target.block_nbytes // RANGE_NBYTES) * RANGE_NBYTES
    for batch in groups(_parts(task.items, nbytes), nbytes, itemgetter(2)):
        memory = target.memory.array((sum(size for *_, size in batch),), DType.UINT8)
        contents: list[Bytes] = []
        reads: list[ArrayRead] = []
        done = 0
        for item, start, size in batch:
            contents.append(memory[done : done + size])
            reads += _reads(item, start, contents[-1])
            done += size
        read(*reads)
        yield contents


def finish_packs(
    target: Target, records: Mapping[int, Any], objects: Objects, common: bytes
) -> NewSave:
    """See ``Finish``. Objects and the common state have packs of their own."""
    plan = target.plan
    summaries = [PackSummary(tuple(records[number] for number in sorted(records)))]
    tail = chain([(None, common)], objects)
    for batch in groups(tail, _OBJECTS_NBYTES, lambda part: max(len(part[1]), _OBJECT_NBYTES)):
        sizes = [(name, len(content)) for name, content in batch if name]
        contents = [content for name, content in batch if name]
        common_nbytes = None if batch[0][0] else len(common)
        layout = lay_out((), sizes, common_nbytes, features=plan.features)
        contents.append(common)
        written = []
        for pack in layout.packs:
            held = [contents[source] for source in pack.sources if source >= 0]
            memory = [np.frombuffer(content, np.uint8) for content in held]
            written.append(_write(target, pack, [memory]))
        summaries.append(PackSummary(tuple(written), layout.objects, layout.common))
    facts = {"ranks": 1, "created": time.time(), "features": [*plan.features]}
    segments = array_segments(plan.layout.table)
    return NewSave(target.save_id, segments, summaries, facts, common, PACKS.to_json())


def commit_packs(target: Target, save: NewSave) -> None:
    """Make the packs the content of their place. On the first rank."""
    store = place_of(target.root)

    def require_free() -> None:
        require_own_place()
        if read_pointer(store) is not None:
            raise CheckpointExistsError(
                f"{store} holds a checkpoint that another process has saved meanwhile; name "
                "another directory",
                path=str(store),
            )

    failure = commit(store, save, require_free)
    if failure is not None:
        raise failure


def delete_packs(target: Target) -> None:
    """Delete what this rank has written of a conversion that failed before the commit."""
    if not target.written:
        return
    delete_files(place_of(target.root), target.written)
    if isinstance(target.root, Path):
        with suppress(OSError):  # not empty
            (target.root / FOLDER).rmdir()


def _parts(items: Iterable[WriteItem], max_nbytes: int) -> Iterator[tuple[WriteItem, int, int]]:
    """Each block in parts of so many bytes: its first byte, and how many there are."""
    for item in items:
        nbytes = item.nbytes
        for start in range(0, max(1, nbytes), max_nbytes):
            yield item, start, min(max_nbytes, nbytes - start)


def _reads(item: WriteItem, byte_offset: int, memory: Bytes) -> Iterator[ArrayRead]:
    """The reads that fill memory with bytes of a block, from a byte on."""
    elements = memory.view(item.array.dtype.numpy)
    start, done = byte_offset // elements.itemsize, 0
    for run in runs(item.region.shape, start, start + elements.size):
        region = Region(tuple(map(add, run.offset, item.region.offset)), run.shape)
        target = elements[done : done + run.numel].reshape(run.shape)
        yield ArrayRead(item.source, region, target)
        done += run.numel
