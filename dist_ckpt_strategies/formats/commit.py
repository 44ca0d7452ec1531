"""When a directory counts as a checkpoint, and how a save to it becomes one.

``metadata.json``, the marker, is the last file of a checkpoint, and whole. A save writes to
``.partial-SAVE_ID`` below the checkpoint's directory and nowhere else. A thread of an abandoned
save that wakes up later can only write there. When everything is durable, ``DirectoryPlace.commit``
puts the marker into the staging directory, which decides that the save will be visible, and then
renames: the old marker and the old files out, the new files in, the new marker last. A commit that
was killed on the way is carried to its end by ``complete_commit``; every step can be repeated. All
of it happens under the lock of a file in the staging directory: while a commit that was given up
still waits for the file system, no other save begins there.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Self

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.formats.manifest import FOLDER_NAMES, SAVE_NAME
from dist_ckpt_strategies.formats.object_files import object_ids, object_path
from dist_ckpt_strategies.formats.zarr2 import array_keys, lock_directories
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    is_elsewhere,
    make_directories,
    read_file,
    require_directory,
    sync_path,
    try_lock,
    write_file,
)
from dist_ckpt_strategies.storage.io_pool import (
    limited,
    raise_if_cancelled,
    run_with_limit,
    storage_error,
)


@dataclass(frozen=True, slots=True)
class CheckpointMarker:
    """The four fields of Megatron-Core's ``CheckpointingConfig``; it takes no others."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1

    @property
    def sharded_format(self) -> tuple[str, int]:
        """Backend and version of the sharded state."""
        return self.sharded_backend, self.sharded_backend_version

    @property
    def common_format(self) -> tuple[str, int]:
        """Backend and version of the common state."""
        return self.common_backend, self.common_backend_version

    def to_json(self) -> bytes:
        """The file's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, content: bytes) -> Self:
        """The marker that the file holds.

        Raises:
            ValueError: not JSON, or not exactly fields of a marker with values of their types.
        """
        try:
            found = json.loads(content)
        except RecursionError as error:
            raise ValueError("nested too deeply for a marker") from error
        known = {field.name: int if "version" in field.name else str for field in fields(cls)}
        if not isinstance(found, dict) or "sharded_backend" not in found:
            raise ValueError("expected an object with the field sharded_backend")
        for name, value in found.items():
            if type(value) is not known.get(name):
                raise ValueError(f"unexpected field {name} = {value!r}")
        return cls(**found)

    @classmethod
    def of_checkpoint(cls, content: bytes, root: object, path: str) -> Self:
        """The marker of the checkpoint at ``root``, from the content of the file at ``path``.

        Raises:
            IncompleteCheckpointError: it does not parse.
        """
        try:
            return cls.from_json(content)
        except (ValueError, TypeError) as error:
            raise IncompleteCheckpointError(
                f"{root} is incomplete: {path} is not whole ({error})", path=path
            ) from error


if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.storage.bucket import Bucket

logger = logging.getLogger(__name__)

OLD_MARKER_NAME = REMOVED_PREFIX + MARKER_NAME
"""The marker of a checkpoint that is being replaced, until its arrays have been removed."""

HOLDS_SAFETENSORS = (
    "it holds files of safetensors, a model's arrays and no checkpoint; the library safetensors "
    "reads them"
)
"""What a directory of such files is, and what reads it; follows what was expected there."""

_PAUSE_S = 0.02
_WAIT_S = 30.0
"""How long a network file system may take to show a new file, or to release a lock."""

_LOCK_NAME = ".commit-lock"
_NOT_EMPTY = {errno.ENOTEMPTY, errno.EEXIST}
_MAX_NAMED = 5

_OF_TORCH_DIST = re.compile(r"__\d+_\d+\.distcp|\.metadata")
"""What torch.distributed.checkpoint names its files."""


@limited
def read_marker(root: Path) -> CheckpointMarker:
    """The marker of a finished checkpoint.

    Raises:
        CheckpointNotFoundError: the directory does not exist.
        IncompleteCheckpointError: it has no marker, or one that does not parse.
    """
    require_directory(root)
    path = root / MARKER_NAME
    with file_errors(None, path):
        content = read_file(path, MAX_JSON_NBYTES) if path.exists() else None
        if content is None:
            raise IncompleteCheckpointError(
                f"{root} is not a distributed checkpoint, or is incomplete: {path}, the "
                f"last file of a save, is missing; {_what_is_there(root)}",
                path=str(path),
            )
    return CheckpointMarker.of_checkpoint(content, root, str(path))


def _what_is_there(root: Path) -> str:
    """What a directory without a marker holds, in words."""
    if _staged_markers(root):
        return (
            "a save was interrupted while it moved its files into place, and nothing is lost: "
            "`dist-ckpt verify`, dist_ckpt_strategies.load and load_latest complete it"
        )
    if (root / SAVE_NAME).exists() or any(root.glob(f"{PARTIAL_PREFIX}*/")):
        return "a save began and has not come to its end"
    if are_safetensors(path.name for path in root.iterdir()):
        return HOLDS_SAFETENSORS
    return f"{COMMON_NAME} {'is there' if (root / COMMON_NAME).exists() else 'is missing too'}"


def are_safetensors(names: Iterable[str]) -> bool:
    """Whether there are files of safetensors among those of a directory without a marker."""
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


@limited
def make_directory(root: Path) -> None:
    """Make the directory, durably; one that is there stays as it is."""
    with file_errors(None, root):
        make_directories(root)


@limited
def set_marker_aside(root: Path) -> None:
    """Make the directory count as incomplete, durably, before anything of it changes.

    That it has held a checkpoint is still known afterwards. Several ranks may do it at once.
    """
    path = root / MARKER_NAME
    with file_errors(None, path), suppress(FileNotFoundError):
        raise_if_cancelled()
        path.replace(root / OLD_MARKER_NAME)
        sync_path(root)


@limited
def invalidate(root: Path) -> None:
    """Make a directory count as incomplete, durably, before the caller changes anything in it.

    That it has held a checkpoint, or was about to, is still known afterwards. A commit that was
    interrupted is given up: completed, it would replace the common state that Megatron-Core's own
    save has written by now.

    Raises:
        StorageError: another process is committing a save there.
    """
    if root.exists():
        if _staged_markers(root):
            (root / OLD_MARKER_NAME).touch()
        _remove_stale(root, completes=False)
        set_marker_aside(root)


@limited
def remove_contents(root: Path) -> None:
    """Make the directory count as incomplete, durably; then remove its checkpoint's files."""
    invalidate(root)
    trash = root / f"{REMOVED_PREFIX}{uuid.uuid4().hex}"
    with file_errors(None, root):
        (root / COMMON_NAME).unlink(missing_ok=True)
        _move_old_out(root, trash, with_torch_dist=False)
        shutil.rmtree(trash)


