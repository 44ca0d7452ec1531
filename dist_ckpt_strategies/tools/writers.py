"""What a conversion writes to, and the Zarr formats among them: file by file, block by block."""

from __future__ import annotations

import io
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId
from dist_ckpt_strategies.core.chunk_grids import MAX_OBJECT_NBYTES
from dist_ckpt_strategies.core.inner_grid import InnerGrid, Run
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.formats.checkpoint_writer import (
    described_segments,
    write_index,
    write_packs,
    write_segment,
)
from dist_ckpt_strategies.formats.manifest import (
    SAVE_NAME,
    ArrayRecord,
    ChunkRecord,
    begun_content,
)
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.object_files import plain_value
from dist_ckpt_strategies.formats.objects import Allowed, dump_object, write_dumped
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.formats.zarr3 import (
    at_box,
    digests_of,
    encode_index,
    encode_run,
    is_in_place,
    metadata_content,
    metadata_name,
)
from dist_ckpt_strategies.formats.zarr3_chunks import runs_at_a_time
from dist_ckpt_strategies.sharded.plan_manifest import build_manifest_plan
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.bucket import MAX_REQUESTS, Bucket
from dist_ckpt_strategies.storage.direct_io import begin_writeback, write_buffered
from dist_ckpt_strategies.storage.file_systems import permitted_access, whole_flush
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    create_file,
    create_new,
    file_errors,
    sync_path,
)
from dist_ckpt_strategies.storage.store import Directory, Store
from dist_ckpt_strategies.tools.plan_convert import (
    ConvertPlan,
    FileTask,
    Format,
    WriteItem,
    blocks,
)

Bytes = npt.NDArray[np.uint8]

ReadRegion = Callable[[str, Region, HostArray], None]
"""Fills memory with a region of the source's array of a key."""

_MAX_SEGMENTS = 1024


@dataclass(frozen=True, slots=True)
class Contents:
    """What goes into the target beside the arrays.

    Attributes:
        objects: every shard, as ``CheckpointReader.object_content`` gives it; one at a time.
        common: the file of the common state.
        layout: parallel sizes of the job that saved, as far as they are known.
    """

    objects: Iterable[tuple[ObjectId, bytes]]
    common: bytes
    layout: Mapping[str, int]


class CheckpointWriter(Protocol):
    """Writes a converted checkpoint, on one rank or several; all threads of these may ``write``."""

    @property
    def marker(self) -> CheckpointMarker | None:
        """What makes the checkpoint visible; None where the files alone do."""
        ...

    def begin(self) -> None:
        """Write what comes before the elements, on the first rank."""
        ...

    def write(self, task: FileTask, read: ReadRegion) -> Any:
        """Write the elements of a task; gives what ``finish`` has to know of it, of JSON types."""
        ...

    def finish(self, records: Mapping[int, Any], contents: Contents) -> None:
        """Write all the rest, on the first rank.

        Args:
            records: what ``write`` gave, on all ranks, by number of the task.
            contents: what there is beside the arrays.
        """
        ...


def open_writer(
    target: TargetFiles | Bucket, plan: ConvertPlan, block_nbytes: int, allow: Allowed
) -> CheckpointWriter:
    """What writes to an empty directory, or to an empty place in an object store.

    Args:
        target: the place; only ``Format.ZARR2`` goes to an object store.
        plan: what is written.
        block_nbytes: bound on what is in memory at once for each thread, a few times.
        allow: classes that objects may be unpickled to: torch_dist puts each into a list.
    """
    from dist_ckpt_strategies.tools.safetensors import SafetensorsWriter  # noqa: PLC0415
    from dist_ckpt_strategies.tools.torch_dist import TorchDistWriter  # noqa: PLC0415

    if isinstance(target, Bucket):
        return Zarr2BucketWriter(target, plan, block_nbytes)
    if plan.target is Format.ZARR1:
        return Zarr1Writer(target, plan, block_nbytes)
    if plan.target is Format.ZARR2:
        return Zarr2DirectoryWriter(target, plan, block_nbytes)
    if plan.target is Format.TORCH_DIST:
        return TorchDistWriter(target, plan, allow)
    return SafetensorsWriter(target, plan)


class Memory(threading.local):
    """For each thread a buffer that is used again: memory that was never touched is slow."""

    def __init__(self) -> None:
        self._buffers: dict[str, Bytes] = {}

    def get(self, name: str, nbytes: int) -> Bytes:
        """So many bytes of this thread's buffer of that name, with any content."""
        held = self._buffers.get(name)
        if held is None or held.size < nbytes:
            self._buffers.pop(name, None)
            held = self._buffers[name] = np.empty(nbytes, np.uint8)
        return held[:nbytes]

    def array(self, shape: Shape, dtype: DType, name: str = "elements") -> HostArray:
        """This thread's buffer of that name, as an array in C order."""
        nbytes = Region.whole(shape).numel * dtype.itemsize
        return self.get(name, nbytes).view(dtype.numpy).reshape(shape)


