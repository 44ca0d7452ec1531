"""Write format ("zarr", 1): a file for each chunk, and one that describes each array.

A chunk is a shard as it is saved, so that nothing is sent between ranks. What Zarr cannot hold that
way, shards on no regular grid, is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from dist_ckpt_strategies.core.array import (
    DType,
    ObjectId,
    Region,
    Shape,
    ShardSpec,
    require_storable_keys,
)
from dist_ckpt_strategies.core.blocks import OBJECT, OBJECT_SUFFIX, BlockTable
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats import objects
from dist_ckpt_strategies.formats.zarr2 import METADATA_NAME, metadata_content
from dist_ckpt_strategies.storage.files import (
    Directory,
    file_errors,
    new_file,
    sync_path,
    write_vector,
)
from dist_ckpt_strategies.storage.io_pool import Deadline, Job, Transfer
from dist_ckpt_strategies.storage.store import Bytes


class NewFile(NamedTuple):
    """A file to be written: the key that it is of, its name below the checkpoint, its bytes."""

    key: str
    name: str
    content: Bytes


def chunk_name(key: str, origin: Shape, extent: Shape) -> str:
    """The file of the chunk that begins at an element, of an array of such chunks."""
    numbers = [start // max(1, size) for start, size in zip(origin, extent, strict=True)]
    return f"{key}/{'.'.join(map(str, numbers)) or '0'}"


def object_name(name: ObjectId) -> str:
    """The file of a shard of an object."""
    return f"{name.unique_key}{objects.OBJECT_SUFFIX}"


def require_on_grid(shards: Collection[ShardSpec], objects: Collection[ObjectId]) -> None:
    """Raise a PlanError where a rank's own shards show that the format cannot hold them."""
    extents: dict[str, Shape] = {}
    for shard in shards:
        _require_chunk(extents, shard.key, shard.region, "")
    for name in objects:
        if not name.shape:
            raise PlanError(
                f"{name.key}: a shard of an object on a grid without dims, which format ('zarr', 1)"
                " has no file name for; give it one dim, or save ('safetensors', 1)",
                key=name.key,
            )
    require_storable_keys({shard.key for shard in shards}, {name.key for name in objects})


def require_grids(tables: Sequence[BlockTable], global_ranks: Sequence[int]) -> None:
    """Raise a PlanError unless all shards of each array, of all ranks, are chunks of one grid."""
    extents: dict[str, Shape] = {}
    keys: dict[bool, set[str]] = {True: set(), False: set()}
    for table, rank in zip(tables, global_ranks, strict=True):
        for key, facts in zip(table.keys, table.facts, strict=True):
            keys[facts.dtype == OBJECT].add(key.removesuffix(OBJECT_SUFFIX))
        for row, array in enumerate(table.array.tolist()):
            _require_chunk(extents, table.keys[array], table.region(row), f" on rank {rank}")
    require_storable_keys(keys[False], keys[True])


def _require_chunk(extents: dict[str, Shape], key: str, region: Region, where: str) -> None:
    """Raise unless a region is a chunk of the grid that the first one of its array is in."""
    if 0 in region.shape:
        return
    chunk = extents.setdefault(key, region.shape)
    if region.shape != chunk or any(map(operator.mod, region.offset, chunk)):
        raise PlanError(
            f"{key}: {region}{where} is no chunk of a regular grid of chunks {chunk}, as other "
            "shards are, which format ('zarr', 1) needs; save ('safetensors', 1), which stores any",
            key=key,
        )


def metadata_files(shards: Iterable[ShardSpec]) -> Iterator[NewFile]:
    """The descriptions of arrays, each written by the rank that holds the first element."""
    seen = set()
    for shard in shards:
        offset, extent = shard.region
        is_empty = 0 in shard.array_shape
        if any(offset) or (0 in extent and not is_empty) or shard.key in seen:
            continue
        seen.add(shard.key)
        chunk = shard.array_shape if is_empty else extent
        content = metadata_content(
            shard.array_shape, tuple(max(1, size) for size in chunk), shard.dtype
        )
        yield NewFile(shard.key, f"{shard.key}/{METADATA_NAME}", np.frombuffer(content, np.uint8))


