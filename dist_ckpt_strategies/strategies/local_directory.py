"""A node's directory of a ("local_replicated", 1) checkpoint: common state, marker, parts.

Megatron-Core looks for ``common.pt`` and ``metadata.json`` on every rank; parts say what there is.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from dist_ckpt_strategies.comm.agree import agree
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.gather import agree_and_gather_bytes
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId
from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.commit import make_directory, write_marker
from dist_ckpt_strategies.formats.locations import is_finished
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.local.part_files import PartDirectory, read_first_header
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.storage.files import COMMON_NAME, file_errors, read_file, write_file
from dist_ckpt_strategies.storage.io_pool import limited, run_with_limit
from dist_ckpt_strategies.storage.time_limit import restart_limit

BACKEND = "local_replicated"
VERSION = 1

_MARKER = CheckpointMarker(BACKEND, VERSION)


def restore_common(comm: Communicator, root: Path, name: str) -> None:
    """Put the common state and the marker on every node that has lost them. Collective.

    Args:
        comm: all ranks.
        root: this rank's directory.
        name: the checkpoint, for messages.
    """

    def own() -> bytes:
        path = root / COMMON_NAME
        if not (is_finished(root) and path.exists()):
            return b""
        with file_errors("common state", path):
            content = read_file(path)
        return content if _is_of_this_save(root, content) else b""

    everyone = agree_and_gather_bytes(comm, partial(run_with_limit, own, root))
    restart_limit()
    common = next(filter(None, everyone), None)

    def restore() -> None:
        if common is None:
            raise IncompleteCheckpointError(
                f"{name}: no node has a whole {COMMON_NAME} and metadata.json", path=name
            )
        if everyone[comm.rank] != common:
            make_directory(root)
            complete_directory(root, common, is_marked=True)

    agree(comm, restore)


def digest_of_common(content: bytes) -> str:
    """By which parts know the common state of their save."""
    return xxhash.xxh3_128_hexdigest(content)


@limited
def complete_directory(root: Path, common: bytes, *, is_marked: bool) -> None:
    """Write what Megatron-Core looks for; ranks of one node write the same, each as a whole."""
    path = root / COMMON_NAME
    with file_errors("common state", path):
        if not (path.exists() and read_file(path) == common):
            write_file(path, common)
    if is_marked:
        write_marker(root, _MARKER)


def _content_of(directory: PartDirectory) -> Any:
    """What the newest part here says of the whole checkpoint; None if there is none."""
    part = read_first_header(directory)
    return part.content["common"] if part is not None else None


def _is_of_this_save(root: Path, common: bytes) -> bool:
    content = _content_of(PartDirectory(root))
    return content is None or content["common_digest"] == digest_of_common(common)


@limited
def require_common_of_save(checkpoint_dir: str | Path, content: StateDict) -> None:
    """Raise unless ``common.pt``, which Megatron-Core has read already, is that of the parts.

    Args:
        checkpoint_dir: as the caller of ``load`` names it.
        content: what a part says of the whole checkpoint.

    Raises:
        CorruptCheckpointError: it is another.
    """
    path = Path(checkpoint_dir).absolute() / COMMON_NAME
    with file_errors("common state", path):
        found = digest_of_common(read_file(path))
    if found != content["common_digest"]:
        raise CorruptCheckpointError(
            f"common state: {path} has digest {found}, expected {content['common_digest']}; it is "
            "damaged, or of another save",
            path=str(path),
        )


def stored_in(directory: PartDirectory) -> tuple[list[ArraySpec], list[ObjectId]]:
    """The arrays and objects of the whole checkpoint, as a part here says.

    Raises:
        IncompleteCheckpointError: there is no part.
    """
    content = _content_of(directory)
    if content is None:
        raise IncompleteCheckpointError(
            f"{directory}: this node has no part of the checkpoint; every rank has to call "
            "prepare_local_load first",
            path=str(directory),
        )
    stored = content["stored"]
    arrays = [
        ArraySpec(key, tuple(shape), DType(dtype), tuple(max(1, extent) for extent in shape))
        for key, shape, dtype in stored["arrays"]
    ]
    return arrays, [
        ObjectId(k, tuple(offset), tuple(shape)) for k, offset, shape in stored["objects"]
    ]
