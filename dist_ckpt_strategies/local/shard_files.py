"""The shards on one node's disk: found, written so that they appear whole, read, removed.

A rank keeps its own shard and copies of others' in ``<root>/<its global rank>/<shard id>.part``.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from dist_ckpt_strategies.errors import CorruptCheckpointError, StorageError
from dist_ckpt_strategies.formats.course import Resumed
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.local.shard_format import (
    END_NBYTES,
    BufferDigests,
    Digest,
    LocalShard,
    LocalShardId,
    SaveId,
    decode_footer,
    encode_footer,
    footer_nbytes,
)
from dist_ckpt_strategies.storage.file_systems import Bytes, begin_writeback, directory_name
from dist_ckpt_strategies.storage.files import (
    PARTIAL_PREFIX,
    Directory,
    file_errors,
    make_directories,
    pread_into,
    rename,
    sync_path,
    try_lock,
)
from dist_ckpt_strategies.storage.io_pool import MAX_SLICE_NBYTES, limited, raise_if_cancelled

SUFFIX = ".part"

_READ_NBYTES = 2 << 20
"""Read at once: little enough to be in the processor's cache still when its digest is taken."""

_FINISHED_NAME = "finished"
"""With the training's id: the file that says that a save of all ranks came to its end once."""

TRAINING_NAME = ".dist-ckpt-training"
"""The file of a checkpoint root that has the id of the training."""

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
    is a StorageError. ``training_root`` has the global checkpoints of the training, if it is known.
    """

    def __init__(self, root: Path, training_root: Location | None = None) -> None:
        self.root = root
        self.training_root = training_root
        self._training_id = ""
        self.resumed: Resumed | None = None

    def has_left(self, save: SaveId) -> bool:
        """Whether the training has gone back from this save, to where it has ``resumed`` since."""
        began = self.resumed
        return began is not None and save.iteration > began[0] and save.stamp < began[1]

    def __str__(self) -> str:
        """The directory."""
        return str(self.root)

    def training_id(self) -> str:
        """The id that the training's root has, made if there is none, read once; empty: no root."""
        root = self.training_root
        if root is not None and not self._training_id:
            place = Directory(root) if isinstance(root, Path) else root
            number = inode = os.urandom(8).hex()
            if isinstance(root, Path):
                with file_errors(None, root):
                    make_directories(root)
                    inode = str(root.stat().st_ino)
            made = text = f"{number} {inode} {root}"
            if not place.create(TRAINING_NAME, os.fsencode(made)):
                text = os.fsdecode(place.read(TRAINING_NAME))
                if not {inode, str(root)}.intersection(text.split(" ", 2)[1:]):  # cut off or copied
                    place.write(TRAINING_NAME, os.fsencode(text := made))
            self._training_id = text[:16]
        return self._training_id

    def find(self, holders: Iterable[int] | None = None) -> list[FoundShard]:
        """Files named like shards, sorted by holder and path; by default those of all holders."""
        found = []
        for holder in self.holders() if holders is None else holders:
            directory = self.holder_directory(holder)
            for name in sorted(Directory(directory).names()):
                shard_id = LocalShardId.parse(name.removesuffix(SUFFIX))
                if shard_id is not None and name.endswith(SUFFIX):
                    found.append(FoundShard(shard_id, directory / name))
        return found

    @limited
    def holders(self) -> list[int]:
        """Global ranks that have a directory here."""
        names = filter(RANK.fullmatch, Directory(self.root).names())
        with file_errors(None, self.root):
            return sorted(int(name) for name in names if (self.root / name).is_dir())

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
    def remove_stale_files(self, holder: int) -> None:
        """Remove stale files of killed saves of this rank.

        What is being written, here or in another process, stays.
        """
        directory = self.holder_directory(holder)
        with file_errors(None, directory):
            for name in Directory(directory).names(PARTIAL_PREFIX):
                _remove_unlocked(directory / name)

    @limited
    def note_finished(self, holder: int, training_id: str) -> None:
        """Note that all ranks have ended a save: shards that are missing later were lost."""
        path = self.holder_directory(holder) / f"{_FINISHED_NAME}{training_id}"
        with file_errors(None, path):
            path.touch()

    @limited
    def has_finished(self, holders: Iterable[int], training_id: str) -> bool:
        """Whether one of these directories says that a save of the training came to its end."""
        name = f"{_FINISHED_NAME}{training_id}"
        with file_errors(None, self.root):
            return any((self.holder_directory(one) / name).exists() for one in holders)

    @limited
    def name(self) -> str:
        """The same for all ranks that see this directory, and for no other."""
        try:
            name = directory_name(self.root)
        except OSError:  # it is not there, or cannot be looked at
            name = f"{os.uname().nodename} {uuid.getnode()} {self.root}"
        return xxhash.xxh3_64_hexdigest(name.encode())


