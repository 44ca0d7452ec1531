"""How a save becomes a checkpoint: nothing of it is visible before all of it is durable.

In a directory a save writes to ``.partial-SAVE_ID`` below the checkpoint's and nowhere else. A
thread of an abandoned save that wakes up later can only write there. When everything is durable,
``commit`` puts the marker into the staging directory, which decides that the save will be visible,
and then renames: the old marker and the old files out, the new files in, the new marker last. A
commit that was killed on the way is carried to its end by ``complete_commit``; every step can be
repeated. All of it happens under the lock of a file in the staging directory: while a commit that
was given up still waits for the file system, no other save begins there.

Nothing in a bucket is renamed, and a request that was given up may still be carried out later. So a
save puts everything below a prefix of its own, ``save-ID/``, which is laid out like a checkpoint in
a directory. One request makes that the checkpoint's content: it puts ``metadata.json``, whose field
``save`` names the id.
"""

import json
import logging
import os
import re
import shutil
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath

from dist_ckpt_strategies.config import Options, place_from_environment
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    PeerLostError,
    StorageError,
    StrategyError,
    some_of,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.locations import (
    SAVE_FIELD,
    SAVE_PREFIX,
    Location,
    current_id,
    current_place,
    is_finished,
)
from dist_ckpt_strategies.formats.manifest import FOLDER_NAMES, HEADER, INDEX_NAME, SAVE_NAME
from dist_ckpt_strategies.formats.objects import object_ids, object_path
from dist_ckpt_strategies.formats.zarr2 import array_keys, lock_directories
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
    file_errors,
    is_elsewhere,
    make_directories,
    rename,
    require_directory,
    sync_path,
    try_lock,
)
from dist_ckpt_strategies.storage.io_pool import limited, raise_if_cancelled

logger = logging.getLogger(__name__)

OLD_MARKER_NAME = REMOVED_PREFIX + MARKER_NAME
"""The marker of a checkpoint that is being replaced, until its arrays have been removed."""

_PAUSE_S = 0.02
_WAIT_S = 30.0
"""How long a network file system may take to release a lock."""

_VISIBLE_S = 90.0
"""How long it may take to show a new file: NFS clients keep what they know of a directory for up to
60 s."""

_LOCK_NAME = ".commit-lock"
_OLD_NAME = f"{REMOVED_PREFIX}old"
"""Where in its staging directory a commit moves what it replaces."""

DECIDED = f"{PARTIAL_PREFIX}*/{MARKER_NAME}"
"""Markers of saves that are decided and not finished; one at most, but for changes by hand."""

_OF_TORCH_DIST = re.compile(r"__\d+_\d+\.distcp|\.metadata|integrity\.json")
"""What torch.distributed.checkpoint and Megatron-Core name files of their own saves."""


@limited
def set_marker_aside(root: Path) -> None:
    """Make the directory count as incomplete, durably, before anything of it changes.

    That it has held a checkpoint is still known afterwards. Several ranks may do it at once.
    """
    path = root / MARKER_NAME
    with file_errors(None, path), suppress(FileNotFoundError):
        raise_if_cancelled()
        rename(path, root / OLD_MARKER_NAME)
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
        if any(root.glob(DECIDED)):
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
def complete_commit(root: Location) -> bool:
    """Carry a commit that was interrupted to its end; returns whether there was one.

    In a bucket nothing is moved, and nothing is to be done.
    Rank-local: one rank calls it, before the others look at the marker. A commit that is under way
    is waited for, and nothing but what belongs to the completed one is removed.

    Raises:
        StorageError: another process is still at it, or a file cannot be moved.
    """
    if isinstance(root, Bucket):
        return False
    with file_errors(None, root):
        if (root / MARKER_NAME).exists():
            return False
        return any(_take_away(root, marker.parent) for marker in sorted(root.glob(DECIDED)))


