"""Write a converted checkpoint as packs. Each task is one pack; nothing is staged or renamed."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from itertools import chain
from operator import add, itemgetter
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import DType, Region, runs
from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.formats.commit import require_own_place
from dist_ckpt_strategies.formats.index import NewSave, PackSummary, array_segments
from dist_ckpt_strategies.formats.locations import PACKS
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
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.store import ArrayRead, Bytes
from dist_ckpt_strategies.tools.plan_convert import ConvertPlan, FileTask, WriteItem, groups
from dist_ckpt_strategies.tools.writers import Objects, Read, TargetWriter

_OBJECTS_NBYTES = 64 << 20
"""Of one pack, which is in memory when it is written; a larger object goes alone."""

_OBJECT_NBYTES = 8 << 10
"""What an object counts for at least: so a pack has no more than some thousands."""


class PackWriter(TargetWriter):
    """Writes ("safetensors", 1); see TargetWriter. Objects and common state have own packs.

    All packs are in the name of rank 0, whichever rank writes them. ``digests`` are those of blocks
    of the source, which are compared with them while they are read, and not taken again.
    """

    def __init__(
        self,
        store: Place,
        save_id: str,
        plan: ConvertPlan,
        block_nbytes: int,
        digests: Mapping[tuple[str, Region], Digests],
    ) -> None:
        super().__init__(plan, block_nbytes)
        self._store, self._save_id, self._digests = store, save_id, digests
        self._files: list[str] = []

    def write(self, task: FileTask, read: Read) -> list[Any]:
        """See TargetWriter. Gives the fields of the pack's record."""
        pack = self.plan.layout.packs[int(task.name)]
        stored = [self._digests.get((item.source.key, item.region)) for item in task.items]
        known = [digests for digests in stored if digests is not None]
        digests = np.concatenate(known) if stored and len(known) == len(stored) else None
        return [*astuple(self._write(pack, self._batches(task, read), digests))]

    def _write(
        self,
        pack: PackLayout,
        contents: Iterable[Sequence[Bytes]],
        digests: Digests | None = None,
    ) -> PackRecord:
        name = new_pack_name()
        self._files.append(file_of(name))
        return write_pack(
            self._store, name, pack, contents, save_id=self._save_id, rank=0, digests=digests
        )

    def _batches(self, task: FileTask, read: Read) -> Iterator[list[Bytes]]:
        """The bytes of a pack's blocks, some ranges of one or many small ones at a time."""
        nbytes = max(1, self._block_nbytes // RANGE_NBYTES) * RANGE_NBYTES
        for batch in groups(_parts(task.items, nbytes), nbytes, itemgetter(2)):
            memory = self._memory.array((sum(size for *_, size in batch),), DType.UINT8)
            contents: list[Bytes] = []
            reads: list[ArrayRead] = []
            done = 0
            for item, start, size in batch:
                contents.append(memory[done : done + size])
                reads += _reads(item, start, contents[-1])
                done += size
            read(*reads)
            yield contents

    def finish(self, records: Mapping[int, Any], objects: Objects, common: bytes) -> NewSave:
        """See TargetWriter."""
        plan = self.plan
        packs = [PackRecord(*fields) for _, fields in sorted(records.items())]
        summaries = [PackSummary(tuple(packs))]
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
                written.append(self._write(pack, [memory]))
            summaries.append(PackSummary(tuple(written), layout.objects, layout.common))
        facts = {"ranks": 1, "created": time.time(), "features": [*plan.features]}
        segments = array_segments(plan.layout.table)
        return NewSave(self._save_id, segments, summaries, facts, common, PACKS.to_json())

    def commit(self, save: NewSave) -> None:
        """See TargetWriter."""
        failure = commit(self._store, save, self._require_free)
        if failure is not None:
            raise failure

    def _require_free(self) -> None:
        """Raise if another process has made a checkpoint there meanwhile, or owns this one's."""
        require_own_place()
        if read_pointer(self._store) is not None:
            raise CheckpointExistsError(
                f"{self._store} holds a checkpoint that another process has saved meanwhile; name "
                "another directory",
                path=str(self._store),
            )

    def abandon(self) -> None:
        """See TargetWriter."""
        delete_files(self._store, self._files)
        if isinstance(self._store, Directory):
            with suppress(OSError):  # not empty
                (self._store.root / FOLDER).rmdir()


def _parts(items: Iterable[WriteItem], max_nbytes: int) -> Iterator[tuple[WriteItem, int, int]]:
    """Each block in parts of so many bytes: its first byte, and how many there are."""
    for item in items:
        nbytes = item.nbytes
        for start in range(0, max(1, nbytes), max_nbytes):
            yield item, start, min(max_nbytes, nbytes - start)


def _reads(item: WriteItem, byte_offset: int, memory: Bytes) -> Iterator[ArrayRead]:
    """What to read to have bytes of a block, from the first on that is asked for, in memory."""
    elements = memory.view(item.array.dtype.numpy)
    start, done = byte_offset // elements.itemsize, 0
    for run in runs(item.region.shape, start, start + elements.size):
        region = Region(tuple(map(add, run.offset, item.region.offset)), run.shape)
        target = elements[done : done + run.numel].reshape(run.shape)
        yield ArrayRead(item.source, region, target)
        done += run.numel
