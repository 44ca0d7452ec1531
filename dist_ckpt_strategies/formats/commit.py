"""Make staged files the content of a directory: format ("zarr", 1), and formats of other packages.

A save writes to ``.partial-SAVE_ID`` below the checkpoint's directory and nowhere else. When all of
it is durable, ``commit_staged`` sets the old marker aside, moves the old files out and the new ones
into place; the new marker comes last. A save that is killed between these leaves no checkpoint.
"""

import logging
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from uuid import uuid4

from dist_ckpt_strategies.config import place_from_environment
from dist_ckpt_strategies.errors import CheckpointExistsError, PeerLostError, StorageError, some_of
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.locations import Location, holds_dcp, is_finished, place_of
from dist_ckpt_strategies.formats.zarr2 import (
    array_keys,
    is_elsewhere,
    lock_directories,
    object_ids,
    object_path,
)
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
    file_errors,
    make_directories,
    rename,
    set_aside,
    sync_path,
)
from dist_ckpt_strategies.storage.io_pool import Job, Transfer, raise_if_cancelled

logger = logging.getLogger(__name__)

OLD_MARKER_NAME = REMOVED_PREFIX + MARKER_NAME
"""The marker of a checkpoint that Megatron-Core's own save has begun to replace."""

_OF_TORCH_DIST = re.compile(r"__\d+_\d+\.distcp|\.metadata|integrity\.json")
"""File names of torch.distributed.checkpoint's and Megatron-Core's own saves."""

_NUM_THREADS = 16
"""Threads that flush directories."""

_TRASH_NAME = f"{REMOVED_PREFIX}old"
"""The part of its staging directory to which a commit moves replaced files."""


def staging_of(root: Path, save_id: str) -> Directory:
    """The directory of one save; nothing else writes there."""
    return Directory(root / f"{PARTIAL_PREFIX}{save_id}")


def require_unfinished(root: Location) -> None:
    """Raise CheckpointExistsError where there is a finished checkpoint."""
    if is_finished(root) or holds_dcp(place_of(root)):
        raise CheckpointExistsError(
            f"{root} already holds a finished checkpoint; pass overwrite=True to replace it",
            path=str(root),
        )


def commit_staged(
    staging: Path,
    marker: bytes | None,
    *,
    overwrite: bool,
    keys: Collection[str] | None = None,
    parts: Sequence[str] = ("",),
) -> None:
    """Make a save, all of it durable, the content of its directory. One rank calls it.

    Args:
        staging: where it was written, see ``staging_of``.
        marker: content of ``metadata.json``; None where Megatron-Core writes it, and has set
            the old one aside.
        overwrite: whether a finished checkpoint is replaced, and arrays and objects of other keys.
        keys: of its arrays and objects; None where another package has named the files.
        parts: directories below ``staging``, each laid out like the checkpoint.

    Raises:
        CheckpointExistsError: there is a finished checkpoint, or other arrays, or a file is in the
            way, or a key leads into another checkpoint, or through a link.
        StorageError: a file cannot be moved, or this node is out of the job.
    """
    root = staging.parent
    with Directory(root).locked(), file_errors(None, root):
        sources = [str(staging / part) for part in parts]
        for source in sources:  # where a rank has written nothing
            make_directories(Path(source))
        if not overwrite and marker is not None:
            require_unfinished(root)
        old_marker = root / OLD_MARKER_NAME
        had_marker = old_marker.exists() or (root / MARKER_NAME).exists()
        going: list[str] = []
        if keys is not None or overwrite:
            is_meant = overwrite or (had_marker and marker is None)
            _require_replaceable(root, keys or (), overwrite=is_meant)
            going = _contents(root)
            going += _files_of_torch_dist(root) if had_marker else []
        _require_no_other_checkpoint(root, keys or ())
        replaced = {f"{root}/{name}" for name in going}
        for source in sources:
            list(_moves(source, str(root), replaced))  # may raise
        require_own_place()
        set_aside(root, MARKER_NAME)  # durably, before anything changes
        _move_out(root, going, staging / _TRASH_NAME)
        _move_in(sources, root)
        raise_if_cancelled()
        _invalidate_packs(root)
        old_marker.unlink(missing_ok=True)
        if marker is not None:
            Directory(root).write(MARKER_NAME, marker)
    discard(staging)


def discard(staging: Path) -> None:
    """Remove a staging directory; what cannot be removed is logged, and stays for prune.

    Under another name no thread of the save that was given up finds it.
    """
    doomed = staging.with_name(f"{REMOVED_PREFIX}{staging.name.removeprefix(PARTIAL_PREFIX)}")
    try:
        with suppress(FileNotFoundError):
            rename(staging, doomed)
            shutil.rmtree(doomed)
    except (OSError, StorageError) as error:
        logger.warning("%s cannot be removed (%s): prune --unfinished does it", doomed, error)


