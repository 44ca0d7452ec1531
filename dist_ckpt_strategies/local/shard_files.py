"""The shards on one node's disk: found, written so that they appear whole, read, removed.

A rank keeps its own shard and copies of others' in ``<root>/<its global rank>/<shard id>.part``.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import xxhash

from dist_ckpt_strategies.errors import CorruptCheckpointError, StorageError
from dist_ckpt_strategies.local.shard_format import (
    END_NBYTES,
    BufferDigests,
    Bytes,
    Digest,
    LocalShard,
    LocalShardId,
    decode_footer,
    encode_footer,
    footer_nbytes,
)
from dist_ckpt_strategies.storage.file_systems import begin_writeback
from dist_ckpt_strategies.storage.files import (
    PARTIAL_PREFIX,
    file_errors,
    make_directories,
    pread_into,
    sync_path,
    try_lock,
)
from dist_ckpt_strategies.storage.io_pool import (
    MAX_SLICE_NBYTES,
    limited,
    raise_if_cancelled,
)

SUFFIX = ".part"

_READ_NBYTES = 2 << 20
"""Read at once: little enough to be in the processor's cache still when its digest is taken."""

RANK = re.compile(r"0|[1-9]\d*", re.ASCII)
"""The name of a rank's directory."""


@dataclass(frozen=True, slots=True)
class FoundShard:
    """A file whose name says that it is this shard."""

    shard_id: LocalShardId
    path: Path

    @property
    def holder(self) -> int:
        """The global rank that keeps it."""
        return int(self.path.parent.name)


class ShardDirectory:
    """All shards below one directory of a node, whichever rank put them there.

    The directory is made when something is written. What cannot be listed, made, written or removed
    is a StorageError.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        """The directory."""
        return str(self.root)

    @limited
    def find(self, holders: Iterable[int] | None = None) -> list[FoundShard]:
        """Files named like shards, sorted by holder and path; by default those of all holders."""
        found = []
        for holder in self.holders() if holders is None else holders:
            directory = self.holder_directory(holder)
            with file_errors(None, directory):
                for path in _entries(directory):
                    shard_id = LocalShardId.parse(path.name.removesuffix(SUFFIX))
                    if shard_id is not None and path.name.endswith(SUFFIX):
                        found.append(FoundShard(shard_id, path))
        return found

    @limited
    def holders(self) -> list[int]:
        """Global ranks that have a directory here."""
        with file_errors(None, self.root):
            names = [path.name for path in _entries(self.root) if path.is_dir()]
        return sorted(int(name) for name in names if RANK.fullmatch(name))

    def holder_directory(self, global_rank: int) -> Path:
        """Where a rank keeps its shards."""
        return self.root / str(global_rank)

    def path_of(self, holder: int, shard_id: LocalShardId) -> Path:
        """The file of a shard that a rank keeps."""
        return self.holder_directory(holder) / f"{shard_id}{SUFFIX}"

    @limited
    def create(self, shard: LocalShard, holder: int) -> ShardWriter:
        """Begin to write a shard; it appears when the writer is done."""
        return ShardWriter(self.path_of(holder, shard.shard_id), shard)

    @limited
    def remove(self, found: FoundShard) -> None:
        """Remove a shard; that it is gone already is no error."""
        with file_errors(None, found.path):
            found.path.unlink(missing_ok=True)

    @limited
    def remove_stale_files(self, holder: int) -> None:
        """Remove stale files of killed saves of this rank.

        What is being written, here or in another process, stays.
        """
        directory = self.holder_directory(holder)
        with file_errors(None, directory):
            for path in _entries(directory):
                if path.name.startswith(PARTIAL_PREFIX):
                    _remove_unlocked(path)

    @limited
    def name(self) -> str:
        """The same for all ranks that see this directory, and for no other.

        A directory is identified by its device and number, and by the boot of its machine; one
        that is not there, or cannot be looked at, by its path.
        """
        try:
            found = self.root.stat()
        except OSError:
            return f"{_boot_id()}:{self.root}"
        return f"{_boot_id()}:{found.st_dev}:{found.st_ino}"


class _Handle:
    """A file descriptor that is closed once nothing refers to it.

    A thread of a transfer that was given up may still be in a system call with it: the number must
    not become another file's meanwhile.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        """Close the file."""
        os.close(self.number)


