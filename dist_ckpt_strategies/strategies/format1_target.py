"""Format ("zarr", 1): where a save goes, what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.formats.commit import DirectoryPlace
from dist_ckpt_strategies.formats.object_files import OBJECT_SUFFIX
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    dump_loadable,
    object_ids,
    remove_object,
    write_dumped,
)
from dist_ckpt_strategies.formats.zarr2 import Zarr2Layout
from dist_ckpt_strategies.formats.zarr2_engines import open_array_store
from dist_ckpt_strategies.megatron.shards import StateDict, metadata_object, metadata_tensor
from dist_ckpt_strategies.sharded.plan_grids import Cutting
from dist_ckpt_strategies.sharded.staged import Digests
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.files import require_directory
from dist_ckpt_strategies.storage.io_pool import Job, limited, run_pooled, run_with_limit
from dist_ckpt_strategies.strategies.save_planning import Planned

_OBJECT_THREADS = 8


class Format1Target:
    """A directory that a checkpoint of format ("zarr", 1) is saved to; see SaveTarget.

    Args:
        root: the directory, which exists.
        options: how to write.
        keeps_old: see DirectoryPlace.
        overwrite: see DirectoryPlace.
    """

    cutting = Cutting.WHOLE

    def __init__(self, root: Path, options: Options, *, keeps_old: bool, overwrite: bool) -> None:
        self.root = root
        self.place = DirectoryPlace(root, options, keeps_old=keeps_old, overwrite=overwrite)
        self._options = options
        self.writer: ArrayWriter

    @property
    def open_elsewhere(self) -> Callable[[], ArrayWriter]:
        """See SaveTarget."""
        return partial(open_array_store, self.place.location, self._options)

    def dump(self, obj: Any, *, name: str, allow: Allowed) -> bytes:
        """See SaveTarget."""
        return dump_loadable(obj, name=name, allow=allow)

    def begin(self, planned: Planned) -> None:
        """See SaveTarget."""
        self.place.begin(planned.keys)

    def require(self, owner: str) -> None:
        """See SaveTarget."""
        self.place.require(owner)
        self.writer = self.open_elsewhere()

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """See SaveTarget."""
        root = self.place.location
        jobs = (
            Job(
                name.key,
                root / f"{name.unique_key}{OBJECT_SUFFIX}",
                partial(write_dumped, root, name, content),
            )
            for name, content in objects.items()
        )
        run_pooled(jobs, _OBJECT_THREADS).wait(self._options.timeout_s)
        sync = partial(Zarr2Layout(root).sync_directories, {name.key for name in objects})
        run_with_limit(sync, root)

    def take_digests(self, digests: Digests) -> None:
        """See SaveTarget. The format has none."""

    def complete(self, planned: Planned, comm: Communicator) -> None:
        """See SaveTarget. The files are all there is."""


@limited
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