@dataclass
class PlaceBase(ABC):
    """Where the files of one save go until it is committed. Nothing else writes there.

    Attributes:
        keeps_old: leave an earlier checkpoint in a directory whole until the commit. Not where the
            caller has replaced its ``common.pt`` already.
        overwrite: replace arrays and objects that belong to no finished checkpoint, too.
        is_format2: whether the save is of format ("zarr", 2), with folders of its own.
        save_id: of this save. The first rank makes it, the others take it from there.
    """

    root: Location
    options: Options
    keeps_old: bool
    overwrite: bool
    is_format2: bool = False
    save_id: str = ""

    def __str__(self) -> str:
        """The checkpoint, for messages."""
        return str(self.root)

    @abstractmethod
    def is_current(self) -> bool:
        """Whether what ``begin`` has made is there: no later save has taken the place."""

    def require(self, owner: str | None = None) -> None:
        """Raise StorageError where another save has begun there since, or all was removed.

        Files of ``owner``, the rank that has just made the place, may take a while to show here.
        """
        limit_s = min(self.options.timeout_s / 4, _VISIBLE_S) if owner else 0.0
        deadline = time.monotonic() + limit_s
        while not self.is_current():
            if time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
                continue
            what = (
                f"the files of {owner} are not visible here: after {limit_s:g} s this rank sees "
                f"no {PARTIAL_PREFIX}{self.save_id}; save from all ranks to one directory on a "
                "file system that they share, and from one job at a time"
                if owner
                else "another save to it started before this one ended, or its staged files were "
                "removed; nothing became visible; save again from one job at a time"
            )
            raise StorageError(f"{self}: {what}", path=str(self))


def _begun_content(save_id: str) -> bytes:
    """The bytes of the first file of a save, which says where and when it began."""
    begun = {"token": save_id, "host": socket.gethostname(), "time": time.time()}
    return json.dumps({**HEADER, **begun}).encode()


class DirectoryPlace(PlaceBase):
    """A staging directory in the checkpoint's own, which ``begin`` makes; see PlaceBase."""

    root: Path
    _replaces = True

    @property
    def location(self) -> Path:
        """What the save writes into; with the save id."""
        return self.root / f"{PARTIAL_PREFIX}{self.save_id}"

    def new_save_id(self) -> str:
        """Look at what is there, on the first rank; the id of this save."""
        if not self.keeps_old:
            invalidate(self.root)
            self.overwrite = self.overwrite or (self.root / OLD_MARKER_NAME).exists()
        return uuid.uuid4().hex

    @limited
    def begin(self, keys: Collection[str] | None) -> None:
        """Make the place, on the first rank, and remove what earlier saves have not finished.

        ``keys`` are those of arrays and objects; None: only ``overwrite`` replaces anything.

        Raises:
            CheckpointExistsError: there are arrays or objects of other keys and no marker, or
                folders that the format needs; or a key leads into another checkpoint, or through a
                link.
            StorageError: another process is committing a save there.
        """
        root = self.root
        self._replaces = keys is not None or self.overwrite
        with file_errors(None, root):
            make_directories(root)
            if not root.is_dir():
                require_directory(root)  # names what is there instead
            present = set(os.listdir(root))  # noqa: PTH208 - the names alone
        if self.is_format2 and not (root / SAVE_NAME).is_file():
            for name in sorted(present.intersection(FOLDER_NAMES)):
                raise CheckpointExistsError(
                    f"{root / name} is not part of a checkpoint of format ('zarr', 2), whose files "
                    "would go there; remove it, or save elsewhere",
                    path=str(root / name),
                )
        if keys is not None and present:
            if not self.overwrite:
                _require_replaceable(root, keys)
            _require_no_other_checkpoint(root, [k for k in keys if k.partition("/")[0] in present])
        if present:
            _remove_stale(root)
        with file_errors(None, root):
            self.location.mkdir()
            (self.location / _LOCK_NAME).touch()
        if self.is_format2:
            Directory(self.location).write(SAVE_NAME, _begun_content(self.save_id))

    @limited
    def abandon(self) -> None:
        """Remove what the save has made. A commit that has begun stays for ``complete_commit``.

        What cannot be removed now is removed by the next save.

        Raises:
            StorageError: a thread that was given up is at the commit.
        """
        with file_errors(None, self.location), _locked(self.location):
            if not (self.location / MARKER_NAME).exists():
                shutil.rmtree(self.location, ignore_errors=True)

    @limited
    def is_current(self) -> bool:
        """See PlaceBase. A late write may make the directory again, and never the lock.

        An NFS client asks its server about a directory when that is opened.
        """
        lock = self.location / _LOCK_NAME
        for directory in () if lock.exists() else reversed(lock.parents):
            with suppress(OSError):
                os.close(os.open(directory, os.O_RDONLY | os.O_CLOEXEC))
        return lock.exists()

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
            _take_away(self.root, self.location)
        except StorageError as error:
            logger.warning("%s: files that the save replaced cannot be removed: %s", self, error)

    @limited
    def _commit(self, marker: bytes | None) -> None:
        root, staging = self.root, self.location
        with file_errors(None, root), _locked(staging):
            self.require()
            is_alone = os.listdir(root) == [staging.name]  # noqa: PTH208 - the names alone
            replaces = self._replaces and not is_alone
            going = _names_of_contents(root, with_torch_dist=True) if replaces else ()
            list(_moves(str(staging), str(root), {f"{root}/{name}" for name in going}))  # may raise
            sync_path(staging)
            require_own_place()
            if marker is not None:
                Directory(staging).write(MARKER_NAME, marker)
                sync_path(root)
            raise_if_cancelled()
            if replaces:
                (staging / _OLD_NAME).mkdir()  # a full disk refuses that; the old marker is there
                set_marker_aside(root)
                (root / OLD_MARKER_NAME).touch()  # without a marker too, old files are to go
            _finish(root, staging)