@limited
def complete_commit(root: Path | Bucket) -> bool:
    """Carry a commit that was interrupted to its end; returns whether there was one.

    In a bucket nothing is moved, and nothing is to be done.
    Rank-local: one rank calls it, before the others look at the marker. A commit that is under way
    is waited for, and nothing but what belongs to the completed one is removed.

    Raises:
        StorageError: another process is still at it, or a file cannot be moved.
    """
    if not isinstance(root, Path):
        return False
    with file_errors(None, root):
        if (root / MARKER_NAME).exists():
            return False
        return any(_take_away(root, marker.parent) for marker in _staged_markers(root))


class PlaceBase(ABC):
    """Where the files of one save go until it is committed. Nothing else writes there.

    Args:
        root: the checkpoint.
        timeout_s: of the save.

    Attributes:
        save_id: of this save. The first rank makes it, the others take it from there.
    """

    save_id = ""

    def __init__(self, root: Path | Bucket, timeout_s: float) -> None:
        self._name = str(root)
        self._timeout_s = timeout_s

    def __str__(self) -> str:
        """The checkpoint, for messages."""
        return self._name

    @abstractmethod
    def is_current(self) -> bool:
        """Whether what ``begin`` has made is there: no later save has taken the place."""

    def require(self, owner: str) -> None:
        """Wait until this rank sees what ``begin`` has made on the rank called ``owner``.

        Raises:
            StorageError: it does not appear; the place is not the same one.
        """
        deadline = time.monotonic() + min(self._timeout_s / 4, _WAIT_S)
        while not self.is_current():
            if time.monotonic() > deadline:
                raise StorageError(
                    f"{self}: what {owner} has written there is not seen here; all ranks have to "
                    "save to one directory, on a file system that they share, and no other job at "
                    "the same time",
                    path=str(self),
                )
            time.sleep(_PAUSE_S)

    def require_current(self) -> None:
        """Raise unless the place is still this save's.

        Raises:
            StorageError: another save has begun there, or all was removed.
        """
        if not self.is_current():
            raise StorageError(
                f"{self}: another save to it has begun before this one was finished, or what this "
                "one had written was removed; nothing of it was made visible",
                path=str(self),
            )