def read_item(item: WriteItem, region: Region, read: ReadRegion, memory: Memory) -> HostArray:
    """The elements of a region of an item; zeros where it reaches past the array's edge."""
    dtype = item.array.dtype
    found = memory.array(region.shape, dtype)
    inside = region.intersect(Region.whole(item.array.shape))
    if inside == region:
        read(item.source, region, found)
        return found
    found.reshape(-1).view(np.uint8).fill(0)
    if inside is not None:
        held = np.empty(inside.shape, dtype.numpy)
        read(item.source, inside, held)
        bits = np.dtype((np.void, dtype.itemsize))
        found.view(bits)[inside.within(region).slices()] = held.view(bits)
    return found


class TargetFiles:
    """The files of a conversion into a directory, and how they become durable.

    They are flushed one by one, or all at once where that is cheaper.

    Args:
        root: the directory; nothing is written to it before this is made.
        options: whether the whole file system may be flushed.
    """

    def __init__(self, root: Path, options: Options) -> None:
        access = permitted_access(root, options)
        self._whole = whole_flush(root) if access.is_flushed_whole else None
        self.root = root
        self.is_flushed_each = self._whole is None

    def path(self, name: str) -> str:
        """A file of the directory."""
        return f"{self.root}/{name}"

    @contextmanager
    def new(self, name: str, key: str | None) -> Iterator[int]:
        """A new file, open for writing; errors name it."""
        path = self.path(name)
        with file_errors(key, path):
            handle = create_new(path)
            try:
                yield handle
                if self.is_flushed_each:
                    os.fsync(handle)
                else:
                    begin_writeback(handle)
            finally:
                os.close(handle)

    def write(self, name: str, content: bytes, key: str | None = None) -> None:
        """Write a small file, durable after ``flush``."""
        path = self.path(name)
        with file_errors(key, path):
            create_file(path, content)
            if self.is_flushed_each:
                sync_path(path)

    def flush(self, names: Iterable[str]) -> None:
        """Return once the files of these names, and the names themselves, are durable."""
        if self._whole is not None:
            self._whole.run()
            return
        for directory in sorted({str(up) for name in names for up in PurePosixPath(name).parents}):
            path = self.path(directory)
            with file_errors(None, path):
                sync_path(path)


class Zarr1Writer:
    """Writes ("zarr", 1); see CheckpointWriter."""

    marker = CheckpointMarker("zarr", 1)

    def __init__(self, files: TargetFiles, plan: ConvertPlan, block_nbytes: int) -> None:
        self._files, self._plan = files, plan
        self._layout = Zarr2Layout(files.root)
        self._block_nbytes = block_nbytes
        self._memory = Memory()

    def begin(self) -> None:
        """See CheckpointWriter."""
        for array in self._plan.arrays:
            self._layout.create(array, is_flushed=self._files.is_flushed_each)

    def write(self, task: FileTask, read: ReadRegion) -> None:
        """See CheckpointWriter."""
        (item,) = task.items
        itemsize = item.array.dtype.itemsize
        with self._files.new(task.name, task.key) as handle:
            for block in blocks(item.region, itemsize, self._block_nbytes, item.granularity):
                found = read_item(item, block, read, self._memory)
                write_buffered(handle, found.reshape(-1).view(np.uint8))

    def finish(self, _records: Mapping[int, Any], contents: Contents) -> None:
        """See CheckpointWriter."""
        keys = [array.key for array in self._plan.arrays]
        for object_id, content in contents.objects:
            plain = plain_value(content)
            name = object_id.unique_key
            dumped = content if plain is None else dump_object(plain.value, name=name)
            write_dumped(self._files.root, object_id, dumped)
            keys.append(object_id.key)
        self._files.write(COMMON_NAME, contents.common)
        self._layout.sync_directories(keys)


