"""Plain Zarr v3, read and written by TensorStore.

Objects and the common state lie beside the arrays, as in ("zarr", 1).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, DType, Region
from dist_ckpt_strategies.errors import IncompleteCheckpointError, array_not_found
from dist_ckpt_strategies.formats.checkpoints import Format1Checkpoint
from dist_ckpt_strategies.formats.zarr2 import open_tensorstore, tensorstore_errors
from dist_ckpt_strategies.storage.files import PARTIAL_PREFIX, REMOVED_PREFIX
from dist_ckpt_strategies.storage.io_pool import Job, Transfer
from dist_ckpt_strategies.storage.store import ArrayRead
from dist_ckpt_strategies.tools.plan_convert import FileTask
from dist_ckpt_strategies.tools.writers import Objects, Read, Target, write_objects

METADATA_NAME = "zarr.json"

_CHUNK = re.compile(r"(.+)/c(/\d+)*")
"""The name of a chunk, as Zarr v3 names them by default: the array's key comes first."""


class Zarr3Checkpoint(Format1Checkpoint):
    """A checkpoint of format ("zarr", 3), of any codecs; see Format1Checkpoint."""

    def keys(self) -> Iterator[str]:
        """See Format1Checkpoint."""
        named = (key for key, names in _folders(self._root) if METADATA_NAME in names)
        return (key for key in named if not _is_group(self._root / key / METADATA_NAME))

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """See Format1Checkpoint."""
        specs = {}
        for key in sorted(keys):
            path = self._root / key
            try:
                opened = _opened(path, key)
            except IncompleteCheckpointError as error:
                raise array_not_found(key, [*self.keys()], self._root) from error
            chunk = opened.chunk_layout.write_chunk.shape or ()
            specs[key] = ArraySpec(
                key, opened.shape, DType.named(opened.dtype.name, key=key), chunk
            )
        return specs

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See Format1Checkpoint."""
        jobs = [Job(r.array.key, self._root / r.array.key, partial(self._read, r)) for r in reads]
        return Transfer(jobs, self._options.io_threads)

    def _read(self, read: ArrayRead) -> None:
        key, target = read.array.key, read.target
        path = self._root / key
        opened = _opened(path, key)
        with tensorstore_errors(key, path):
            elements = np.asarray(opened[read.region.slices()].read().result())
        bits = np.dtype((np.void, target.dtype.itemsize))
        np.copyto(target.view(bits), elements.view(bits))


def undescribed_keys(root: Path) -> Iterator[str]:
    """Keys of arrays that only their chunks tell of; once for each folder of these."""
    for folder, names in _folders(root):
        for name in names:
            if chunk := _CHUNK.fullmatch(f"{folder}/{name}"):
                if not (root / chunk[1] / METADATA_NAME).exists():
                    yield chunk[1]
                break


def _is_group(path: Path) -> bool:
    """Whether the file describes a group; what cannot be read is said where an array is opened."""
    with suppress(OSError, ValueError, AttributeError):
        return bool(json.loads(path.read_bytes()).get("node_type") == "group")
    return False


def _folders(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Each folder below a checkpoint, and its files."""
    for folder, below, names in os.walk(root):
        below[:] = [n for n in below if not n.startswith((REMOVED_PREFIX, PARTIAL_PREFIX))]
        if Path(folder) != root:
            yield Path(folder).relative_to(root).as_posix(), names


def write_zarr3(target: Target, task: FileTask, read: Read) -> None:
    """See ``Write``: uncompressed chunks, one at a time."""
    opened, key = _created(target, task.items[0].array), task.key
    for item in task.items:
        region = item.region.intersect(Region.whole(item.array.shape))
        assert region is not None  # noqa: S101 - a chunk has elements of the array
        elements = target.block(item, region, read)
        with tensorstore_errors(key, target.files.root / key, {}):
            opened[region.slices()].write(elements).result()


def finish_zarr3(target: Target, _: Mapping[int, Any], objects: Objects, common: bytes) -> None:
    """See ``Finish``."""
    for array in target.plan.arrays:
        _created(target, array)  # those without elements too
    write_objects(target, objects, common)
    group = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
    arrays = {PurePath(array.key) for array in target.plan.arrays}
    for folder in {PurePath(), *(folder for key in arrays for folder in key.parents)} - arrays:
        target.files.write(str(folder / METADATA_NAME), group)


def _created(target: Target, array: ArraySpec) -> Any:
    """The array, made unless another thread or rank has made it."""
    grid = {"name": "regular", "configuration": {"chunk_shape": array.chunk_shape}}
    metadata = {"shape": array.shape, "data_type": array.dtype.value, "chunk_grid": grid}
    path = target.files.root / array.key
    with tensorstore_errors(array.key, path, {}):
        return open_tensorstore(
            "zarr3",
            path,
            metadata=metadata,
            create=True,
            open=True,
            store_data_equal_to_fill_value=True,  # a chunk that is not there is lost
        )


def _opened(path: Path, key: str) -> Any:
    with tensorstore_errors(key, path):
        return open_tensorstore("zarr3", path)
