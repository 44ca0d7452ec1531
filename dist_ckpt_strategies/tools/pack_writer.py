"""Write a converted checkpoint as packs. Each task is one pack; nothing is staged or renamed."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from operator import add
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import DType, ObjectId, Region
from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.formats.commit import require_own_place
from dist_ckpt_strategies.formats.index import StoredObject, array_segments, build_full_index
from dist_ckpt_strategies.formats.pack import RANGE_NBYTES, Digests, PackLayout, PackLimits, lay_out
from dist_ckpt_strategies.formats.pack_commit import NewSave, commit, read_pointer
from dist_ckpt_strategies.formats.pack_read import runs
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
from dist_ckpt_strategies.storage.store import Bytes
from dist_ckpt_strategies.tools.plan_convert import (
    ConvertPlan,
    FileTask,
    RegionRead,
    WriteItem,
    groups,
)
from dist_ckpt_strategies.tools.writers import Objects, Read, TargetWriter

_MAX_OBJECTS = 10_000
_MAX_OBJECTS_NBYTES = 64 << 20
"""Of one pack, which is in memory when it is written; a larger object goes alone."""


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
        assert self.plan.layout is not None  # noqa: S101 - as the plan for packs has it
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
        for batch in groups((part for item in task.items for part in _parts(item, nbytes)), nbytes):
            memory = self._memory.array((sum(part.nbytes for part in batch),), DType.UINT8)
            contents: list[Bytes] = []
            reads: list[RegionRead] = []
            done = 0
            for part in batch:
                contents.append(memory[done : done + part.nbytes])
                reads += part.reads(contents[-1])
                done += part.nbytes
            read(reads)
            yield contents

    def finish(self, records: Mapping[int, Any], objects: Objects, common: bytes) -> NewSave:
        """See TargetWriter."""
        assert self.plan.layout is not None  # noqa: S101 - as above
        features = self.plan.features
        packs = [PackRecord(*fields) for _, fields in sorted(records.items())]
        listed: list[StoredObject] = []
        where = None
        for batch in _batches(objects):
            contents = [content for _, content in batch] + ([] if where else [common])
            layout = lay_out(
                (),
                [(object_id, len(content)) for object_id, content in batch],
                None if where else len(common),
                limits=PackLimits(sum(map(len, contents))),
                features=features,
            )
            memory = [np.frombuffer(content, np.uint8) for content in contents]
            packs += [self._write(pack, [memory]) for pack in layout.packs]  # of which there is one
            number = len(packs) - 1
            listed += (StoredObject(i, replace(s, pack=number)) for i, s in layout.objects)
            if layout.common is not None:
                where = replace(layout.common, pack=number)
        facts = {"ranks": 1, "created": time.time(), "features": [*features]}
        segments = array_segments(self.plan.layout.table)
        index, pointer = build_full_index(self._save_id, segments, listed, packs, where, facts)
        return NewSave(pointer, index, packs, common)

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


def _batches(objects: Objects) -> Iterator[list[tuple[ObjectId, bytes]]]:
    """What objects go into one pack; the last batch may be empty."""
    batch: list[tuple[ObjectId, bytes]] = []
    nbytes = 0
    for object_id, content in objects:
        if batch and (nbytes + len(content) > _MAX_OBJECTS_NBYTES or len(batch) == _MAX_OBJECTS):
            yield batch
            batch, nbytes = [], 0
        batch.append((object_id, content))
        nbytes += len(content)
    yield batch


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements of a block that follow each other in C order."""

    item: WriteItem
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of them."""
        return (self.stop - self.start) * self.item.array.dtype.itemsize

    def reads(self, memory: Bytes) -> Iterator[RegionRead]:
        """What to read to have them in memory."""
        item, done = self.item, 0
        elements = memory.view(item.array.dtype.numpy)
        for run in runs(item.region.shape, self.start, self.stop):
            region = Region(tuple(map(add, run.offset, item.region.offset)), run.shape)
            yield item.source.key, region, elements[done : done + run.numel].reshape(run.shape)
            done += run.numel


def _parts(item: WriteItem, nbytes: int) -> Iterator[_Part]:
    """A block in parts of so many bytes."""
    step = nbytes // item.array.dtype.itemsize
    for start in range(0, max(1, item.region.numel), step):
        yield _Part(item, start, min(start + step, item.region.numel))
