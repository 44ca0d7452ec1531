"""Read and write the arrays of a ("zarr", 1) checkpoint, one chunk at a time, by either engine."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.config import Engine, Options
from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import CheckpointError, MissingDependencyError, StorageError
from dist_ckpt_strategies.formats.raw_chunks import raw_reads, raw_write, require_chunk
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.storage.base import (
    ArrayRead,
    ArrayStore,
    ArrayWrite,
    HostArray,
    Transfer,
)
from dist_ckpt_strategies.storage.file_systems import (
    FileAccess,
    WholeFlush,
    permitted_access,
    whole_flush,
)
from dist_ckpt_strategies.storage.files import file_errors, sync_path
from dist_ckpt_strategies.storage.io_pool import ByteBudget, Job, run_pooled
from dist_ckpt_strategies.storage.time_limit import raise_if_cancelled


class ArrayLibrary(ABC):
    """A library that encodes and decodes chunks.

    Attributes:
        takes_raw: whether it moves raw chunks too, which need neither; else ``raw_chunks`` does.
    """

    takes_raw: ClassVar[bool]

    @abstractmethod
    def open(self, array: ArraySpec, path: Path, *, writes: bool) -> Any:
        """The array in a directory; of a raw one the metadata is not read, it may not be there."""

    @abstractmethod
    def read(self, opened: Any, box: Region, memory: HostArray) -> None:
        """Decode a box that lies in one chunk."""

    @abstractmethod
    def write(self, opened: Any, box: Region, memory: HostArray, path: str) -> None:
        """Encode a whole chunk, and flush its file."""

    @abstractmethod
    def translated(self, job: Job, error: Exception) -> CheckpointError:
        """What an error of the library means."""


class Zarr2Arrays:
    """Reads and writes the arrays below one directory; see ArrayStore.

    Takes ``max_inflight_bytes`` for chunks that are encoded or decoded; a larger one goes alone.

    Args:
        root: the directory, absolute.
        options: threads and bounds.
        access: what suits the file system.
        library: encodes and decodes.
    """

    def __init__(
        self, root: Path, options: Options, access: FileAccess, library: ArrayLibrary
    ) -> None:
        self._root = root
        self._layout = Zarr2Layout(root)
        self._options = options
        self._access = access
        self._library = library

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        create = partial(self._layout.create, is_flushed=self._flush is None)
        jobs = (
            Job(array.key, self._layout.metadata_path(array.key), partial(create, array))
            for array in arrays
        )
        return run_pooled(jobs, self._access.num_metadata_threads)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        if self._flush is not None:
            return run_pooled([Job("", self._root, self._flush.run)], 1)
        paths = self._layout.directories(array.key for array in arrays)
        jobs = (Job(key, path, partial(sync_path, path)) for path, key in paths.items())
        return run_pooled(jobs, self._access.num_write_threads)

    @cached_property
    def _flush(self) -> WholeFlush | None:
        """What makes all writes durable, opened before the first; None for one file at a time."""
        return whole_flush(self._root) if self._access.is_flushed_whole else None

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """See ArrayStore."""
        bounce, is_flushed = self._access.bounce_buffers(), self._flush is None
        encoded = _Encoded(self._layout, self._library, self._options.max_inflight_bytes)
        jobs: list[Job] = []
        for write in writes:
            raw = None
            if not self._library.takes_raw:
                raw = raw_write(self._root, write, bounce, is_flushed=is_flushed)
            jobs += (
                encoded.writes(write) if raw is None else [Job(raw.array.key, raw.path, raw.run)]
            )
        return self._run(jobs, encoded, self._access.num_write_threads)

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayStore."""
        bounce = self._access.bounce_buffers()
        encoded = _Encoded(self._layout, self._library, self._options.max_inflight_bytes)
        jobs: list[Job] = []
        for read in reads:
            raw = None if self._library.takes_raw else raw_reads(self._root, read, bounce)
            if raw is None:
                jobs += encoded.reads(read)
            else:
                jobs += (Job(one.array.key, one.path, one.run) for one in raw)
        return self._run(jobs, encoded, self._access.num_read_threads)

    def _run(self, jobs: Sequence[Job], encoded: _Encoded, num_threads: int) -> Transfer:
        if encoded.is_any:
            num_threads = max(num_threads, self._options.io_threads)
        return run_pooled(jobs, num_threads, self._library.translated)


