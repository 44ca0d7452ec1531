"""What is in a directory that a checkpoint goes to, and what of it a save may replace."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from dist_ckpt_strategies.errors import CheckpointExistsError
from dist_ckpt_strategies.formats.manifest import FOLDER_NAMES, SAVE_NAME
from dist_ckpt_strategies.formats.object_files import object_ids, object_path
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.storage.files import file_errors, is_elsewhere
from dist_ckpt_strategies.storage.io_pool import limited

_MAX_NAMED = 5

_ENDS = re.compile(r"(?=/|\Z)")
"""Where the path of a directory above a key, or of its own, ends within it."""

_OF_TORCH_DIST = re.compile(r"__\d+_\d+\.distcp|\.metadata")
"""What torch.distributed.checkpoint names its files."""


def require_replaceable(root: Path, keys: Collection[str]) -> None:
    """Raise unless a directory without a marker holds arrays and objects of these keys only.

    Others may be a user's data.

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
    with file_errors(None, root):
        present = set(os.listdir(root))  # noqa: PTH208 - the names alone
    inside = sorted(key for key in keys if key.partition("/")[0] in present)
    above = {key[: match.start()]: key for key in inside for match in _ENDS.finditer(key)}
    for inner, key in above.items():
        # An array may be a link, which goes.
        if is_elsewhere(root / inner) and inner not in set(Zarr2Layout(root).keys()):
            raise CheckpointExistsError(
                f"{key}: {root / inner} is a link or another checkpoint, of which this key would "
                "become a part; save elsewhere",
                key=key,
                path=str(root / inner),
            )


@limited
def require_room_for_format2(root: Path) -> None:
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


def require_no_obstacle(source: Path, target: Path, going: Collection[str]) -> None:
    """Raise where something is in the way of a staged file, and does not go with an old checkpoint.

    Raises:
        CheckpointExistsError: there is a file where a directory is to go, or the other way round.
    """
    for entry in sorted_entries(source):
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
            require_no_obstacle(Path(entry.path), Path(path), going)


def sorted_entries(directory: Path | str) -> list[os.DirEntry[str]]:
    """What is in a directory, by name."""
    with os.scandir(directory) as scan:
        return sorted(scan, key=lambda entry: entry.name)


def names_of_contents(root: Path, *, with_torch_dist: bool) -> list[str]:
    """The arrays and objects of a checkpoint of either format: paths below its directory.

    Arrays of format 1 are directories, with Megatron-Core's locks beside them. ``common.pt`` is not
    among them: it may be the new one already. Nor are other checkpoints below the directory, what
    links lead to, and files of any other kind.

    Args:
        root: the checkpoint's directory.
        with_torch_dist: whether files of torch_dist are among them, which the marker of another
            format would orphan.
    """
    layout = Zarr2Layout(root)
    names = [str(object_path(root, found).relative_to(root)) for found in object_ids(root)]
    for key in sorted(layout.keys(), key=len, reverse=True):
        names += [key, *layout.lock_directories(key)]
    if (root / SAVE_NAME).is_file():
        names += [name for name in FOLDER_NAMES if (root / name).exists()]
    if with_torch_dist:
        names += [
            entry.name
            for entry in sorted_entries(root)
            if _OF_TORCH_DIST.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]
    return names
