"""Room in a directory for a checkpoint: what was there before goes, but nothing of somebody's."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.storage.disk.files import (
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    is_directory,
    is_elsewhere,
    require_directory,
    sync_path,
)
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.format2.layout import ARRAYS_NAME
from dist_ckpt_strategies.storage.format2.manifest import MANIFEST_NAME, OBJECTS_NAME, SAVE_NAME
from dist_ckpt_strategies.storage.lifecycle.publication import (
    has_withdrawn_marker,
    is_finished,
    withdraw_marker,
)
from dist_ckpt_strategies.storage.objects.files import object_ids, object_path

_MAX_NAMED = 5

_ENDS = re.compile(r"(?=/|\Z)")
"""Where the path of a directory above a key, or of its own, ends within it."""

_OF_TORCH_DIST = re.compile(r"__\d+_\d+\.distcp|\.metadata")
"""What torch.distributed.checkpoint names its files."""


class DirectoryRoom:
    """Room for a save in a directory, made in two steps by the first rank of those that save.

    Args:
        root: the directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._is_checkpoint = False

    def examine(self, *, keeps_old: bool) -> None:
        """See what is there; unless ``keeps_old``, withdraw the marker of it.

        Raises:
            CheckpointNotFoundError: the directory does not exist.
        """
        require_directory(self._root)
        if keeps_old:
            self._is_checkpoint = is_finished(self._root)
            return
        withdraw_marker(self._root)
        self._is_checkpoint = has_withdrawn_marker(self._root)

    def clear(self, keys: Collection[str]) -> None:
        """Remove what was there, after ``examine``; errors as ``make_way``."""
        make_way(self._root, keys, is_checkpoint=self._is_checkpoint)


def make_way(root: Path, keys: Collection[str], *, is_checkpoint: bool) -> None:
    """Clear the directory for a checkpoint of these keys.

    A finished checkpoint goes as a whole, its marker first, durably. Of anything else only what an
    unfinished save has left of the same keys goes: nothing tells the rest apart from somebody's
    data.

    Args:
        root: the directory.
        keys: of the arrays and objects that will be written.
        is_checkpoint: whether there is a marker, or was until this save withdrew it.

    Raises:
        CheckpointExistsError: there was no marker, but there are arrays or objects of other keys;
            or a key leads into another checkpoint, or through a link.
    """
    if not is_checkpoint:
        _require_no_others(root, keys)
    with file_errors(None, root):
        _require_nothing_in_the_way(root, keys)
    retract(root, is_checkpoint=is_checkpoint)


def _require_no_others(root: Path, keys: Collection[str]) -> None:
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


def _require_nothing_in_the_way(root: Path, keys: Collection[str]) -> None:
    """Raise where what is written under a key would become a part of something else."""
    with os.scandir(root) as scan:
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


def retract(root: Path, *, is_checkpoint: bool = True) -> None:
    """Withdraw the marker, durably, then remove the arrays and objects of an earlier save, then it.

    ``common.pt`` stays: Megatron-Core's own save has already written the new one. So do other
    checkpoints below the directory, what links lead to, and files of any other kind, but not those
    of an earlier save with torch_dist.
    """
    withdraw_marker(root)
    with file_errors(None, root):
        layout = Zarr2Layout(root)
        for key in sorted(layout.keys(), key=len, reverse=True):
            layout.remove(key)
        for object_id in list(object_ids(root)):
            object_path(root, object_id).unlink(missing_ok=True)
        if is_checkpoint:
            _remove_torch_dist(root)
        _remove_format2(root)
        _remove_remains(root)


def _remove_torch_dist(root: Path) -> None:
    """Remove the data of a checkpoint of torch_dist, which another marker would orphan."""
    found = [entry for entry in os.scandir(root) if _OF_TORCH_DIST.fullmatch(entry.name)]
    for entry in found:
        if entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)  # noqa: PTH108 - what scandir gave


def _remove_format2(root: Path) -> None:
    """Remove a save of format 2, finished or not; what it is known by goes last."""
    if not (root / SAVE_NAME).is_file():
        return
    for name in (ARRAYS_NAME, OBJECTS_NAME):
        if (root / name).exists():
            shutil.rmtree(root / name)
    for path in (root / MANIFEST_NAME).iterdir():
        if path != root / SAVE_NAME:
            path.unlink()
    (root / SAVE_NAME).unlink()
    (root / MANIFEST_NAME).rmdir()
    sync_path(root)


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


def _remove_remains(directory: Path) -> None:
    """Remove what a process that was killed had not renamed into place, or not quite removed."""
    with os.scandir(directory) as scan:
        entries = list(scan)
    for entry in entries:
        if entry.name.startswith((REMOVED_PREFIX, PARTIAL_PREFIX)):
            _remove(Path(entry.path))
        elif is_directory(entry) and not is_elsewhere(entry):
            _remove_remains(Path(entry.path))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