class Zarr2Writer:
    """Writes ("zarr", 2); see CheckpointWriter. How files are written is for its subclasses."""

    marker = CheckpointMarker("zarr", 2)

    def __init__(self, store: Store, plan: ConvertPlan, block_nbytes: int) -> None:
        self._store, self._plan = store, plan
        self._block_nbytes = block_nbytes
        self._memory = Memory()

    def write(self, task: FileTask, read: ReadRegion) -> str:
        """See CheckpointWriter. Gives the digests of the chunk's file, in hexadecimal."""
        (item,) = task.items
        grid = InnerGrid.of(item.array, _chunk_index(item))
        digests: list[int] = []
        with self._new_file(task) as append:
            for run in grid.all(max(1, self._block_nbytes // grid.stored_nbytes)):
                digests += self._append_run(append, grid, run, item, read)
            footer = np.frombuffer(encode_index(grid), np.uint8)
            append(footer)
        digests.append(xxhash.xxh3_64_intdigest(footer.data))
        return ChunkRecord.of(0, digests).digests.hex()

    def _append_run(
        self,
        append: Callable[[Bytes], Any],
        grid: InnerGrid,
        run: Run,
        item: WriteItem,
        read: ReadRegion,
    ) -> list[int]:
        """Read the region of some inner chunks and write them; their digests."""
        region = grid.box(run.offset, run.shape)
        elements = read_item(item, region, read, self._memory)
        within = replace(grid, region=region, counts=run.shape)
        digests: list[int] = []
        for few in within.all(runs_at_a_time(grid)):
            stored = at_box(elements, within.box(few.offset, few.shape).within(region))
            if stored.flags.c_contiguous and is_in_place(within, few, region):
                encoded = stored.reshape(-1).view(np.uint8)
                digests += digests_of(encoded.reshape(few.num_chunks, -1))
            else:
                encoded = self._memory.get("encoded", few.num_chunks * grid.stored_nbytes)
                digests += encode_run(within, few, item.array.dtype, elements, encoded)
            append(encoded)
        return digests

    def finish(self, records: Mapping[int, str], contents: Contents) -> None:
        """See CheckpointWriter. The manifest's index comes last."""
        plan = self._plan
        objects = write_packs(self._store, contents.objects, writer=0, max_nbytes=MAX_OBJECT_NBYTES)
        self._store.write(COMMON_NAME, contents.common)
        chunks: dict[str, dict[Shape, ChunkRecord]] = defaultdict(dict)
        for number, record in records.items():
            (item,) = plan.tasks[number].items
            chunks[item.array.key][_chunk_index(item)] = ChunkRecord(0, bytes.fromhex(record))
        segments = build_manifest_plan(
            plan.arrays, (found.id.key for found in objects), _MAX_SEGMENTS
        )
        records_of = (ArrayRecord(a, chunks.get(a.key, {})) for a in plan.arrays)
        described = described_segments(records_of, objects, segments.segment_of)
        entries = [
            write_segment(self._store, number, first, filter(None, [described.get(number)]))
            for number, first in enumerate(segments.firsts)
        ]
        write_index(self._store, entries, contents.common, contents.layout)

    def _new_file(self, task: FileTask) -> Any:
        """A context that gives what appends bytes to the file of a chunk."""
        raise NotImplementedError


class Zarr2DirectoryWriter(Zarr2Writer):
    """Writes ("zarr", 2) to a directory, without holding a chunk whole."""

    def __init__(self, files: TargetFiles, plan: ConvertPlan, block_nbytes: int) -> None:
        super().__init__(Directory(files.root), plan, block_nbytes)
        self._files = files

    def begin(self) -> None:
        """See CheckpointWriter."""
        self._store.write(SAVE_NAME, begun_content(self._files.root.name))
        for array in self._plan.arrays:
            self._files.write(metadata_name(array.key), metadata_content(array), array.key)

    @contextmanager
    def _new_file(self, task: FileTask) -> Iterator[Callable[[Bytes], Any]]:
        with self._files.new(task.name, task.key) as handle:
            yield partial(write_buffered, handle)


class Zarr2BucketWriter(Zarr2Writer):
    """Writes ("zarr", 2) to an object store: a chunk is held and put whole; the plan bounds it."""

    def begin(self) -> None:
        """See CheckpointWriter. The first object of the save is there already."""

        def describe(array: ArraySpec) -> None:
            self._store.write(metadata_name(array.key), metadata_content(array))

        with ThreadPoolExecutor(MAX_REQUESTS, "dist-ckpt-describe") as pool:
            for _ in pool.map(describe, self._plan.arrays):
                pass

    @contextmanager
    def _new_file(self, task: FileTask) -> Iterator[Callable[[Bytes], Any]]:
        content = io.BytesIO()
        yield lambda encoded: content.write(encoded.data)
        self._store.write(task.name, content.getvalue())


def _chunk_index(item: WriteItem) -> Shape:
    index = item.array.chunk_at(item.region)
    assert index is not None  # noqa: S101 - the plan has an item for each chunk
    return index
