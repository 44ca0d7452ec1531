"""Files and directories: durable writes, reads, listings, syncs, locks."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.storage.host import begin_writeback
from dist_ckpt_strategies.storage.io_pool import raise_if_cancelled, storage_error

if TYPE_CHECKING:
    from dist_ckpt_strategies.storage.store import Bytes

MARKER_NAME = "metadata.json"
"""The last file of a checkpoint; a directory below that has one is a checkpoint of its own."""

COMMON_NAME = "common.pt"

LOCK_NAME = ".dist-ckpt-commit"
"""Locked by what replaces the content of a directory; it stays there, empty."""

_PAUSE_S = 0.05
_LOCK_WAIT_S = 60.0

REMOVED_PREFIX = ".removed-"
"""Directories on their way out; readers pass over them."""

PARTIAL_PREFIX = ".partial-"
"""Files not yet renamed into place; readers pass over them."""

MAX_JSON_NBYTES = 1 << 20
"""A metadata file has a few hundred bytes; of a longer one no more than this is read."""

READ_AT_ONCE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe would wait for its writer
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@contextmanager
def file_errors(
    key: str | None,
    path: Path | str,
    *,
    not_found: type[StorageError] = IncompleteCheckpointError,
) -> Iterator[None]:
    """Turn an OSError of the block into a StorageError that names key and file."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        raise storage_error(key, path, error, not_found=not_found) from error


@contextmanager
def opened_file(path: Path | str, flags: int) -> Iterator[int]:
    """A file or directory that is open for the block, made if the flags say so; an OSError."""
    handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


def require_directory(root: Path) -> None:
    """Raise CheckpointNotFoundError unless it is a directory, of a finished checkpoint or not."""
    with file_errors(None, root):
        is_there, is_dir = root.exists(), root.is_dir()
    if not is_dir:
        what = "is no directory" if is_there else "does not exist"
        raise CheckpointNotFoundError(f"checkpoint directory {root} {what}", path=str(root))


def read_file(path: Path | str, max_nbytes: int = -1, byte_offset: int = 0) -> bytes:
    """The content of a file, or some of its bytes; fewer where it ends before.

    Raises:
        OSError: it is no regular file, for one, such as a pipe, which could keep us waiting.
    """
    with opened_file(path, READ_AT_ONCE) as handle:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        # A read of a megabyte takes memory for one, whatever the file has.
        held = max(status.st_size - byte_offset, 0)
        wanted = held if max_nbytes < 0 else min(max_nbytes, held)
        content = os.pread(handle, wanted, byte_offset)
        while len(content) < wanted:  # one call gives 2 GiB at most
            more = os.pread(handle, wanted - len(content), byte_offset + len(content))
            if not more:
                break
            content += more
        return content


def make_directories(directory: Path) -> None:
    """Make a directory and what is missing above it, and flush each new name.

    Without a look at it: an NFS client remembers for a minute what was missing.
    """
    try:
        directory.mkdir()
    except FileNotFoundError:
        make_directories(directory.parent)
        directory.mkdir(exist_ok=True)
    except OSError as error:  # an NFS server may refuse before it finds that it is there
        if not (isinstance(error, FileExistsError) or directory.is_dir()):
            raise
        _require_target(directory)
        return
    sync_path(directory.parent)


def _require_target(path: Path) -> None:
    """Raise a NotADirectoryError if it is a symbolic link to something that does not exist."""
    if path.is_symlink() and not path.exists():
        why = f"is a symbolic link to {path.readlink()}, which does not exist: mount or make that"
        raise NotADirectoryError(errno.ENOTDIR, why, str(path))


def sync_path(path: Path | str) -> None:
    """Make the content of a file durable, or the names added to or removed from a directory."""
    with opened_file(path, os.O_RDONLY) as handle:
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(handle).st_mode):
                raise  # some file systems flush no directories, and need not


_NO_RENAME = {errno.ENOSYS, errno.EXDEV, errno.EPERM, errno.EINVAL, errno.EOPNOTSUPP}


def rename(source: Path | str, target: Path | str, key: str | None = None) -> None:
    """Rename; a FileNotFoundError if it is missing, a StorageError if that fails otherwise."""
    try:
        os.replace(source, target)  # noqa: PTH105 - 10,000 times
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno not in _NO_RENAME:
            raise storage_error(key, target, error) from error
        raise StorageError(
            f"{target}: the file system refuses to rename {source} to it ({error.strerror}), and a "
            "save becomes visible by renames; save to a file system that has them, not through "
            "this mount, or with format ('safetensors', 1) to an object store's URL",
            key=key,
            path=str(target),
        ) from error


