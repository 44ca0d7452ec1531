"""What a conversion writes to: the Zarr formats through the writers of saves, and safetensors."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.core.chunk_grids import MAX_OBJECT_NBYTES
from dist_ckpt_strategies.core.inner_grid import InnerGrid
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.commit import SavePlace
from dist_ckpt_strategies.formats.locations import CheckpointMarker, Location, require_path
from dist_ckpt_strategies.formats.objects import Allowed, dump_loadable, plain_value
from dist_ckpt_strategies.sharded.plan import build_manifest_plan
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    Directory,
    file_errors,
    sync_path,
    write_buffered,
)
from dist_ckpt_strategies.storage.store import HostArray
from dist_ckpt_strategies.tools.plan_convert import (
    SAFETENSORS_DTYPES,
    ConvertPlan,
    FileTask,
    WriteItem,
    contiguous_runs,
)
from dist_ckpt_strategies.tools.readers import CheckpointReader, Memory, RegionRead

Read = Callable[[Sequence[RegionRead]], None]
"""Reads regions of the source; see ``CheckpointReader.read``."""

_INDEX_NAME = "model.safetensors.index.json"

_MAX_SEGMENTS = 1024
_WORD_NBYTES = 8
"""Bytes of the size before a header of safetensors, and what the header is padded to."""


class TargetWriter(ABC):
    """Writes a converted checkpoint, on one rank or several; all threads of these may ``write``.

    Each thread has ``block_nbytes`` of elements in memory at once. ``marker`` makes the checkpoint
    visible; None where the files alone do, a model's arrays.
    """

    marker: CheckpointMarker | None

    def __init__(
        self, root: Location, plan: ConvertPlan, block_nbytes: int, allow: Allowed = ()
    ) -> None:
        self.root, self.plan = root, plan
        self._block_nbytes, self._allow = block_nbytes, allow
        self._memory = Memory()

    def _block(self, item: WriteItem, region: Region, read: Read) -> HostArray:
        """Elements of a region, in memory of this thread, until it is called again."""
        elements = self._memory.array(region.shape, item.array.dtype)
        read([(item.source.key, region, elements)])
        return elements

    @abstractmethod
    def begin(self) -> str:
        """Make a place for the files, on the first rank; the id of the save."""

    @abstractmethod
    def open(self, save_id: str, owner: str, arrays: Sequence[ArraySpec]) -> None:
        """Find the place that ``begin`` has made on the rank ``owner``, and describe arrays."""

    @abstractmethod
    def write(self, task: FileTask, read: Read) -> Any:
        """Write the elements of a task; gives what ``finish`` has to know of it, of JSON types."""

    def flush(self, tasks: Sequence[FileTask]) -> None:
        """Make the files of this rank's tasks durable, where ``write`` has not."""
        del tasks

    @abstractmethod
    def finish(self, records: Mapping[int, Any], source: CheckpointReader, common: bytes) -> None:
        """Write all the rest, on the first rank; ``common`` is the file of the common state.

        ``records`` are what ``write`` gave, on all ranks, by number of the task.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make all of it visible, on the first rank."""

    def abandon(self) -> None:  # noqa: B027 - most leave it to the next conversion
        """Remove what this rank has written of a conversion that failed before the commit."""


class StagedWriter(TargetWriter):
    """Writes to ``place``, from where a commit moves the files; see TargetWriter.

    What a conversion that fails leaves there, the next one to the same target removes.
    """

    def __init__(
        self,
        root: Location,
        place: SavePlace,
        plan: ConvertPlan,
        block_nbytes: int,
        allow: Allowed = (),
    ) -> None:
        super().__init__(root, plan, block_nbytes, allow)
        self.place = place

    @property
    def files(self) -> Directory:
        """The files of the place, where that is a directory."""
        return Directory(require_path(self.place.location, "this format"))

    def begin(self) -> str:
        """See TargetWriter."""
        self.place.save_id = self.place.new_save_id()
        self.place.begin(self.plan.keys)
        return self.place.save_id

    def open(self, save_id: str, owner: str, arrays: Sequence[ArraySpec]) -> None:
        """See TargetWriter."""
        del arrays
        self.place.save_id = save_id
        self.place.require(owner)

    def commit(self) -> None:
        """See TargetWriter."""
        self.place.commit(self.marker.to_json() if self.marker else None)