class DirectoryPlace(PlaceBase):
    """A staging directory in the checkpoint's own; see PlaceBase.

    Args:
        root: the checkpoint's directory, which ``begin`` makes.
        options: limits.
        keeps_old: leave an earlier checkpoint whole until the commit. Not where the caller has
            replaced its ``common.pt`` already.
        overwrite: replace arrays and objects that belong to no finished checkpoint, too.
    """

    def __init__(self, root: Path, options: Options, *, keeps_old: bool, overwrite: bool) -> None:
        super().__init__(root, options.timeout_s)
        self._root = root
        self._keeps_old = keeps_old
        self._overwrite = overwrite
        self._replaces = True

    @property
    def location(self) -> Path:
        """What the save writes into; with the save id."""
        return self._root / f"{PARTIAL_PREFIX}{self.save_id}"

    def new_save_id(self) -> str:
        """Look at what is there, on the first rank; the id of this save."""
        if not self._keeps_old:
            invalidate(self._root)
            self._overwrite = self._overwrite or (self._root / OLD_MARKER_NAME).exists()
        return uuid.uuid4().hex

    @limited
    def begin(self, keys: Collection[str] | None) -> None:
        """Make the place, on the first rank, and remove what earlier saves have not finished.

        Args:
            keys: of the save's arrays and objects; unknown: only ``overwrite`` replaces anything.

        Raises:
            CheckpointExistsError: there are arrays or objects of other keys and no marker; or a key
                leads into another checkpoint, or through a link.
            StorageError: another process is committing a save there.
        """
        root = self._root
        self._replaces = keys is not None or self._overwrite
        with file_errors(None, root):
            make_directories(root)
            require_directory(root)
            present = set(os.listdir(root))  # noqa: PTH208 - the names alone
        if keys is not None and present:
            if not self._overwrite:
                _require_replaceable(root, keys)
            _require_no_other_checkpoint(root, [k for k in keys if k.partition("/")[0] in present])
        if present:
            _remove_stale(root)
        with file_errors(None, root):
            self.location.mkdir()
            (self.location / _LOCK_NAME).touch()

    @limited
    def abandon(self) -> None:
        """Remove what ``begin`` has made, if anything; what stays is removed by the next save."""
        shutil.rmtree(self.location, ignore_errors=True)

    @limited
    def is_current(self) -> bool:
        """See PlaceBase. A late write may make the directory again, and never the lock."""
        return (self.location / _LOCK_NAME).exists()

    def commit(self, marker: bytes | None) -> None:
        """Make the save, all of it durable, the checkpoint's content; on the first rank.

        Args:
            marker: content of ``metadata.json``, which makes it visible; None where the caller
                writes it, and has invalidated the directory before.

        Raises:
            StorageError: the place is gone, or a file cannot be moved. An earlier checkpoint is
                still there, or ``complete_commit`` can finish this one.
        """
        self._commit(marker)
        try:
            run_with_limit(partial(_take_away, self._root, self.location), self)
        except StorageError as error:
            logger.warning("%s: what the save replaced is still there: %s", self, error)

    @limited
    def _commit(self, marker: bytes | None) -> None:
        root, staging = self._root, self.location
        with file_errors(None, root), _locked(staging):
            self.require_current()
            is_alone = os.listdir(root) == [staging.name]  # noqa: PTH208 - the names alone
            replaces = self._replaces and not is_alone
            if not is_alone:
                going = _names_of_contents(root, with_torch_dist=True) if replaces else ()
                _require_no_obstacle(staging, root, {f"{root}/{name}" for name in going})
            sync_path(staging)
            if marker is not None:
                write_file(staging / MARKER_NAME, marker)
                sync_path(root)
            raise_if_cancelled()
            if replaces:
                _trash_of(staging).mkdir()  # a full disk refuses that while the old marker is there
                set_marker_aside(root)
                (root / OLD_MARKER_NAME).touch()  # without a marker too, old files are to go
            _finish(root, staging)