def give_up(staging: Path) -> None:
    """Remove a staging directory, unless a commit has moved files of the old checkpoint there."""
    if not (staging / _TRASH_NAME).exists():
        discard(staging)
        return
    logger.warning(
        "%s: the commit failed half-way; the files of the old and of the new checkpoint are kept "
        "there until prune --unfinished removes them",
        staging,
    )


def remove_contents(root: Path) -> None:
    """Remove a checkpoint's files, the marker first, and what killed saves have left of others."""
    set_aside(root, MARKER_NAME)
    with file_errors(None, root):
        _remove(root, _contents(root))
        (root / COMMON_NAME).unlink(missing_ok=True)
        for path in root.iterdir():
            if path.name.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_keys(root: Path, key_prefix: str) -> None:
    """Remove the arrays and objects whose key starts with a prefix; of a link only the link."""
    with file_errors(None, root):
        _remove(root, _contents(root, key_prefix))


def _remove(root: Path, names: Collection[str]) -> None:
    trash = root / f"{REMOVED_PREFIX}{uuid4().hex}"  # beside that of a call that was killed
    trash.mkdir()
    _move_out(root, names, trash)
    sync_path(root)
    shutil.rmtree(trash)


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


def _require_replaceable(root: Path, keys: Collection[str], *, overwrite: bool) -> None:
    """Raise where arrays or objects would go that the save does not replace: a user's, maybe."""
    stored_keys = {*array_keys(root), *(object_id.key for object_id in object_ids(root))}
    others = sorted(stored_keys.difference(keys))
    if others and not overwrite:
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
    arrays = set(array_keys(root))  # an array may be a link, which goes
    for inner, key in above.items():
        if inner not in arrays and is_elsewhere(root / inner):
            raise CheckpointExistsError(
                f"{key}: {root / inner} is a link or another checkpoint, of which this key would "
                "become a part; save elsewhere",
                key=key,
                path=str(root / inner),
            )


def _contents(root: Path, key_prefix: str = "") -> list[str]:
    """The arrays and objects in a directory, with Megatron-Core's locks: paths below it.

    Neither what is in other checkpoints below it or behind links, nor files of any other kind.
    """
    names = [
        str(object_path(root, name).relative_to(root))
        for name in object_ids(root)
        if name.key.startswith(key_prefix)
    ]
    for key in sorted(array_keys(root), key=len, reverse=True):
        if key.startswith(key_prefix):
            names += [key, *lock_directories(root, key)]
    return names


def _files_of_torch_dist(root: Path) -> list[str]:
    """The files that the marker of another format would orphan."""
    named = sorted(filter(_OF_TORCH_DIST.fullmatch, os.listdir(root)))  # noqa: PTH208
    return [name for name in named if (root / name).is_file() and not (root / name).is_symlink()]


def _moves(source: str, target: str, going: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """The renames that bring what is staged into place: old path and new.

    What is in ``going`` is not in the way: it leaves first.

    Raises:
        CheckpointExistsError: a file is in the way of a directory, or the other way round.
    """
    present = set(os.listdir(target))  # noqa: PTH208 - the names alone
    with os.scandir(source) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name == _TRASH_NAME:
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


def _move_in(sources: Iterable[str], root: Path) -> None:
    """Move what is staged into place, durably."""
    touched = {str(root)}
    for source in sources:
        for path, target in list(_moves(source, str(root))):
            raise_if_cancelled()
            rename(path, target)
            touched.add(os.path.dirname(target))  # noqa: PTH120 - 10,000 times
    jobs = [Job("", directory, partial(sync_path, directory)) for directory in sorted(touched)]
    Transfer(jobs, _NUM_THREADS).wait()


def _move_out(root: Path, names: Collection[str], trash: Path) -> None:
    """Move arrays and objects aside; directories above them that become empty go."""
    if not names:
        return
    trash.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        raise_if_cancelled()
        rename(root / name, trash / str(number))
    above = {parent for name in names for parent in PurePath(name).parents}
    for inner in sorted(above, key=lambda path: len(path.parts), reverse=True)[:-1]:  # not the root
        with suppress(OSError):  # it is gone, or not empty
            (root / inner).rmdir()


def _invalidate_packs(root: Path) -> None:
    """Have packs at a place count no more. They stay, as files of another format do."""
    with suppress(FileNotFoundError, IsADirectoryError):  # an array may have that key
        (root / PACKS_INDEX).unlink()
        sync_path(root)
        logger.warning("%s: packs of an earlier save stay there until prune removes them", root)