class ShardWriter:
    """A shard being written beside its place, in a file that is locked until it appears.

    ``digests`` are those of the bytes that have been written. What cannot be made, written or
    removed is a StorageError.
    """

    def __init__(self, path: Path, shard: LocalShard) -> None:
        self.path = path
        self.shard = shard
        self.digests = BufferDigests(shard)
        self._has_appeared = False
        self._handle: _Handle | None
        with file_errors(None, path):
            make_directories(path.parent)
            self._partial, number = _begin_file(path.parent)
            self._handle = _Handle(number)

    def __str__(self) -> str:
        """The file."""
        return str(self.path)

    def write(self, byte_offset: int, content: Bytes) -> None:
        """Write the next bytes of the buffers, and have the disk begin with them."""
        handle = _require_open(self.path, self._handle)
        self.digests.take(byte_offset, content)
        done = 0
        with file_errors(None, self.path):
            while done < content.size:
                raise_if_cancelled()
                some = content[done : done + MAX_SLICE_NBYTES]
                done += os.pwrite(handle.number, some.data, byte_offset + done)
        begin_writeback(handle.number, byte_offset, content.size)

    @limited
    def finish(self, digests: Sequence[Digest]) -> None:
        """Write the footer, and let the shard appear; it is durable then."""
        handle = _require_open(self.path, self._handle)
        footer = np.frombuffer(encode_footer(self.shard, digests), np.uint8)
        self.write(self.shard.nbytes, footer)
        with file_errors(None, self.path):
            os.fsync(handle.number)
            raise_if_cancelled()
            self._partial.replace(self.path)  # locked until it has its name
            self._has_appeared = True
            try:
                raise_if_cancelled()
            except StorageError:
                self.path.unlink(missing_ok=True)
                raise
            self._handle = None
            del handle
            sync_path(self.path.parent)
            sync_path(self.path.parent.parent)

    @limited
    def abandon(self) -> None:
        """Remove what was written, the shard too if it has appeared."""
        self._handle = None
        written = self.path if self._has_appeared else self._partial
        with file_errors(None, written):
            written.unlink(missing_ok=True)


class ShardReader:
    """An open shard whose footer has been checked; a context manager that closes it.

    ``shard`` is what the file holds, ``digests`` are those of its buffers, as it states them, and
    ``nbytes`` is its size.

    Raises:
        IncompleteCheckpointError: there is no such file.
        CorruptCheckpointError: its footer is damaged, or its size is another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(None, path):
            self._handle: _Handle | None = _Handle(
                os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            )
            try:
                self._read_footer(self._handle.number)
            except CorruptCheckpointError as error:
                raise self._damaged(error.message) from error

    def __enter__(self) -> Self:
        """The reader itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file, once no thread reads it any more."""
        self._handle = None

    def read(self, byte_offset: int, target: Bytes) -> None:
        """Fill ``target`` from a position; a CorruptCheckpointError if the file ends before."""
        handle = _require_open(self.path, self._handle)
        with file_errors(None, self.path):
            done = pread_into(handle.number, byte_offset, target)
        if done < target.size:
            raise self._damaged(f"ends at byte {byte_offset + done}")

    def read_buffer(self, number: int, into: Bytes | None = None) -> Digest:
        """The digest of a buffer, read block by block: into memory of its size, or past it."""
        left, byte_offset = self.shard.buffers[number].nbytes, self._byte_offsets[number]
        digest, scratch = xxhash.xxh3_64(), np.empty(0, np.uint8)
        if into is None:
            scratch = np.empty(min(left, _READ_NBYTES), np.uint8)
        for start in range(0, left, _READ_NBYTES):
            block = (scratch if into is None else into[start:])[: min(_READ_NBYTES, left - start)]
            self.read(byte_offset + start, block)
            digest.update(block.data)
        return digest.intdigest()

    def _read_footer(self, handle: int) -> None:
        self.nbytes = os.fstat(handle).st_size
        end = os.pread(handle, END_NBYTES, max(0, self.nbytes - END_NBYTES))
        nbytes = footer_nbytes(end, self.nbytes)
        footer = os.pread(handle, nbytes, self.nbytes - nbytes)
        self.shard, self.digests = decode_footer(footer, self.nbytes)
        self._byte_offsets = self.shard.byte_offsets
        named = LocalShardId.parse(self.path.name.removesuffix(SUFFIX))
        if named is not None and named != self.shard.shard_id:
            raise CorruptCheckpointError(f"holds {self.shard.shard_id}")

    def _damaged(self, why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.path}: {why}", path=str(self.path))


def _require_open(path: Path, handle: _Handle | None) -> _Handle:
    if handle is None:
        raise StorageError(f"{path}: the file is closed", path=str(path))
    return handle


def _entries(directory: Path) -> list[Path]:
    """What is in a directory, sorted; nothing where there is none."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def _begin_file(directory: Path) -> tuple[Path, int]:
    """A new file under a name of its own, and its handle, which locks it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        path = directory / (PARTIAL_PREFIX + uuid.uuid4().hex)
        handle = os.open(path, flags, 0o666)
        try:
            try_lock(handle, waits=True)
            is_there = os.fstat(handle).st_nlink > 0
        except BaseException:  # interrupted in the wait for the lock, too
            os.close(handle)
            path.unlink(missing_ok=True)
            raise
        if is_there:
            return path, handle
        os.close(handle)  # taken for a stale file before it was locked


def _remove_unlocked(path: Path) -> None:
    """Remove a file unless it is being written."""
    with suppress(FileNotFoundError):  # another manager was first
        if not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
            return
        with lock_unless_written(path) as is_ours:  # until it is removed
            if is_ours:
                path.unlink()


@contextmanager
def lock_unless_written(path: Path) -> Iterator[bool]:
    """Lock a file for the block; False where a process that is alive has it locked.

    An OSError if it cannot be opened, such as because it is gone.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield try_lock(handle)
    finally:
        os.close(handle)


def _boot_id() -> str:
    """A text that two machines never share, nor a machine with itself before a restart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{os.uname().nodename}:{uuid.getnode()}"