def _require_replaceable(root: Path, keys: Collection[str]) -> None:
    """Raise unless there is a checkpoint, or arrays and objects of these keys only.

    Others may be a user's data.
    """
    with suppress(CheckpointNotFoundError, IncompleteCheckpointError):
        read_marker(root)
        return
    found = {*array_keys(root), *(object_id.key for object_id in object_ids(root))}
    others = sorted(found.difference(keys))
    if others:
        shown = ", ".join(others[:_MAX_NAMED]) + (", ..." if len(others) > _MAX_NAMED else "")
        raise CheckpointExistsError(
            f"{root} holds {len(others)} arrays or objects that this save would not replace and "
            f"that belong to no finished checkpoint: {shown}; remove them, save elsewhere, or pass "
            "overwrite=True to dist_ckpt_strategies.save",
            path=str(root),
        )


def _require_no_other_checkpoint(root: Path, keys: Iterable[str]) -> None:
    """Raise where what is written under a key would become a part of something else."""
    above: dict[str, str] = {}
    for key in sorted(keys):
        parts = key.split("/")
        above |= {"/".join(parts[:depth]): key for depth in range(1, len(parts) + 1)}
    for inner, key in above.items():
        # An array may be a link, which goes.
        if is_elsewhere(root / inner) and inner not in set(array_keys(root)):
            raise CheckpointExistsError(
                f"{key}: {root / inner} is a link or another checkpoint, of which this key would "
                "become a part; save elsewhere",
                key=key,
                path=str(root / inner),
            )


@limited
def require_free_folders(root: Path) -> None:
    """Raise where a folder of format 2 is there that is not ours.

    Raises:
        CheckpointExistsError: it is; names it.
    """
    if (root / SAVE_NAME).is_file():
        return
    for name in FOLDER_NAMES:
        if os.path.lexists(root / name):
            raise CheckpointExistsError(
                f"{root / name} is not of a checkpoint of format ('zarr', 2), which would put its "
                "own files there; remove it, or save elsewhere",
                path=str(root / name),
            )


def _require_no_obstacle(source: Path, target: Path, going: Collection[str]) -> None:
    """Raise where a file is in the way of a staged directory, or the other way round.

    What goes with an old checkpoint is not in the way.
    """
    for entry in _sorted_entries(source):
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


def _sorted_entries(directory: Path | str) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as scan:
        return sorted(scan, key=lambda entry: entry.name)


def _names_of_contents(root: Path, *, with_torch_dist: bool) -> list[str]:
    """The arrays and objects of a checkpoint of either format: paths below its directory.

    Arrays of format 1 are directories, with Megatron-Core's locks beside them. ``common.pt`` is not
    among them: it may be the new one already. Nor are other checkpoints below the directory, what
    links lead to, and files of any other kind. Files of torch_dist are, where the marker of another
    format would orphan them.
    """
    names = [str(object_path(root, found).relative_to(root)) for found in object_ids(root)]
    for key in sorted(array_keys(root), key=len, reverse=True):
        names += [key, *lock_directories(root, key)]
    if (root / SAVE_NAME).is_file():
        names += [name for name in FOLDER_NAMES if (root / name).exists()]
    if with_torch_dist:
        names += [
            entry.name
            for entry in _sorted_entries(root)
            if _OF_TORCH_DIST.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]
    return names


def _staged_markers(root: Path) -> list[Path]:
    """Markers of saves that are decided and not finished; one at most, but for changes by hand."""
    return sorted(root.glob(f"{PARTIAL_PREFIX}*/{MARKER_NAME}"))


