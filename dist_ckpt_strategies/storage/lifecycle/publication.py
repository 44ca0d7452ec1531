"""When a directory counts as a checkpoint: ``metadata.json`` is its last file, and whole."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.disk import files
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    is_directory,
    is_elsewhere,
    make_directories,
    read_file,
    require_directory,
    sync_path,
    write_file,
)
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.format2.layout import ARRAYS_NAME
from dist_ckpt_strategies.storage.format2.manifest import MANIFEST_NAME, OBJECTS_NAME, SAVE_NAME
from dist_ckpt_strategies.storage.objects.files import object_ids, object_path

MARKER_NAME = files.MARKER_NAME

_WITHDRAWN_NAME = REMOVED_PREFIX + MARKER_NAME
"""The marker of a checkpoint that is being replaced, until its arrays have been removed."""

_MAX_NAMED = 5
_TOKEN_PAUSE_S = 0.02
_TOKEN_WAIT_S = 30.0
"""How long a network file system may take to show a new file to another machine."""

_ENDS = re.compile(r"(?=/|\Z)")
"""Where the path of a directory above a key, or of its own, ends within it."""

_OF_TORCH_DIST = re.compile(r"__\d+_\d+\.distcp|\.metadata")
"""What torch.distributed.checkpoint names its files."""


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
    try:
        return CheckpointMarker.from_json(content)
    except (ValueError, TypeError) as error:
        raise IncompleteCheckpointError(
            f"{root} is incomplete: {path} is not whole ({error})", path=str(path)
        ) from error


def is_finished(root: Path) -> bool:
    """Whether the directory holds a checkpoint with a whole marker."""
    try:
        read_marker(root)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    return True


def publish(root: Path, marker: CheckpointMarker) -> None:
    """Make the checkpoint visible: the marker is there whole, or not at all."""
    path = root / MARKER_NAME
    with file_errors(None, path):
        write_file(path, marker.to_json())


def require_unfinished(root: Path) -> None:
    """Raise if the directory holds a finished checkpoint. Changes nothing.

    Raises:
        CheckpointExistsError: it does.
    """
    if is_finished(root):
        raise CheckpointExistsError(
            f"{root} already holds a finished checkpoint; pass overwrite=True to replace it",
            path=str(root),
        )


def make_directory(root: Path) -> None:
    """Make the directory, durably; one that is there stays as it is."""
    with file_errors(None, root):
        make_directories(root)


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


def withdraw_marker(root: Path) -> None:
    """Make the directory count as incomplete, durably, before anything of it changes.

    That it has held a checkpoint is still known afterwards: see has_withdrawn_marker.
    """
    path = root / MARKER_NAME
    with file_errors(None, path):
        if path.exists():
            path.replace(root / _WITHDRAWN_NAME)
            sync_path(root)


def has_withdrawn_marker(root: Path) -> bool:
    """Whether a save has begun to replace a checkpoint, and has not removed its arrays yet."""
    return (root / _WITHDRAWN_NAME).exists()


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


def leave_token(root: Path, token: str) -> None:
    """Make a file by which others can tell that they see the same directory."""
    path = _token_path(root, token)
    with file_errors(None, path):
        path.touch()


def require_token(root: Path, token: str, owner: str, timeout_s: float) -> None:
    """Wait for the token that another rank has left.

    Raises:
        StorageError: it does not show up; the directory is not the same one.
    """
    path = _token_path(root, token)
    deadline = time.monotonic() + min(timeout_s / 2, _TOKEN_WAIT_S)
    while not path.exists():
        if time.monotonic() > deadline:
            raise StorageError(
                f"{root}: what {owner} has written there is not seen here; all ranks have to save "
                "to one directory, on a file system that they share",
                path=str(root),
            )
        time.sleep(_TOKEN_PAUSE_S)


def remove_token(root: Path, token: str) -> None:
    """Remove the file of ``leave_token``, which the next save to the directory removes too.

    Raises:
        StorageError: it is gone.
    """
    path = _token_path(root, token)
    with file_errors(None, path):
        try:
            path.unlink()
        except FileNotFoundError:
            raise superseded(root) from None


def superseded(root: Path | str) -> StorageError:
    """The error for a save whose place belongs to another one by now."""
    return StorageError(
        f"{root}: another save to it has begun before this one was finished, or what this one had "
        "written was removed; nothing of it was made visible",
        path=str(root),
    )


def _token_path(root: Path, token: str) -> Path:
    return root / (PARTIAL_PREFIX + token)


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


def _what_is_there(root: Path) -> str:
    """In words. Format 2 is known by the first file of a save; what it wrote is not counted."""
    if (root / SAVE_NAME).exists():
        return (
            f"{SAVE_NAME} says that a save of format ('zarr', 2) began and has not come to its end"
        )
    num_arrays = sum(1 for _ in Zarr2Layout(root).keys())
    num_objects = sum(1 for _ in object_ids(root))
    common = "is there" if (root / COMMON_NAME).exists() else "is missing too"
    return f"{COMMON_NAME} {common}; found {num_arrays} arrays and {num_objects} objects"
