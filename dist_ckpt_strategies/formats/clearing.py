"""What is in a directory that a checkpoint goes to: what a save may replace, and its removal."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path, PurePath

from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.formats.finished import WITHDRAWN_NAME, withdraw_marker
from dist_ckpt_strategies.formats.manifest import MANIFEST_NAME, OBJECTS_NAME, SAVE_NAME
from dist_ckpt_strategies.formats.object_files import object_ids, object_path
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.formats.zarr3 import ARRAYS_NAME
from dist_ckpt_strategies.storage.files import (
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    is_directory,
    is_elsewhere,
    sync_path,
)
from dist_ckpt_strategies.storage.io_pool import limited
from dist_ckpt_strategies.storage.time_limit import raise_if_cancelled

_MAX_NAMED = 5

_ENDS = re.compile(r"(?=/|\Z)")
"""Where the path of a directory above a key, or of its own, ends within it."""

_OF_TORCH_DIST = re.compile(r"__\d+_\d+\.distcp|\.metadata")
"""What torch.distributed.checkpoint names its files."""


def require_room(root: Path, keys: Collection[str]) -> None:
    """Raise unless a directory without a marker holds arrays and objects of these keys only.

    Nothing tells others apart from somebody's data.

    Raises:
        CheckpointExistsError: there are others; names some.
    """
    found = {*Zarr2Layout(root).keys(), *(object_id.key for object_id in object_ids(root))}
    others = sorted(found.difference(keys))
    if others:
        shown = ", ".join(others[:_MAX_NAMED]) + (", ..." if len(others) > _MAX_NAMED else "")
        raise CheckpointExistsError(
            f"{root} holds {len(others)} arrays or objects that this save would not replace and "
            f"that belong to no finished checkpoint: {shown}; remove them, save elsewhere, or pass "
            "overwrite=True to dist_ckpt_strategies.save",
            path=str(root),
        )


def require_nothing_in_the_way(root: Path, keys: Collection[str]) -> None:
    """Raise where what is written under a key would become a part of something else.

    Raises:
        CheckpointExistsError: a key leads into another checkpoint, or through a link.
    """
    with file_errors(None, root), os.scandir(root) as scan:
        present = {entry.name for entry in scan if is_directory(entry)}
    inside = sorted(key for key in keys if key.partition("/")[0] in present)
    above = {key[: match.start()]: key for key in inside for match in _ENDS.finditer(key)}
    found = {inner: key for inner, key in above.items() if is_elsewhere(root / inner)}
    if not found:
        return
    going = set(Zarr2Layout(root).keys())  # an array may be a link, which goes
    for inner, key in found.items():
        if inner not in going:
            raise CheckpointExistsError(
                f"{key}: {root / inner} is a link or another checkpoint, of which this key would "
                "become a part; save elsewhere",
                key=key,
                path=str(root / inner),
            )


@limited
def retract(root: Path, *, with_torch_dist: bool) -> None:
    """Withdraw the marker, durably, then remove what ``move_out`` finds."""
    withdraw_marker(root)
    trash = root / f"{REMOVED_PREFIX}{uuid.uuid4().hex}"
    with file_errors(None, root):
        trash.mkdir()
        move_out(root, trash, with_torch_dist=with_torch_dist)
        sync_path(root)
        (root / WITHDRAWN_NAME).unlink(missing_ok=True)
        shutil.rmtree(trash)


def move_out(root: Path, trash: Path, *, with_torch_dist: bool) -> None:
    """Move the arrays and objects of a checkpoint to another directory, of either format.

    ``common.pt`` stays: it may be the new one already. So do other checkpoints below the directory,
    what links lead to, and files of any other kind.

    Args:
        root: the checkpoint's directory.
        trash: a directory of the same file system.
        with_torch_dist: whether files of torch_dist go too.

    Raises:
        OSError: something cannot be moved.
    """
    names = names_of_checkpoint(root, with_torch_dist=with_torch_dist)
    above = {parent for name in names for parent in PurePath(name).parents}
    prefix = f"{trash}/{uuid.uuid4().hex}-"  # a commit that is completed has moved some before
    for number, name in enumerate(names):
        raise_if_cancelled()
        os.rename(f"{root}/{name}", f"{prefix}{number}")  # noqa: PTH104 - 10,000 times
    for inner in sorted(above, key=_depth, reverse=True)[:-1]:  # the last is the root
        directory = root / inner
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()


def names_of_checkpoint(root: Path, *, with_torch_dist: bool) -> list[str]:
    """What ``move_out`` moves: paths below the directory."""
    names = [*_files_of_format1(root), *_folders_of_format2(root)]
    return names + (_files_of_torch_dist(root) if with_torch_dist else [])


def _depth(path: PurePath) -> int:
    return len(path.parts)


def _files_of_format1(root: Path) -> list[str]:
    """Directories of arrays, with Megatron-Core's locks beside them, and files of objects."""
    layout = Zarr2Layout(root)
    objects = [str(object_path(root, found).relative_to(root)) for found in object_ids(root)]
    arrays = sorted(layout.keys(), key=len, reverse=True)
    return objects + [name for key in arrays for name in (key, *layout.lock_directories(key))]


def _files_of_torch_dist(root: Path) -> list[str]:
    """Data of torch_dist, which the marker of another format would orphan."""
    with os.scandir(root) as scan:
        return [
            entry.name
            for entry in scan
            if _OF_TORCH_DIST.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def _folders_of_format2(root: Path) -> list[str]:
    """The folders of a save of format 2; the one that it is recognised by last."""
    if not (root / SAVE_NAME).is_file():
        return []
    return [n for n in (ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME) if (root / n).exists()]


@limited
def require_room_for_format2(root: Path) -> None:
    """Raise where a folder of format 2 is there that is not ours.

    One that holds nothing is nobody's: a save that was cut short before its first file leaves it.

    Raises:
        CheckpointExistsError: it is; names it.
    """
    if (root / SAVE_NAME).is_file():
        return
    for name in (ARRAYS_NAME, OBJECTS_NAME, MANIFEST_NAME):
        if os.path.lexists(root / name) and not _holds_nothing(root / name):
            raise CheckpointExistsError(
                f"{root / name} is not of a checkpoint of format ('zarr', 2), which would put its "
                "own files there; remove it, or save elsewhere",
                path=str(root / name),
            )


def _holds_nothing(path: Path) -> bool:
    """Whether it is a directory, with at most what had not been renamed into place."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(one.name.startswith((REMOVED_PREFIX, PARTIAL_PREFIX)) for one in path.iterdir())