def _finish(root: Path, staging: Path) -> None:
    """The renames of a commit; where some are made already, the others."""
    old_marker = root / OLD_MARKER_NAME
    if old_marker.exists():
        with_torch_dist = old_marker.stat().st_size > 0
        _move_old_out(root, _trash_of(staging), with_torch_dist=with_torch_dist)
    touched: list[Path | str] = [root]
    _move_below(str(staging), str(root), touched, {MARKER_NAME, _LOCK_NAME})
    for directory in touched:
        sync_path(directory)
    raise_if_cancelled()
    if (staging / MARKER_NAME).exists():
        (staging / MARKER_NAME).replace(root / MARKER_NAME)
        sync_path(root)


def _move_old_out(root: Path, trash: Path, *, with_torch_dist: bool) -> None:
    """Move the arrays and objects of a checkpoint aside, then its old marker.

    Directories above them that become empty go; another call carries an interrupted one on.
    """
    trash.mkdir(exist_ok=True)
    names = _names_of_contents(root, with_torch_dist=with_torch_dist)
    above = {parent for name in names for parent in PurePath(name).parents}
    prefix = f"{trash}/{uuid.uuid4().hex}-"  # a commit that is completed has moved some before
    for number, name in enumerate(names):
        raise_if_cancelled()
        os.rename(f"{root}/{name}", f"{prefix}{number}")  # noqa: PTH104 - 10,000 times
    for inner in sorted(above, key=lambda path: len(path.parts), reverse=True)[:-1]:  # not the root
        with suppress(OSError):  # it is gone, or not empty
            (root / inner).rmdir()
    sync_path(root)
    with suppress(FileNotFoundError):  # of a directory that was never finished
        (root / OLD_MARKER_NAME).replace(trash / MARKER_NAME)


def _move_below(
    source: str, target: str, touched: list[Path | str], passed: Collection[str]
) -> None:
    """Move everything but some names; directories that got new names join ``touched``."""
    for entry in _sorted_entries(source):
        if entry.name in passed:
            continue
        raise_if_cancelled()
        path = f"{target}/{entry.name}"
        try:
            os.rename(entry.path, path)  # noqa: PTH104 - 10,000 times
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise storage_error(None, path, error) from error
            touched.append(path)
            _move_below(entry.path, path, touched, ())


def _remove_stale(root: Path, *, completes: bool = True) -> None:
    """Remove staging directories, and what was moved out; at first complete an interrupted commit.

    What cannot be removed stays, with a warning: readers pass over it. Where ``completes`` is not
    set the interrupted commit is given up.

    Raises:
        StorageError: another process is committing a save there.
    """
    with file_errors(None, root):
        for name in [entry.name for entry in _sorted_entries(root)]:
            raise_if_cancelled()
            if name.startswith(PARTIAL_PREFIX):  # with their locks; they come first
                _take_away(root, root / name, completes=completes)
            elif name.startswith(REMOVED_PREFIX) and name != OLD_MARKER_NAME:
                _remove(root / name)


def _take_away(root: Path, staging: Path, *, completes: bool = True) -> bool:
    """Remove a staging directory with what its commit moved out; returns whether it was completed.

    Under another name no thread of that save finds it.
    """
    doomed = root / f"{REMOVED_PREFIX}{uuid.uuid4().hex}"
    with _locked(staging):
        is_decided = (staging / MARKER_NAME).exists() and not (root / MARKER_NAME).exists()
        if is_decided and completes:
            _finish(root, staging)
            logger.warning("%s: completed the commit of a save that was interrupted", root)
        with suppress(FileNotFoundError):  # another process has taken it away
            staging.replace(doomed)
    _remove(doomed)
    _remove(_trash_of(staging))
    return is_decided and completes


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
def _locked(staging: Path) -> Iterator[None]:
    """Hold the lock of a commit; none where the save was killed before it made the file.

    Raises:
        StorageError: another thread or process holds it.
    """
    try:
        handle = os.open(staging / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield
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
        yield
    finally:
        os.close(handle)