def write_files(
    store: Directory, files: Sequence[NewFile], num_threads: int, deadline: Deadline
) -> None:
    """Write new files, on threads; they are durable once ``sync_files`` returns.

    Raises:
        StorageError: one cannot be written; names key and file.
    """

    def write(name: str, content: Bytes) -> None:
        path = store.path(name)
        with file_errors(None, path), new_file(path, is_flushed=False) as handle:
            write_vector(handle, [content])

    jobs = [
        Job(file.key, store.path(file.name), partial(write, file.name, file.content))
        for file in files
    ]
    Transfer(jobs, num_threads).wait(deadline.left_s)


def sync_files(
    store: Directory, names: Iterable[tuple[str, str]], num_threads: int, deadline: Deadline
) -> None:
    """Make files durable, given by key and name, and then their names.

    After all are written: a file system that keeps a journal flushes much of it with the first.
    """
    files = {store.path(name): key for key, name in names}
    folders: dict[str, str] = {}
    for path, key in files.items():
        folder = path.rpartition("/")[0]
        while len(folder) >= len(str(store.root)) and folder not in folders:
            folders[folder] = key
            folder = folder.rpartition("/")[0]
    for paths in (files, folders):
        jobs = [Job(key, path, partial(sync_path, path)) for path, key in paths.items()]
        Transfer(jobs, num_threads).wait(deadline.left_s)


def expected_files(table: BlockTable) -> Iterator[tuple[str, int | None]]:
    """Each file that a rank writes that has told this, with its size if that is known."""
    itemsizes = [1 if f.dtype == OBJECT else DType(f.dtype).itemsize for f in table.facts]
    for row, array in enumerate(table.array.tolist()):
        (origin, extent), key, facts = table.region(row), table.keys[array], table.facts[array]
        if facts.dtype == OBJECT:
            name = ObjectId(key.removesuffix(OBJECT_SUFFIX), origin, facts.shape)
            yield object_name(name), None
            continue
        if 0 not in extent:
            yield chunk_name(key, origin, extent), math.prod(extent) * itemsizes[array]
        if not any(origin):
            yield f"{key}/{METADATA_NAME}", None


@dataclass(frozen=True, slots=True)
class ChunkJob:
    """Chunks to be written; see PackJob.

    Attributes:
        store: where they go.
        chunks: key, name, first byte in memory that holds a copy, and size of each; none is empty.
        others: further files.
        timeout_s: longest wait for the storage.
        num_threads: that write at the same time.
    """

    store: Directory
    chunks: tuple[tuple[str, str, int, int], ...]
    others: tuple[NewFile, ...]
    timeout_s: float
    num_threads: int

    def run(self, memory: memoryview) -> tuple[()]:
        """Write all of them, durably, from memory that holds the chunks. Rank-local."""
        content = np.frombuffer(memory, np.uint8)
        return self.write([[[content[at : at + size] for *_, at, size in self.chunks]]])

    def write(self, contents: Iterable[Iterable[Sequence[Bytes]]]) -> tuple[()]:
        """Write all of them, durably; ``contents`` are those of the chunks, in order. Rank-local.

        Raises:
            StorageError: one cannot be written.
        """
        deadline, chunks = Deadline.after(self.timeout_s), iter(self.chunks)
        for batch in chain.from_iterable(contents):
            filled = [content for content in batch if content.size]
            files = [NewFile(*next(chunks)[:2], content) for content in filled]
            write_files(self.store, files, self.num_threads, deadline)
        write_files(self.store, self.others, self.num_threads, deadline)
        names = [*(chunk[:2] for chunk in self.chunks), *(file[:2] for file in self.others)]
        sync_files(self.store, names, self.num_threads, deadline)
        return ()