class ZarrWriter(StagedWriter):
    """Writes ("zarr", 1) or ("zarr", 2), chunk by chunk, with the writer of saves."""

    def __init__(self, writer: CheckpointWriter, plan: ConvertPlan, block_nbytes: int) -> None:
        super().__init__(writer.root, writer.place, plan, block_nbytes)
        self._writer = writer
        self._timeout_s = writer.options.timeout_s
        self.marker = CheckpointMarker("zarr", writer.version)

    def open(self, save_id: str, owner: str, arrays: Sequence[ArraySpec]) -> None:
        """See TargetWriter."""
        self.place.save_id = save_id
        self._writer.require(owner)
        self._created = arrays
        self._writer.arrays.begin_creates(arrays).wait(self._timeout_s)

    def write(self, task: FileTask, read: Read) -> str:
        """See TargetWriter. Gives the digests of the chunk's file, in format 2, in hexadecimal."""
        (item,) = task.items
        array, index = item.array, item.array.chunk_at(item.region)
        assert index is not None  # noqa: S101 - the plan has an item for each chunk

        def blocks() -> Iterator[tuple[Region, HostArray]]:
            if array.inner_shape is None:
                for block in item.blocks(self._block_nbytes):
                    held = block.intersect(Region.whole(array.shape))
                    padding = np.zeros(block.shape, array.dtype.numpy)  # no memory until used
                    yield block, padding if held is None else self._block(item, held, read)
            else:
                grid = InnerGrid.of(array, index)
                for run in grid.runs(max_nbytes=self._block_nbytes):
                    region = grid.region_of(run.offset, run.shape)
                    yield region, self._block(item, region, read)

        self._writer.arrays.write_chunk(array, index, blocks())
        return self._writer.arrays.digests.get((array.key, index), b"").hex()

    def flush(self, tasks: Sequence[FileTask]) -> None:
        """See TargetWriter."""
        written = [item.array for task in tasks for item in task.items]
        arrays = {array.key: array for array in (*self._created, *written)}
        self._writer.arrays.begin_syncs(list(arrays.values())).wait(self._timeout_s)

    def finish(self, records: Mapping[int, Any], source: CheckpointReader, common: bytes) -> None:
        """See TargetWriter. In format 2 the manifest's index comes last."""
        keeps_plain = self._writer.version != 1
        for batch in object_batches(source, self.plan.objects, keeps_plain=keeps_plain):
            if batch:
                self._writer.write_objects(batch)
        writer, arrays = self._writer, self.plan.arrays
        writer.store.write(COMMON_NAME, common)
        if writer.version == 1:
            return
        chunks = ((self.plan.tasks[number].items[0], found) for number, found in records.items())
        writer.arrays.digests.update(
            {
                (item.array.key, item.array.chunk_at(item.region) or ()): bytes.fromhex(found)
                for item, found in chunks
            }
        )
        keys = (object_id.key for object_id in self.plan.objects)
        segments = build_manifest_plan(arrays, keys, _MAX_SEGMENTS)
        described = writer.described(arrays, segments.firsts)
        entries = [
            writer.write_segment(number, first, [described[number]] if number in described else [])
            for number, first in enumerate(segments.firsts)
        ]
        writer.write_index(entries, source.layout, common)


class SafetensorsWriter(StagedWriter):
    """Writes files of safetensors and their index; see TargetWriter.

    A file is the size of a JSON header, the header, and the elements of each tensor in C order.
    """

    marker = None

    @cached_property
    def _headers(self) -> dict[str, bytes]:
        """The beginning of each file: the size of its description, and the description."""
        files: dict[str, dict[str, Any]] = {}
        for task in self.plan.tasks:
            (item,) = task.items
            files.setdefault(task.name, {"__metadata__": {"format": "pt"}})[task.key] = {
                "dtype": SAFETENSORS_DTYPES[item.array.dtype],
                "shape": item.array.shape,
                "data_offsets": [item.byte_offset, item.byte_offset + item.array.nbytes],
            }
        found = {}
        for name, fields in files.items():
            content = json.dumps(fields, separators=(",", ":")).encode()
            content += b" " * (-len(content) % _WORD_NBYTES)
            found[name] = len(content).to_bytes(_WORD_NBYTES, "little") + content
        return found

    def begin(self) -> str:
        """See TargetWriter. Every file gets its header."""
        save_id = super().begin()
        for name, header in self._headers.items():
            self.files.write(name, header)
        return save_id

    def write(self, task: FileTask, read: Read) -> None:
        """See TargetWriter."""
        path = self.files.path(task.name)
        with file_errors(task.key, path), open(path, "r+b", 0) as file:  # noqa: PTH123
            for item in task.items:
                itemsize, shape = item.array.dtype.itemsize, item.array.shape
                start = len(self._headers[task.name]) + item.byte_offset
                for block in item.blocks(self._block_nbytes):
                    content, done = bytes_of(self._block(item, block, read)), 0
                    for first, count in contiguous_runs(block, shape):
                        run = content[done : done + count * itemsize]
                        file.seek(start + first * itemsize)
                        write_buffered(file.fileno(), run)
                        done += run.size

    def flush(self, tasks: Sequence[FileTask]) -> None:
        """See TargetWriter."""
        for name in sorted({task.name for task in tasks}):
            path = self.files.path(name)
            with file_errors(None, path):
                sync_path(path)

    def finish(self, records: Mapping[int, Any], source: CheckpointReader, common: bytes) -> None:
        """See TargetWriter. By the index the files are known to be complete."""
        del records, source, common
        weights = {task.key: task.name for task in self.plan.tasks}
        index = {
            "metadata": {"total_size": self.plan.nbytes},
            "weight_map": {key: weights[key] for key in sorted(weights)},
        }
        self.files.write(_INDEX_NAME, json.dumps(index, indent=2).encode())


def object_batches(
    source: CheckpointReader, objects: Sequence[ObjectId], *, keeps_plain: bool
) -> Iterator[dict[ObjectId, bytes]]:
    """Objects, 64 MiB of them at a time, or one that is larger; the last batch may be empty.

    What JSON stands for is pickled, unless ``keeps_plain``.
    """
    batch: dict[ObjectId, bytes] = {}
    held = 0
    for object_id in objects:
        content = source.object_content(object_id)
        if not keeps_plain and (plain := plain_value(content)) is not None:
            content = dump_loadable(plain.value, name=object_id.unique_key, allow=())
        if batch and held + len(content) > MAX_OBJECT_NBYTES:
            yield batch
            batch, held = {}, 0
        batch[object_id] = content
        held += len(content)
    yield batch


def bytes_of(elements: HostArray) -> npt.NDArray[np.uint8]:
    """The memory of elements in C order."""
    return elements.reshape(-1).view(np.uint8)
