"""When a directory counts as a checkpoint: ``metadata.json`` is its last file, and whole."""

from __future__ import annotations

from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointNotFoundError, IncompleteCheckpointError
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.storage.disk.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    REMOVED_PREFIX,
    file_errors,
    make_directories,
    read_file,
    require_directory,
    sync_path,
    write_file,
)
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.format2.manifest import SAVE_NAME
from dist_ckpt_strategies.storage.lifecycle.model_files import HOLDS_SAFETENSORS, are_safetensors
from dist_ckpt_strategies.storage.objects.files import object_ids

_WITHDRAWN_NAME = REMOVED_PREFIX + MARKER_NAME
"""The marker of a checkpoint that is being replaced, until its arrays have been removed."""


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


def make_directory(root: Path) -> None:
    """Make the directory, durably; one that is there stays as it is."""
    with file_errors(None, root):
        make_directories(root)


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


def _what_is_there(root: Path) -> str:
    """In words. Format 2 is known by the first file of a save; what it wrote is not counted."""
    if (root / SAVE_NAME).exists():
        return (
            f"{SAVE_NAME} says that a save of format ('zarr', 2) began and has not come to its end"
        )
    if are_safetensors(path.name for path in root.iterdir()):
        return HOLDS_SAFETENSORS
    num_arrays = sum(1 for _ in Zarr2Layout(root).keys())
    num_objects = sum(1 for _ in object_ids(root))
    common = "is there" if (root / COMMON_NAME).exists() else "is missing too"
    return f"{COMMON_NAME} {common}; found {num_arrays} arrays and {num_objects} objects"
