"""The shards on one node's disk: found, described, written so that they appear whole, removed.

A shard is a pack. A rank keeps its own and copies of others' in
``<root>/<its global rank>/<shard id>.safetensors``.
"""

from __future__ import annotations

import os
import re
import uuid
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CorruptCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.course import Resumed
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.pack_header import OpenedPack, open_pack
from dist_ckpt_strategies.formats.pack_write import SUFFIX
from dist_ckpt_strategies.local.plan import LocalShardId, SaveId
from dist_ckpt_strategies.storage.files import (
    PARTIAL_PREFIX,
    READ_AT_ONCE,
    Directory,
    file_errors,
    make_directories,
    opened_file,
    rename,
    sync_path,
    try_lock,
)
from dist_ckpt_strategies.storage.host import begin_writeback, directory_name
from dist_ckpt_strategies.storage.io_pool import MAX_SLICE_NBYTES, raise_if_cancelled
from dist_ckpt_strategies.storage.store import Bytes

STATE = ObjectId("state", (0,), (1,))
"""The object of a shard's pack that has all of the state but its tensors."""

SESSION_NOTE, KIND_NOTE = "session", "kind"
"""Fields of a shard's ``__metadata__``; its ``packs`` is the number of ranks of the save."""

_MAX_WORLD_SIZE = 1 << 24

_FINISHED_NAME = "finished"
"""With the training's id: the file that says that a save of all ranks came to its end once."""

TRAINING_NAME = ".dist-ckpt-training"
"""The file of a checkpoint root that has the id of the training."""