def _close_with(owner: object, handle: int) -> None:
    """Close a file once nothing refers to ``owner``; not at exit: a thread may still write."""
    weakref.finalize(owner, os.close, handle).atexit = False


class ShardWriter:
    """A shard being written beside its place, in a file that is locked until it appears.

    ``digests`` are those of the bytes that have been written. What cannot be made, written or
    removed is a StorageError. The file is closed once nothing refers to the writer, as a reader is.
    """

    def __init__(self, path: Path, shard: LocalShard) -> None:
        self.path = path
        self.shard = shard
        self.digests = BufferDigests(shard)
        self._has_appeared = False
        with file_errors(None, path):
            make_directories(path.parent)
            self._partial, self._handle = _begin_file(path.parent)
        _close_with(self, self._handle)

    def __str__(self) -> str:
        """The file."""
        return str(self.path)

    def write(self, byte_offset: int, content: Bytes) -> None:
        """Write the next bytes of the buffers, and have the disk begin with them."""
        self.digests.take(byte_offset, content)
        done = 0
        with file_errors(None, self.path):
            while done < content.size:
                raise_if_cancelled()
                some = content[done : done + MAX_SLICE_NBYTES]
                done += os.pwrite(self._handle, some.data, byte_offset + done)
        begin_writeback(self._handle, byte_offset, content.size)

    @limited
    def finish(self, digests: Sequence[Digest]) -> None:
        """Write the footer, and let the shard appear; it is durable then."""
        footer = np.frombuffer(encode_footer(self.shard, digests), np.uint8)
        self.write(self.shard.nbytes, footer)
        with file_errors(None, self.path):
            os.fsync(self._handle)
            raise_if_cancelled()
            rename(self._partial, self.path)  # locked until it has its name
            self._has_appeared = True
            try:
                raise_if_cancelled()
            except StorageError:
                self.path.unlink(missing_ok=True)
                raise
            sync_path(self.path.parent)
            sync_path(self.path.parent.parent)

    @limited
    def abandon(self) -> None:
        """Remove what was written, the shard too if it has appeared."""
        written = self.path if self._has_appeared else self._partial
        with file_errors(None, written):
            written.unlink(missing_ok=True)
            os.ftruncate(self._handle, 0)  # an error that is kept may refer to the writer for long


class ShardReader:
    """An open shard whose footer has been checked.

    ``shard`` is what the file holds, ``digests`` are those of its buffers, as it states them, and
    ``nbytes`` is its size. The file is closed once nothing refers to the reader: a thread of a
    transfer that was given up may still be in a system call with its number, which must not become
    another file's meanwhile.

    Raises an IncompleteCheckpointError if there is no such file, and a CorruptCheckpointError if
    its footer is damaged, or its size is another.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with file_errors(None, path):
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            _close_with(self, self._handle)
            try:
                self._read_footer()
            except CorruptCheckpointError as error:
                raise self._damaged(error.message) from error

    def read(self, byte_offset: int, target: Bytes) -> None:
        """Fill ``target`` from a position; a CorruptCheckpointError if the file ends before."""
        with file_errors(None, self.path):
            done = pread_into(self._handle, byte_offset, target)
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

    def _read_footer(self) -> None:
        handle = self._handle
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
