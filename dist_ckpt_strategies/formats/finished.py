"""When a directory counts as a checkpoint: ``metadata.json`` is its last file, and whole."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointNotFoundError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.manifest import SAVE_NAME
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.object_files import object_ids
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    make_directories,
    read_file,
    require_directory,
    sync_path,
    write_file,
)
from dist_ckpt_strategies.storage.io_pool import limited
from dist_ckpt_strategies.storage.time_limit import raise_if_cancelled

WITHDRAWN_NAME = REMOVED_PREFIX + MARKER_NAME
"""The marker of a checkpoint that is being replaced, until its arrays have been removed."""

HOLDS_SAFETENSORS = (
    "it holds files of safetensors, a model's arrays and no checkpoint; the library safetensors "
    "reads them, and `dist-ckpt diff` compares what `dist-ckpt convert` wrote with a checkpoint"
)
"""What a directory of such files is, and what reads it; follows what was expected there."""


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
    try:
        return CheckpointMarker.from_json(content)
    except (ValueError, TypeError) as error:
        raise IncompleteCheckpointError(
            f"{root} is incomplete: {path} is not whole ({error})", path=str(path)
        ) from error


@limited
def is_finished(root: Path) -> bool:
    """Whether the directory holds a checkpoint with a whole marker."""
    try:
        read_marker(root)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return False
    return True


@limited
def publish(root: Path, marker: CheckpointMarker) -> None:
    """Make the checkpoint visible: the marker is there whole, or not at all."""
    path = root / MARKER_NAME
    with file_errors(None, path):
        write_file(path, marker.to_json())


@limited
def make_directory(root: Path) -> None:
    """Make the directory, durably; one that is there stays as it is."""
    with file_errors(None, root):
        make_directories(root)


@limited
def withdraw_marker(root: Path) -> None:
    """Make the directory count as incomplete, durably, before anything of it changes.

    That it has held a checkpoint is still known afterwards: see has_withdrawn_marker. Several ranks
    may do it at once.
    """
    path = root / MARKER_NAME
    with file_errors(None, path), suppress(FileNotFoundError):
        raise_if_cancelled()
        path.replace(root / WITHDRAWN_NAME)
        sync_path(root)


@limited
def has_withdrawn_marker(root: Path) -> bool:
    """Whether a save has begun to replace a checkpoint, and has not removed its arrays yet."""
    return (root / WITHDRAWN_NAME).exists()


def staged_markers(root: Path) -> list[Path]:
    """Markers of saves that are decided and not finished; one at most, but for changes by hand."""
    return sorted(root.glob(f"{PARTIAL_PREFIX}*/{MARKER_NAME}"))


def has_interrupted_commit(root: Path) -> bool:
    """Whether a save was killed while it moved its files into place; see staging."""
    return not (root / MARKER_NAME).exists() and bool(staged_markers(root))


def are_safetensors(names: Iterable[str]) -> bool:
    """Whether there are files of safetensors among those of a directory without a marker."""
    return any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)


def _what_is_there(root: Path) -> str:
    """What a directory without a marker holds, in words."""
    if has_interrupted_commit(root):
        return (
            "a save was interrupted while it moved its files into place, and nothing is lost: "
            "`dist-ckpt verify`, dist_ckpt_strategies.load and load_latest complete it"
        )
    staged = sorted(path.name for path in root.glob(f"{PARTIAL_PREFIX}*/"))
    if staged:
        return f"a save began and has not come to its end; what it has written is in {staged[-1]}"
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