def set_aside(root: Path, *names: str) -> None:
    """Have files of a directory count no more, durably; they stay, under names that tell it.

    Several processes may do it at once.
    """
    for name in names:
        with file_errors(None, root / name), suppress(FileNotFoundError):
            raise_if_cancelled()
            rename(root / name, root / f"{REMOVED_PREFIX}{name.removeprefix('.')}")
            sync_path(root)


@contextmanager
def new_file(path: str, *, is_flushed: bool = True) -> Iterator[int]:
    """A file that is not there yet, open for writing, flushed in the end; its directory is made.

    Called thousands of times in a save, which pathlib would make slower.
    """
    try:
        handle = os.open(path, _CREATE, 0o666)
    except FileNotFoundError:
        raise_if_cancelled()
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        except FileExistsError:
            for parent in Path(path).parents:
                _require_target(parent)
            raise
        handle = os.open(path, _CREATE, 0o666)
    try:
        yield handle
        if is_flushed:
            os.fsync(handle)
    finally:
        os.close(handle)


_UNKNOWN = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
"""Errors of file systems without locks; their files count as not locked."""


def try_lock(handle: int, *, waits: bool = False) -> bool:
    """Lock an open file for as long as it is open; False if another handle holds the lock.

    With ``waits`` until the lock is free. An OSError if the system refuses.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if waits else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
    return True


def write_vector(handle: int, buffers: Sequence[Bytes]) -> None:
    """Write every byte of some memory after what was written last."""
    left = list(buffers)
    while left:
        raise_if_cancelled()
        done = os.writev(handle, [piece.data for piece in left])
        left = _rest(left, done)


def _rest(buffers: Sequence[Bytes], done: int) -> list[Bytes]:
    """The buffers without their first ``done`` bytes; the first is not empty."""
    for number, buffer in enumerate(buffers):
        if done < buffer.size:
            return [buffer[done:], *buffers[number + 1 :]]
        done -= buffer.size
    return []


_STEP_NBYTES = 512 << 10
"""Read at a time: half of a processor's own cache."""


