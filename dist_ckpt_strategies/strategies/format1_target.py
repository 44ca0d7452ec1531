"""Format ("zarr", 1): where a save goes, what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from dist_ckpt_strategies.comm.agree import agree_on_first
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.plan.array_grid import Cutting
from dist_ckpt_strategies.run.staged import Digests
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.disk.files import require_directory
from dist_ckpt_strategies.storage.format1.engines import open_array_store
from dist_ckpt_strategies.storage.format1.layout import Zarr2Layout
from dist_ckpt_strategies.storage.lifecycle.clearing import DirectoryRoom
from dist_ckpt_strategies.storage.lifecycle.tokens import (
    has_token,
    leave_token,
    remove_token,
    require_token,
    superseded,
)
from dist_ckpt_strategies.storage.objects.pickled import (
    dump_object,
    object_ids,
    object_path,
    remove_object,
    write_dumped,
)
from dist_ckpt_strategies.storage.transfers import Job, run_pooled
from dist_ckpt_strategies.strategies.save_planning import Planned

_OBJECT_THREADS = 8


class Format1Target:
    """A directory that a checkpoint of format ("zarr", 1) is saved to; see SaveTarget.

    Args:
        root: the directory, which exists.
        options: how to write.
        keeps_old: leave an earlier checkpoint whole until this one is known to be one that can be
            saved. Not where the caller has replaced ``common.pt`` already.
    """

    cutting = Cutting.WHOLE
    dump = staticmethod(dump_object)

    def __init__(self, root: Path, options: Options, *, keeps_old: bool) -> None:
        self.root = root
        self._options = options
        self._keeps_old = keeps_old
        self._room = DirectoryRoom(root)
        self._token = ""
        self.writer: ArrayWriter = open_array_store(root, options)
        self.open_elsewhere: Callable[[], ArrayWriter] = partial(open_array_store, root, options)

    def examine(self) -> None:
        """See SaveTarget."""
        self._room.examine(keeps_old=self._keeps_old)

    def clear(self, planned: Planned, token: str) -> None:
        """See SaveTarget."""
        self._room.clear(planned.keys)
        leave_token(self.root, token)

    def require(self, token: str, owner: str) -> None:
        """See SaveTarget."""
        require_token(self.root, token, owner, self._options.timeout_s)
        self._token = token

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """See SaveTarget."""
        root = self.root
        jobs = (
            Job(name.key, object_path(root, name), partial(write_dumped, root, name, content))
            for name, content in objects.items()
        )
        run_pooled(jobs, _OBJECT_THREADS).wait(self._options.timeout_s)
        Zarr2Layout(root).sync_directories({name.key for name in objects})

    def take_digests(self, digests: Digests) -> None:
        """See SaveTarget. The format has none."""

    def require_current(self) -> None:
        """See SaveTarget."""
        if not has_token(self.root, self._token):
            raise superseded(self.root)

    def complete(self, planned: Planned, comm: Communicator) -> None:  # noqa: ARG002 - of the others
        """See SaveTarget. The files are all there is."""
        agree_on_first(comm, lambda: remove_token(self.root, self._token))


def stored_metadata(root: Path, *, with_objects: bool) -> StateDict:
    """ShardedTensors (and objects) without data for all that a checkpoint holds. Rank-local.

    Raises:
        CheckpointNotFoundError: the directory does not exist.
        CorruptCheckpointError: the description of an array cannot be read.
    """
    require_directory(root)
    layout = Zarr2Layout(root)
    found: StateDict = {key: metadata_tensor(layout.find(key)) for key in layout.keys()}
    if with_objects:
        found.update({name.unique_key: metadata_object(name) for name in object_ids(root)})
    return found


def remove_arrays(root: Path, key_prefix: str) -> int:
    """Remove every array and object whose key starts with a prefix; returns how many.

    Rank-local: one rank calls it.
    """
    require_directory(root)
    layout = Zarr2Layout(root)
    keys = [key for key in layout.keys() if key.startswith(key_prefix)]
    for key in sorted(keys, key=len, reverse=True):
        layout.remove(key)
    names = [name for name in object_ids(root) if name.key.startswith(key_prefix)]
    for name in names:
        remove_object(root, name)
    return len(keys) + len(names)
