"""What the package asks of a place that holds checkpoints: a directory, or a bucket.

Arrays are read and written by region; small files have names below the checkpoint's root.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import ArraySpec, Region
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.storage.file_systems import pread_into
from dist_ckpt_strategies.storage.files import (
    file_errors,
    nbytes_text,
    new_file,
    open_at_once,
    read_file,
    sync_path,
    write_file,
)
from dist_ckpt_strategies.storage.io_pool import Transfer, limited

HostArray = npt.NDArray[np.generic] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ArrayWrite:
    """Elements of ``region`` to store; ``source`` has its shape and stays untouched until done."""

    array: ArraySpec
    region: Region
    source: HostArray


@dataclass(frozen=True, slots=True)
class ArrayRead:
    """Elements of ``region`` to read into ``target``, which has its shape and may be strided."""

    array: ArraySpec
    region: Region
    target: HostArray


class ArrayReader(Protocol):
    """Moves regions of named arrays to memory."""

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """Issue all reads at once. A missing chunk is an error, never zeros."""
        ...


class ArrayWriter(Protocol):
    """Moves regions of named arrays from memory to storage."""

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """Write the metadata of new arrays."""
        ...

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """Make durable all that this store has written, and the metadata of these arrays.

        The names of their files too, those that other ranks wrote included: call it when every
        rank has written.
        """
        ...

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """Issue all writes at once. Each covers whole chunks, no chunk is written twice.

        They need not wait for the array's creation.
        """
        ...


_BLOCK_NBYTES = 2 << 20
"""Read at a time from a file system, so that it stays in the processor's cache."""


class WrongSizeError(CorruptCheckpointError):
    """A file has another size than it should have.

    Args:
        path: the file.
        expected: bytes.
        found: in words; an object store only shows whether it is larger.
    """

    def __init__(self, path: str, expected: int, found: str) -> None:
        super().__init__(f"{path} has {found}, expected {nbytes_text(expected)}", path=path)
        self.expected = expected
        self.found = found


class Store(Protocol):
    """A directory, or what stands for one. Names have ``/`` between their parts.

    Every method raises StorageError, naming the file, where storage fails.

    Attributes:
        block_nbytes: how much is best read at a time.
        num_readers: threads that are best used to read many files.
    """

    block_nbytes: int

    @property
    def num_readers(self) -> int:
        """See the class."""
        ...

    def __str__(self) -> str:
        """The directory as its user calls it."""
        ...

    def path(self, name: str) -> str:
        """A file as its user calls it."""
        ...

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        """The content of a file, from a byte on: to its end, or as many bytes as it has of these.

        Raises:
            IncompleteCheckpointError: it is missing.
        """
        ...

    def read_blocks(self, name: str, sizes: Sequence[int]) -> Iterator[memoryview]:
        """All of a file in blocks of these sizes, each valid until the next is asked for.

        Raises:
            IncompleteCheckpointError: it is missing.
            WrongSizeError: it has another size; in an object store it may show at the last block.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Make a file, whole and durable, or replace it."""
        ...


def block_sizes(nbytes: int, block_nbytes: int) -> list[int]:
    """The sizes of blocks that make up so many bytes, for ``read_blocks``; at least one."""
    return [min(block_nbytes, nbytes - at) for at in range(0, max(nbytes, 1), block_nbytes)]


@dataclass(frozen=True)
class Directory:
    """A directory of a file system; see Store."""

    root: Path
    block_nbytes = _BLOCK_NBYTES

    @property
    def num_readers(self) -> int:
        """See Store: one thread for each processor."""
        return len(os.sched_getaffinity(0))

    def __str__(self) -> str:
        """See Store."""
        return str(self.root)

    def path(self, name: str) -> str:
        """See Store."""
        return f"{self.root}/{name}"

    @limited
    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        """See Store."""
        path = self.path(name)
        with file_errors(None, path):
            return read_file(path, nbytes, byte_offset)

    def read_blocks(self, name: str, sizes: Sequence[int]) -> Iterator[memoryview]:
        """See Store."""
        path, memory, byte_offset = self.path(name), np.empty(max(sizes), np.uint8), 0
        with file_errors(None, path):
            found = Path(path).stat().st_size
            if found != sum(sizes):
                raise WrongSizeError(path, sum(sizes), nbytes_text(found))
            with open(path, "rb", 0, opener=open_at_once) as file:
                for nbytes in sizes:
                    block = memory[:nbytes]
                    if pread_into(file.fileno(), byte_offset, block) != nbytes:
                        raise OSError(0, "it ended while it was read")
                    yield block.data
                    byte_offset += nbytes

    @limited
    def write(self, name: str, content: bytes) -> None:
        """See Store."""
        path = Path(self.path(name))
        with file_errors(None, path):
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync_path(path.parent.parent)
            write_file(path, content)

    @limited
    def create(self, name: str, content: bytes) -> bool:
        """Make a file unless there is one; whether it was made. At first it may be seen empty."""
        path = self.path(name)
        with file_errors(None, path):
            try:
                with new_file(path) as handle:
                    os.write(handle, content)
            except FileExistsError:
                return False
            except OSError:
                Path(path).unlink(missing_ok=True)  # a full disk has room for its name
                raise
        return True

    @limited
    def names(self, start: str = "") -> Sequence[str]:
        """What is right below the directory and has a name that starts with ``start``."""
        with file_errors(None, self.root), suppress(FileNotFoundError):
            return [name for name in os.listdir(self.root) if name.startswith(start)]  # noqa: PTH208
        return []

    @limited
    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are passed over."""
        for name in names:
            with file_errors(None, self.path(name)):
                Path(self.path(name)).unlink(missing_ok=True)