class _Encoded:
    """Jobs of one transfer for chunks that the library encodes or decodes, one for each chunk.

    A library that is asked for many chunks at once holds all of them in memory, and may report the
    first failure while it still moves others.
    """

    def __init__(self, layout: Zarr2Layout, library: ArrayLibrary, budget_nbytes: int) -> None:
        self._layout = layout
        self._library = library
        self._budget = ByteBudget(budget_nbytes)
        self._opened: dict[str, Any] = {}
        self.is_any = False

    def reads(self, read: ArrayRead) -> Iterator[Job]:
        """Those that fill what is read."""
        return self._jobs(read.array, read.region, read.target, self._read)

    def writes(self, write: ArrayWrite) -> Iterator[Job]:
        """Those that store what is written."""
        return self._jobs(write.array, write.region, write.source, self._write)

    def _jobs(
        self, array: ArraySpec, region: Region, memory: HostArray, move: Any
    ) -> Iterator[Job]:
        self.is_any = True
        for index in array.chunks_of(region):
            box = region.intersect(array.chunk_region(index))
            if box is not None:
                path = str(self._layout.chunk_path(array, index))
                part = memory[box.within(region).slices() or ...]  # () would copy a scalar
                yield Job(array.key, path, partial(move, array, path, box, part))

    def _read(self, array: ArraySpec, path: str, box: Region, memory: HostArray) -> None:
        with file_errors(array.key, path):
            require_chunk(array, Path(path))
        self._require_memory(array)
        opened = self._open(array, writes=False)
        with self._budget.held(_library_nbytes(array)):
            raise_if_cancelled()
            self._library.read(opened, box, memory)

    def _write(self, array: ArraySpec, path: str, box: Region, memory: HostArray) -> None:
        opened = self._open(array, writes=True)
        with self._budget.held(_library_nbytes(array)):
            raise_if_cancelled()
            self._library.write(opened, box, memory, path)

    def _open(self, array: ArraySpec, *, writes: bool) -> Any:
        """The array; several threads may open it at once, which does no harm."""
        if array.key not in self._opened:
            if writes:
                self._layout.ensure(array)
            directory = self._layout.directory(array.key)
            self._opened[array.key] = self._library.open(array, directory, writes=writes)
        return self._opened[array.key]

    def _require_memory(self, array: ArraySpec) -> None:
        """Raise where chunks are stated for which TensorStore would end the process."""
        if array.chunk_nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            metadata = self._layout.metadata_path(array.key)
            raise StorageError(
                f"{array.key}: {metadata} states chunks of {array.chunk_nbytes} bytes, more than "
                "this machine has memory to decode",
                key=array.key,
                path=metadata,
            )


def _library_nbytes(array: ArraySpec) -> int:
    """Memory that a library takes to encode or decode one chunk of the array, in bytes."""
    return array.chunk_nbytes * (1 if array.is_raw else 2)


def open_array_store(root: Path, options: Options) -> ArrayStore:
    """The array store of ``options.engine`` over a checkpoint directory.

    Raises:
        MissingDependencyError: the engine's library is not installed.
        StorageError: the engine's library cannot name the directory.
    """
    try:
        if options.engine is Engine.ZARR:
            from dist_ckpt_strategies.formats.zarr2_python import (  # noqa: PLC0415
                ZarrPython,
                access_of_zarr_python,
            )

            access = access_of_zarr_python(options.io_threads)
            return Zarr2Arrays(root.absolute(), options, access, ZarrPython())
        from dist_ckpt_strategies.formats.zarr2_tensorstore import (  # noqa: PLC0415
            TensorStore,
            plain_path,
        )

        root = plain_path(root)
        return Zarr2Arrays(
            root, options, permitted_access(root, options), TensorStore(options.io_threads)
        )
    except ImportError as error:
        other = next(engine for engine in Engine if engine is not options.engine)
        raise MissingDependencyError(
            f"engine {options.engine} needs a package that does not import here ({error}); "
            f"install it, or choose engine={other.value!r}"
        ) from error