class BucketPlace(PlaceBase):
    """A prefix of its own in an object store; see PlaceBase and DirectoryPlace."""

    root: Bucket

    @property
    def location(self) -> Bucket:
        """What the save writes into; with the save id."""
        return self.root.place(SAVE_PREFIX + self.save_id)

    def new_save_id(self) -> str:
        """See DirectoryPlace. It is larger than that of the current save, whatever clocks say."""
        self.root.require_bucket()
        last = int((current_id(self.root) or "0").partition("-")[0])
        return f"{max(last + 1, time.time_ns() // 1000):017d}-{uuid.uuid4().hex}"

    def begin(self, keys: Collection[str] | None) -> None:  # noqa: ARG002 - only its own prefix
        """Make the place, on the first rank, and remove what earlier saves have not finished."""
        _remove_others(self.root, current_place(self.root))
        self.location.write(SAVE_NAME, _begun_content(self.save_id))

    def abandon(self) -> None:
        """Do nothing: a prefix that no marker names is not read; prune removes it."""

    def is_current(self) -> bool:
        """See PlaceBase."""
        return current_id(self.root) <= self.save_id and self.location.has(SAVE_NAME)

    def commit(self, marker: bytes | None) -> None:
        """See DirectoryPlace. What the save replaces is removed afterwards."""
        if marker is None:
            raise StrategyError(
                f"{self}: call dist_ckpt_strategies.save, which also writes the marker"
            )
        bucket, place = self.root, self.location
        self.require()
        place.write(MARKER_NAME, marker)
        content = {**json.loads(marker), SAVE_FIELD: self.save_id}
        require_own_place()
        bucket.write(MARKER_NAME, json.dumps(content).encode())
        if bucket.place().has(PACKS_INDEX):
            bucket.place().delete([PACKS_INDEX])
        try:
            _remove_others(bucket, place)
        except StorageError as error:
            logger.warning("%s: what the save replaces cannot be removed: %s", bucket, error)


