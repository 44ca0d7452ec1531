"""The common state of a checkpoint on the nodes: each has ``common.pt`` and ``metadata.json``.

The shards of a save are below a directory, its session, that is named by the digest of its
``common.pt``.
"""

from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from xxhash import xxh3_128_hexdigest

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather_bytes, run_collectively
from dist_ckpt_strategies.errors import CorruptCheckpointError, IncompleteCheckpointError
from dist_ckpt_strategies.formats.locations import CheckpointMarker, is_finished
from dist_ckpt_strategies.local.scan import BACKEND, SESSION
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import OPENING, WORK, Deadline, run_within

VERSION = 1
"""Of the backend."""


def restore_common(comm: Communicator, root: Path, name: str, timeout_s: float) -> None:
    """Write the common state and the marker on every node that has lost them. Collective."""

    def own() -> bytes:
        known = sessions(root)
        with suppress(IncompleteCheckpointError):
            content = Directory(root).read(COMMON_NAME) if is_finished(root) else b""
            return content if not known or xxh3_128_hexdigest(content) in known else b""
        return b""

    opening = Deadline.after(OPENING * timeout_s)
    everyone = run_and_gather_bytes(comm, lambda: run_within(opening, root, own))
    common = next(filter(None, everyone), None)

    def restore() -> None:
        if common is None:
            raise IncompleteCheckpointError(
                f"{name}: no node has an undamaged {COMMON_NAME} and metadata.json; load an older "
                "checkpoint",
                path=name,
            )
        if everyone[comm.rank] != common:
            work = Deadline.after(WORK * timeout_s)
            run_within(work, root, partial(write_common, root, common))

    run_collectively(comm, restore)


def write_common(root: Path, common: bytes) -> None:
    """Write ``common.pt`` and the marker. All ranks of a node may: they write equal files."""
    Directory(root).write(COMMON_NAME, common, key="common state")
    Directory(root).write(MARKER_NAME, CheckpointMarker(BACKEND, VERSION).to_json())


def sessions(root: Path) -> list[str]:
    """Digests of the common states of which local shards are on this node."""
    return sorted(filter(SESSION.fullmatch, Directory(root).names()))


def require_common_of(known: Collection[str], common_path: Path, found: str, expected: str) -> None:
    """Raise unless ``common.pt``, which Megatron-Core has read, belongs to the shards to load."""
    if found == expected and (found in known or not known):
        return
    what = f"{expected}, as on the first rank" if found != expected else " or ".join(known)
    raise CorruptCheckpointError(
        f"common state: {common_path} has digest {found or '(no such file)'}, expected {what}; it "
        "is damaged, or of another save; prepare_local_load restores it from another node",
        path=str(common_path),
    )