RANK = re.compile(r"0|[1-9]\d*", re.ASCII)
"""The name of a rank's directory."""


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The description in a shard's pack.

    Attributes:
        shard_id: iteration, rank and save.
        world_size: number of ranks of the save.
        session_id: of the manager.
        kind: of the state's class.
        num_tensors: of the state.
    """

    shard_id: LocalShardId
    world_size: int
    session_id: str
    kind: str
    num_tensors: int


def open_shard(place: Any, name: str) -> tuple[OpenedPack, ShardInfo]:
    """The pack of a shard, its header compared with its digest, and what that says.

    ``place`` is a Directory, or has its ``read`` and ``path``. Errors are those of ``open_pack``,
    and a CorruptCheckpointError if it is no local shard, or has another's name.
    """
    path = place.path(name)
    pack = open_pack(place, name)
    session, kind = (pack.metadata.get(note) for note in (SESSION_NOTE, KIND_NOTE))
    shard_id, named = LocalShardId.of(pack.save_id, pack.record.rank), parsed_name(name)
    if (
        shard_id is None
        or named not in {None, shard_id}
        or session is None
        or kind is None
        or not 0 < pack.num_packs <= _MAX_WORLD_SIZE
        or STATE not in dict(pack.objects)
    ):
        raise CorruptCheckpointError(
            f"{path} is damaged: expected the local shard {named}, found {shard_id} of "
            f"{pack.num_packs} ranks",
            path=path,
        )
    return pack, ShardInfo(shard_id, pack.num_packs, session, kind, len(pack.table))


def parsed_name(name: str) -> LocalShardId | None:
    """The shard whose file has this name; None if it is of none."""
    file = name.rpartition("/")[2]
    return LocalShardId.parse(file.removesuffix(SUFFIX)) if file.endswith(SUFFIX) else None


class ShardFile(NamedTuple):
    """A file that is named like a shard, in the directory of the global rank that keeps it.

    ``world_size`` and ``nbytes`` are what its header says; 0 as long as that is not read.
    """

    holder: int
    shard_id: LocalShardId
    world_size: int = 0
    nbytes: int = 0

    @property
    def name(self) -> str:
        """The file below the directory of the node."""
        return f"{self.holder}/{self.shard_id}{SUFFIX}"


class Lock:
    """Locks an open directory for this process, for as long as something refers to the lock."""

    def __init__(self, handle: int) -> None:
        self.close = weakref.finalize(self, os.close, handle)
        self.has_it = try_lock(handle)


_LOCKS: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()
"""Of this process, whose managers of one directory share a lock; a forked one has none."""


def _forget_locks() -> None:
    for lock in _LOCKS.values():
        lock.close()
    _LOCKS.clear()


os.register_at_fork(after_in_child=_forget_locks)


class ShardDirectory:
    """All shards below one directory of a node, whichever rank put them there.

    Its methods may block on storage: the caller runs them within a deadline. The directory is made
    when something is written. What cannot be listed, made, written or removed is a StorageError.
    ``training_root`` has the global checkpoints of the training, if it is known.
    """

    def __init__(self, root: Path, training_root: Location | None = None) -> None:
        self.root = root
        self.place = Directory(root)
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

    def find(self, holders: Iterable[int] | None = None) -> list[ShardFile]:
        """Files named like shards, sorted by holder and name; by default those of all holders."""
        return [
            ShardFile(holder, shard_id)
            for holder in (self.holders() if holders is None else holders)
            for name in sorted(Directory(self.holder_directory(holder)).names())
            if (shard_id := parsed_name(name)) is not None
        ]

    def holders(self) -> list[int]:
        """Global ranks that have a directory here."""
        names = filter(RANK.fullmatch, self.place.names())
        with file_errors(None, self.root):
            return sorted(int(name) for name in names if (self.root / name).is_dir())

    def holder_directory(self, global_rank: int) -> Path:
        """The directory of a rank's shards."""
        return self.root / str(global_rank)

    def lock(self, holder: int) -> Lock:
        """The lock of a rank's directory, which it has to keep while it saves there.

        Raises:
            CheckpointChangedError: another process has it.
        """
        path = self.holder_directory(holder)
        with file_errors(None, path):
            make_directories(path)
            status = path.stat()
            inode = status.st_dev, status.st_ino
            found = _LOCKS.get(inode)
            if found is None:
                found = _LOCKS[inode] = Lock(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            if found.has_it:
                return found
            found.close()
            del _LOCKS[inode]
        raise CheckpointChangedError(
            f"{path}: another job saves local checkpoints here; wait for its end, or give this one "
            "a session_id or a directory of its own",
            path=str(path),
        )

    def remove_stale_files(self, holder: int) -> None:
        """Remove stale files of killed saves of this rank.

        What is being written, here or in another process, stays.
        """
        directory = self.holder_directory(holder)
        with file_errors(None, directory):
            for name in Directory(directory).names(PARTIAL_PREFIX):
                raise_if_cancelled()
                path = directory / name
                try:
                    with lock_unless_written(path) as is_ours:  # until it is removed
                        if is_ours:
                            path.unlink()
                except FileNotFoundError:  # another manager was first, or it is a link to nothing
                    path.unlink(missing_ok=True)

    def note_finished(self, holder: int, training_id: str) -> None:
        """Note that all ranks have ended a save: shards that are missing later were lost."""
        path = self.holder_directory(holder) / f"{_FINISHED_NAME}{training_id}"
        with file_errors(None, path):
            path.touch()

    def has_finished(self, holders: Iterable[int], training_id: str) -> bool:
        """Whether one of these directories says that a save of the training came to its end."""
        name = f"{_FINISHED_NAME}{training_id}"
        with file_errors(None, self.root):
            return any((self.holder_directory(one) / name).exists() for one in holders)

    def name(self) -> str:
        """The same for all ranks that see this directory, and for no other."""
        try:
            name = directory_name(self.root)
        except OSError:  # it is not there, or cannot be looked at
            name = f"{os.uname().nodename} {uuid.getnode()} {self.root}"
        return xxhash.xxh3_64_hexdigest(name.encode())


class ShardWriter:
    """A shard being written to a file that is locked until it has its name.

    Its methods may block on storage: the caller runs them within a deadline. What cannot be made,
    written or removed is a StorageError. The file is closed once nothing refers to the writer: a
    thread of a transfer that was given up may still be using the descriptor, which must not be
    reused for another file.
    """

    def __init__(self, directory: Path) -> None:
        with file_errors(None, directory):
            make_directories(directory)
            self.path, self._handle = _begin_file(directory)
        weakref.finalize(self, os.close, self._handle).atexit = False  # a thread may still write

    def __str__(self) -> str:
        """The file."""
        return str(self.path)

    def write(self, byte_offset: int, content: Bytes) -> None:
        """Write bytes of the file, and have the disk begin with them."""
        done = 0
        with file_errors(None, self.path):
            while done < content.size:
                raise_if_cancelled()
                some = content[done : done + MAX_SLICE_NBYTES]
                done += os.pwrite(self._handle, some.data, byte_offset + done)
        begin_writeback(self._handle, byte_offset, content.size)

    def flush(self) -> None:
        """Make the content durable."""
        with file_errors(None, self.path):
            os.fsync(self._handle)

    def appear(self, shard_id: LocalShardId) -> None:
        """Give the file the name of a shard, durably."""
        path = self.path.with_name(f"{shard_id}{SUFFIX}")
        with file_errors(None, path):
            raise_if_cancelled()
            rename(self.path, path)  # locked until it has its name
            self.path = path
            try:
                raise_if_cancelled()
            except StorageError:
                path.unlink(missing_ok=True)
                raise
            sync_path(path.parent)
            sync_path(path.parent.parent)

    def abandon(self) -> None:
        """Remove what was written, under whichever name it is there."""
        with file_errors(None, self.path):
            self.path.unlink(missing_ok=True)
            os.ftruncate(self._handle, 0)  # an error that is kept may refer to the writer for long


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


@contextmanager
def lock_unless_written(path: Path) -> Iterator[bool]:
    """Lock a file for the block; False where a process that is alive has it locked.

    An OSError if it cannot be opened, such as because it is gone.
    """
    with opened_file(path, READ_AT_ONCE) as handle:
        yield try_lock(handle)