def require_own_place() -> None:
    """Raise where this process's node is no longer part of its job: others may save, too.

    Raises:
        StorageError: see ``comm.job_store.require_place``.
    """
    if place_from_environment() is None:
        return
    from dist_ckpt_strategies.comm.job_store import require_place  # noqa: PLC0415 - torch

    try:
        require_place()
    except PeerLostError as error:  # as one of storage: all ranks raise it
        raise StorageError(f"not committed, this node is out of the job: {error}") from error


SavePlace = DirectoryPlace | BucketPlace


def _require_replaceable(root: Path, keys: Collection[str]) -> None:
    """Raise unless there is a checkpoint, or arrays and objects of these keys only.

    Others may be a user's data.
    """
    if is_finished(root):
        return
    found = {*array_keys(root), *(object_id.key for object_id in object_ids(root))}
    others = sorted(found.difference(keys))
    if others:
        raise CheckpointExistsError(
            f"{root} holds {len(others)} arrays or objects that this save would not replace and "
            f"that belong to no finished checkpoint: {some_of(others)}; remove them, save "
            "elsewhere, or pass overwrite=True to dist_ckpt_strategies.save",
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


def _moves(source: str, target: str, going: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """The renames that bring what is staged into place: old path and new; own files are left out.

    What is in ``going`` is not in the way: it leaves first.

    Raises:
        CheckpointExistsError: a file is in the way of a directory, or the other way round.
    """
    present = set(os.listdir(target))  # noqa: PTH208 - the names alone
    with os.scandir(source) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name in {MARKER_NAME, _LOCK_NAME, _OLD_NAME}:
            continue
        path = f"{target}/{entry.name}"
        if entry.name not in present or path in going:
            yield entry.path, path
            continue
        is_here = entry.is_dir(follow_symlinks=False)
        is_there = os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114
        if is_here != is_there:
            raise CheckpointExistsError(
                f"{path} is in the way of a file or directory of this save; remove it, or save "
                "elsewhere",
                path=path,
            )
        if is_here:
            yield from _moves(entry.path, path, going)
        else:
            yield entry.path, path


def _names_of_contents(root: Path, *, with_torch_dist: bool) -> list[str]:
    """The arrays and objects of a checkpoint of either format: paths below its directory.

    Arrays of format 1 are directories, with Megatron-Core's locks beside them; beside the folders
    of format 2 they are a user's. ``common.pt`` is not among them: it may be the new one already.
    Nor are other checkpoints below the directory, what links lead to, and files of any other kind.
    Files of torch_dist are, where the marker of another format would orphan them.
    """
    names: list[str] = []
    if (root / SAVE_NAME).is_file():
        names += [name for name in FOLDER_NAMES if (root / name).exists()]
    else:
        names += [str(object_path(root, found).relative_to(root)) for found in object_ids(root)]
        for key in sorted(array_keys(root), key=len, reverse=True):
            names += [key, *lock_directories(root, key)]
    if with_torch_dist:
        found = map(root.joinpath, filter(_OF_TORCH_DIST.fullmatch, sorted(os.listdir(root))))  # noqa: PTH208
        names += [path.name for path in found if path.is_file() and not path.is_symlink()]
    return names


def _finish(root: Path, staging: Path) -> None:
    """The renames of a commit; where some are made already, the others."""
    old_marker = root / OLD_MARKER_NAME
    if old_marker.exists():
        with_torch_dist = old_marker.stat().st_size > 0
        _move_old_out(root, staging / _OLD_NAME, with_torch_dist=with_torch_dist)
    touched = {str(root)}
    for source, target in list(_moves(str(staging), str(root))):
        raise_if_cancelled()
        rename(source, target)
        touched.add(os.path.dirname(target))  # noqa: PTH120 - as above
    for directory in sorted(touched):
        sync_path(directory)
    raise_if_cancelled()
    _invalidate_packs(root)
    if (staging / MARKER_NAME).exists():
        rename(staging / MARKER_NAME, root / MARKER_NAME)
        sync_path(root)


def _invalidate_packs(root: Path) -> None:
    """Have packs at a place count no more. They stay, as files of another format do."""
    with file_errors(None, root / PACKS_INDEX), suppress(FileNotFoundError):
        (root / PACKS_INDEX).unlink()
        sync_path(root)
        logger.warning("%s: packs of an earlier save stay there until prune removes them", root)


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
        rename(f"{root}/{name}", f"{prefix}{number}")
    for inner in sorted(above, key=lambda path: len(path.parts), reverse=True)[:-1]:  # not the root
        with suppress(OSError):  # it is gone, or not empty
            (root / inner).rmdir()
    sync_path(root)
    with suppress(FileNotFoundError):  # of a directory that was never finished
        rename(root / OLD_MARKER_NAME, trash / MARKER_NAME)


def _remove_stale(root: Path, *, completes: bool = True) -> None:
    """Remove staging directories, and what was moved out; at first complete an interrupted commit.

    What cannot be removed stays, with a warning: readers pass over it. Where ``completes`` is not
    set the interrupted commit is given up.

    Raises:
        StorageError: another process is committing a save there.
    """
    with file_errors(None, root):
        for name in sorted(os.listdir(root)):  # noqa: PTH208 - the names alone
            raise_if_cancelled()
            if name.startswith(PARTIAL_PREFIX):  # with their locks; they come first
                _take_away(root, root / name, completes=completes)
            elif name.startswith(REMOVED_PREFIX) and name != OLD_MARKER_NAME:
                _remove(root / name)


@limited
def _take_away(root: Path, staging: Path, *, completes: bool = True) -> bool:
    """Remove a staging directory with what its commit moved out; returns whether it was completed.

    Under another name no thread of that save finds it.
    """
    doomed = root / f"{REMOVED_PREFIX}{uuid.uuid4().hex}"
    with _locked(staging):
        is_decided = completes and (staging / MARKER_NAME).exists()
        is_decided = is_decided and not (root / MARKER_NAME).exists()
        if is_decided:
            _finish(root, staging)
            logger.warning("%s: completed the commit of a save that was interrupted", root)
        with suppress(FileNotFoundError):  # another process has taken it away
            rename(staging, doomed)
    _remove(doomed)
    return is_decided


def _remove(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass  # another process removes it too
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


def _remove_others(bucket: Bucket, current: Bucket) -> None:
    """Delete what other saves have put. Nothing is deleted where nothing is.

    A job that may put and read, and not delete, can save to a new URL.
    """
    kept = str(current).removeprefix(f"{bucket}/")
    names = bucket.names(SAVE_PREFIX)
    _delete_in_order(bucket, [name for name in names if name.partition("/")[0] != kept])
    if str(current) != str(bucket) and bucket.has(SAVE_NAME):
        _delete_in_order(bucket, _names_of_earlier_release(bucket))


def _delete_in_order(bucket: Bucket, names: Sequence[str]) -> None:
    """Delete objects of saves: manifests first, what a save is recognised by last."""
    bucket.delete(name for name in names if name.endswith(INDEX_NAME))
    bucket.delete(name for name in names if not name.endswith((INDEX_NAME, SAVE_NAME)))
    bucket.delete(name for name in names if name.endswith(SAVE_NAME))


def _names_of_earlier_release(bucket: Bucket) -> list[str]:
    return [COMMON_NAME, *(name for folder in FOLDER_NAMES for name in bucket.names(f"{folder}/"))]


def remove(bucket: Bucket) -> tuple[str, ...]:
    """Remove a checkpoint, or what a killed save left: the marker first, what it is known by last.

    Returns what is no part of it and stays: names, up to their first ``/``.
    """
    for name in (MARKER_NAME, INDEX_NAME):
        if bucket.has(name):
            bucket.delete([name])
    names = bucket.names(SAVE_PREFIX)
    _delete_in_order(bucket, [*names, *_names_of_earlier_release(bucket)])
    return tuple(sorted({name.partition("/")[0] for name in bucket.names()}))