@dataclass(frozen=True)
class Directory:
    """The files below a directory of a file system; Bucket has the same methods.

    Names have ``/`` between their parts. Each method raises a StorageError that names the file.

    Attributes:
        root: the directory.
        read_nbytes: of one call at most: they are digested while they are in the cache.
    """

    root: Path
    read_nbytes = 4 << 20

    @property
    def num_readers(self) -> int:
        """Threads that are best used to read many files: one for each processor."""
        return len(os.sched_getaffinity(0))

    def __str__(self) -> str:
        """The directory as its user calls it."""
        return str(self.root)

    def path(self, name: str) -> str:
        """A file as its user calls it."""
        return f"{self.root}/{name}"

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        """The content of a file, from a byte on: to its end, or as many bytes as it has of these.

        Raises:
            IncompleteCheckpointError: it is missing.
        """
        path = self.path(name)
        with file_errors(None, path):
            return read_file(path, nbytes, byte_offset)

    def write_pieces(self, name: str, pieces: Iterable[Sequence[Bytes]]) -> None:
        """Make a new file of pieces, durable on return; each is valid until the next is taken.

        Its directory is made, and flushed too.
        """
        path = Path(self.path(name))
        with file_errors(None, path):
            make_directories(path.parent)
            raise_if_cancelled()
            with new_file(str(path)) as handle:
                for buffers in pieces:
                    write_vector(handle, buffers)
                    end = os.lseek(handle, 0, os.SEEK_CUR)  # of whole pages: others come again
                    begin_writeback(handle, 0, end - end % mmap.PAGESIZE)
            sync_path(path.parent)

    def read_into(self, name: str, byte_offset: int, targets: Sequence[Bytes]) -> None:
        """Fill memory from a byte of a file on, one target after the other.

        Raises:
            IncompleteCheckpointError: it is missing.
            CorruptCheckpointError: it ends before.
        """
        deque(self.read_steps(name, byte_offset, targets), maxlen=0)

    def read_steps(self, name: str, byte_offset: int, targets: Sequence[Bytes]) -> Iterator[int]:
        """The same; after each step how many targets are filled, while they are in the cache.

        A step ends before memory that the system cannot write to: the next one raises.
        """
        path, left = self.path(name), _rest(targets, 0)
        with file_errors(None, path), opened_file(path, READ_AT_ONCE) as handle:
            while left:
                sizes = accumulate(piece.size for piece in left)
                stop = 1 + sum(1 for _ in takewhile(lambda size: size < _STEP_NBYTES, sizes))
                step = [piece.data for piece in left[:stop]]
                num_read = os.preadv(handle, step, byte_offset)
                raise_if_cancelled()
                if num_read == 0:
                    end = byte_offset + sum(map(len, step))
                    text = f"{path} is damaged: it ends before byte {end}"
                    raise CorruptCheckpointError(text, path=path)
                byte_offset, left = byte_offset + num_read, _rest(left, num_read)
                yield len(targets) - len(left)

    def write(self, name: str, content: bytes, *, key: str | None = None) -> None:
        """Make a file, whole and durable, or replace it; ``key`` is named in errors."""
        path = Path(self.path(name))
        partial = path.with_name(PARTIAL_PREFIX + uuid.uuid4().hex)
        with file_errors(key, path):
            make_directories(path.parent)
            try:
                with partial.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                raise_if_cancelled()
                rename(partial, path, key)
            except BaseException:  # interrupted too: no other code knows its name
                partial.unlink(missing_ok=True)
                raise
            sync_path(path.parent)

    def require_space(self, nbytes: int, num_files: int) -> None:
        """Raise StorageError if the file system says that it has no room for new files."""
        with file_errors(None, self.root):
            make_directories(self.root)
            space = os.statvfs(self.root)
        blocks = space.f_bavail if os.geteuid() else space.f_bfree
        free = blocks * space.f_frsize
        if space.f_blocks and free < nbytes:
            raise StorageError(
                f"{self.root}: no space left for a save of {nbytes} bytes, {free} are free; "
                "nothing was written; free some, or save elsewhere",
                path=str(self.root),
            )
        if space.f_files and space.f_favail < num_files:
            raise StorageError(
                f"{self.root}: no inodes left for {num_files} files, {space.f_favail} are free; "
                "nothing was written; remove files, or save elsewhere",
                path=str(self.root),
            )

    def sync(self, name: str) -> None:
        """Make a file durable that another program has written."""
        with file_errors(None, self.path(name)):
            sync_path(self.path(name))

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return self.has_bytes(name, None)

    def has_bytes(self, name: str, nbytes: int | None) -> bool:
        """Whether there is a file of that size, or of any."""
        path = self.path(name)
        with file_errors(None, path), suppress(FileNotFoundError, NotADirectoryError):
            found = os.stat(path)  # noqa: PTH116 - 10,000 times
            return stat.S_ISREG(found.st_mode) and nbytes in {None, found.st_size}
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Within the block no other thread or process is in such a block for this directory.

        Raises:
            StorageError: another one has been for a minute.
        """
        deadline = time.monotonic() + _LOCK_WAIT_S
        path = Path(self.path(LOCK_NAME))
        with file_errors(None, path), opened_file(path, os.O_RDWR | os.O_CREAT) as handle:
            while not try_lock(handle):
                raise_if_cancelled()
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"{self.root}: another thread or process has been committing a save "
                        f"there for more than {_LOCK_WAIT_S:g} s; try again when it has ended",
                        path=str(path),
                    )
                time.sleep(_PAUSE_S)
            yield

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
                Path(path).unlink(missing_ok=True)  # on a full disk an empty file is left
                raise
        return True

    def names(self, start: str = "") -> Sequence[str]:
        """Names directly below the directory that start with ``start``."""
        with file_errors(None, self.root), suppress(FileNotFoundError):
            return [name for name in os.listdir(self.root) if name.startswith(start)]  # noqa: PTH208
        return []

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, and directories that are empty then; what is not there is passed over."""
        parents = set()
        for name in names:
            raise_if_cancelled()
            with file_errors(None, self.path(name)):
                Path(self.path(name)).unlink(missing_ok=True)
            parents.add(Path(self.path(name)).parent)
        for parent in parents - {self.root}:
            with suppress(OSError):  # not empty, or gone
                parent.rmdir()


def reason(error: OSError) -> str:
    """The operating system's message, without the path."""
    return error.strerror or type(error).__name__
