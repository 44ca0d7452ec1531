"""Saves to a directory: files are staged under the save's own name, then renamed into place.

A save writes to ``.partial-SAVE_ID`` below the checkpoint's directory and nowhere else. A thread of
an abandoned save that wakes up later can only write there. When everything is durable, ``commit``
puts the marker into the staging directory, which decides that the save will be visible, and then
renames: the old marker and the old files out, the new files in, the new marker last. A commit that
was killed on the way is carried to its end by ``complete_commit``; every step can be repeated. All
of it happens under the lock of a file in the staging directory: while a commit that was given up
still waits for the file system, no other save begins there.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointExistsError, StorageError
from dist_ckpt_strategies.formats.clearing import (
    move_out,
    names_of_checkpoint,
    require_nothing_in_the_way,
    require_room,
)
from dist_ckpt_strategies.formats.finished import (
    WITHDRAWN_NAME,
    has_interrupted_commit,
    has_withdrawn_marker,
    is_finished,
    staged_markers,
    withdraw_marker,
)
from dist_ckpt_strategies.storage.files import (
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    require_directory,
    storage_error,
    sync_path,
    try_lock,
    write_file,
)
from dist_ckpt_strategies.storage.io_pool import limited, run_with_limit
from dist_ckpt_strategies.storage.time_limit import raise_if_cancelled

logger = logging.getLogger(__name__)

_PAUSE_S = 0.02
_WAIT_S = 30.0
"""How long a network file system may take to show a new file, or to release a lock."""

_LOCK_NAME = ".commit-lock"
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}


def staging_directory(root: Path, save_id: str) -> Path:
    """Where a save writes until its commit."""
    return root / f"{PARTIAL_PREFIX}{save_id}"


@limited
def invalidate(root: Path) -> None:
    """Make a directory count as incomplete, durably, before the caller changes anything in it.

    That it has held a checkpoint, or was about to, is still known afterwards.

    Raises:
        StorageError: another process is committing a save there.
    """
    if not root.exists():
        return
    with file_errors(None, root):
        if has_interrupted_commit(root):
            (root / WITHDRAWN_NAME).touch()
    remove_stale(root, completes=False)
    raise_if_cancelled()
    withdraw_marker(root)


@limited
def begin_staging(
    root: Path, save_id: str, keys: Collection[str] | None, *, overwrite: bool
) -> None:
    """Make the staging directory of a save; on its first rank.

    What earlier saves left without finishing is removed.

    Args:
        root: the checkpoint's directory, which exists.
        save_id: of the save.
        keys: of all its arrays and objects; None if they are not known.
        overwrite: whether arrays and objects without a marker may be replaced, whatever their keys.

    Raises:
        CheckpointExistsError: there are arrays or objects of other keys and no marker; or a key
            leads into another checkpoint, or through a link.
        StorageError: another process is committing a save there.
    """
    require_directory(root)
    if keys is not None:
        if not (overwrite or is_finished(root)):
            require_room(root, keys)
        require_nothing_in_the_way(root, keys)
    remove_stale(root)
    staging = staging_directory(root, save_id)
    with file_errors(None, root):
        staging.mkdir()
        (staging / _LOCK_NAME).touch()


def wait_until_seen(root: str, is_seen: Callable[[], bool], owner: str, timeout_s: float) -> None:
    """Wait until this rank sees what another one has written.

    Args:
        root: where.
        is_seen: looks.
        owner: the rank that wrote it.
        timeout_s: of the save.

    Raises:
        StorageError: it does not appear; the place is not the same one.
    """
    deadline = time.monotonic() + min(timeout_s / 2, _WAIT_S)
    while not is_seen():
        if time.monotonic() > deadline:
            raise StorageError(
                f"{root}: what {owner} has written there is not seen here; all ranks have to save "
                "to one directory, on a file system that they share, and no other job at the same "
                "time",
                path=root,
            )
        time.sleep(_PAUSE_S)


@limited
def is_staged(root: Path, save_id: str) -> bool:
    """Whether the staging directory of a save is there: no other save has begun since."""
    return staging_directory(root, save_id).is_dir()


def superseded(root: Path | str) -> StorageError:
    """The error for a save whose place belongs to another one by now."""
    return StorageError(
        f"{root}: another save to it has begun before this one was finished, or what this one had "
        "written was removed; nothing of it was made visible",
        path=str(root),
    )


@limited
def commit(root: Path, save_id: str, marker: bytes | None, *, replaces: bool) -> None:
    """Move the files of a save, all durable, into place; on its first rank.

    Args:
        root: the checkpoint's directory.
        save_id: of the save.
        marker: content of ``metadata.json``, which makes the checkpoint visible; None if the caller
            writes it. An earlier marker has to be withdrawn before, then.
        replaces: whether arrays and objects that are there belong to a checkpoint, finished or not,
            that this one replaces.

    Raises:
        StorageError: the staging directory is gone, or a file cannot be moved. An earlier
            checkpoint is still there, or ``complete_commit`` can finish this one.
    """
    staging = staging_directory(root, save_id)
    with file_errors(None, root), _locked(staging) as is_there:
        if not is_there:
            raise superseded(root)
        going = names_of_checkpoint(root, with_torch_dist=True) if replaces else ()
        _require_no_obstacle(staging, root, {f"{root}/{name}" for name in going})
        sync_path(staging)
        if marker is not None:
            write_file(staging / MARKER_NAME, marker)
            sync_path(root)
        raise_if_cancelled()
        if replaces:
            _trash_of(staging).mkdir()  # a full disk refuses that while the old marker is there
            _withdraw(root)
        _finish(root, staging)


def clean_up_after_commit(root: Path) -> None:
    """Remove what a commit has replaced, and what earlier saves left; an error is logged."""
    try:
        run_with_limit(partial(remove_stale, root), root)
    except StorageError as error:
        logger.warning("%s: what the save replaced is still there: %s", root, error)


@limited
def complete_commit(root: Path) -> bool:
    """Carry a commit that was interrupted to its end; returns whether there was one.

    Rank-local: one rank calls it, before the others look at the marker. A commit that is under way
    is waited for, and nothing but what belongs to the completed one is removed.

    Raises:
        StorageError: another process is still at it, or a file cannot be moved.
    """
    with file_errors(None, root):
        if (root / MARKER_NAME).exists():
            return False
        return any(_take_away(root, marker.parent) for marker in staged_markers(root))


def remove_stale(root: Path, *, completes: bool = True) -> None:
    """Remove staging directories, and what was moved out; on one rank.

    A commit that was interrupted is completed first. What cannot be removed stays, with a warning:
    readers pass over it.

    Args:
        root: the checkpoint's directory.
        completes: False: an interrupted commit is given up.

    Raises:
        StorageError: another process is committing a save there.
    """
    with file_errors(None, root):
        with os.scandir(root) as scan:
            names = sorted(entry.name for entry in scan if _is_stale(entry.name))
        for name in names:  # staging directories, with their locks, come first
            raise_if_cancelled()
            if name.startswith(PARTIAL_PREFIX):
                _take_away(root, root / name, completes=completes)
            else:
                _remove(root / name)


def _take_away(root: Path, staging: Path, *, completes: bool = True) -> bool:
    """Remove a staging directory with what its commit moved out; returns whether it was completed.

    Under another name no thread of that save finds it.
    """
    doomed = root / f"{REMOVED_PREFIX}{uuid.uuid4().hex}"
    with _locked(staging) as is_there:
        if not is_there:
            return False
        is_decided = (staging / MARKER_NAME).exists() and not (root / MARKER_NAME).exists()
        if is_decided and completes:
            _finish(root, staging)
            logger.warning("%s: completed the commit of a save that was interrupted", root)
        with suppress(FileNotFoundError):  # on a file system without locks
            staging.replace(doomed)
    _remove(doomed)
    _remove(_trash_of(staging))
    return is_decided and completes


def _is_stale(name: str) -> bool:
    return name.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) and name != WITHDRAWN_NAME


def _trash_of(staging: Path) -> Path:
    """Where the commit of a save moves what it replaces."""
    return staging.with_name(REMOVED_PREFIX + staging.name.removeprefix(PARTIAL_PREFIX))


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return  # another process removes it too
    except OSError as error:
        logger.warning("%s cannot be removed (%s); the next save will try again", path, error)


@contextmanager
def _locked(staging: Path) -> Iterator[bool]:
    """Hold the lock of a commit; yields whether the staging directory is still there.

    Raises:
        StorageError: another thread or process holds it.
    """
    try:
        handle = os.open(staging / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield os.path.lexists(staging)  # a save was killed before it made the lock
        return
    try:
        deadline = time.monotonic() + _WAIT_S
        while not try_lock(handle):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{staging.parent}: a save is being committed there by another thread or "
                    f"process, for more than {_WAIT_S:g} s; try again when it has ended",
                    path=str(staging),
                )
            time.sleep(_PAUSE_S)
        yield staging.exists()
    finally:
        os.close(handle)


def _withdraw(root: Path) -> None:
    """Withdraw the marker; without one, note that what is there is to be replaced all the same."""
    if (root / MARKER_NAME).exists():
        withdraw_marker(root)
        return
    with os.scandir(root) as scan:
        has_others = any(not _is_stale(entry.name) for entry in scan)
    if has_others:
        (root / WITHDRAWN_NAME).touch()


def _finish(root: Path, staging: Path) -> None:
    """The renames of a commit; where some are made already, the others."""
    if has_withdrawn_marker(root):
        _move_old_out(root, _trash_of(staging))
    _move_in(staging, root)
    raise_if_cancelled()
    if (staging / MARKER_NAME).exists():
        (staging / MARKER_NAME).replace(root / MARKER_NAME)
        sync_path(root)


def _move_old_out(root: Path, trash: Path) -> None:
    """Move the files of an earlier checkpoint aside, its withdrawn marker last."""
    withdrawn = root / WITHDRAWN_NAME
    trash.mkdir(exist_ok=True)
    move_out(root, trash, with_torch_dist=withdrawn.stat().st_size > 0)
    sync_path(root)
    withdrawn.replace(trash / MARKER_NAME)


def _move_in(staging: Path, root: Path) -> None:
    """Move everything but the marker, and make the new names durable."""
    touched: list[Path | str] = [root]
    _move_below(str(staging), str(root), touched, {MARKER_NAME, _LOCK_NAME})
    for directory in touched:
        sync_path(directory)


def _move_below(
    source: str, target: str, touched: list[Path | str], passed: Collection[str]
) -> None:
    with os.scandir(source) as scan:
        entries = sorted((entry for entry in scan if entry.name not in passed), key=_name)
    for entry in entries:
        raise_if_cancelled()
        path = f"{target}/{entry.name}"
        try:
            os.rename(entry.path, path)  # noqa: PTH104 - 10,000 times
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise storage_error(None, path, error) from error
            touched.append(path)
            _move_below(entry.path, path, touched, ())


def _require_no_obstacle(source: Path, target: Path, going: Collection[str]) -> None:
    """Raise where something is in the way of a staged file, and does not go with an old checkpoint.

    Raises:
        CheckpointExistsError: there is a file where a directory is to go, or the other way round.
    """
    with os.scandir(source) as scan:
        entries = sorted(scan, key=_name)
    for entry in entries:
        path = f"{target}/{entry.name}"
        if path in going or not os.path.lexists(path):
            continue
        is_here, is_there = entry.is_dir(follow_symlinks=False), os.path.isdir(path)  # noqa: PTH112
        if is_here != is_there:
            raise CheckpointExistsError(
                f"{path} is in the way of a file or directory of this save; remove it, or save "
                "elsewhere",
                path=path,
            )
        if is_here:
            _require_no_obstacle(Path(entry.path), Path(path), going)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name
