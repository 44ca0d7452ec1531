"""Whole arrays in files of safetensors with an index, as Hugging Face's tools write and read them.

Each file is the size of a JSON header, the header, and the elements of each tensor in C order.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Shape
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.formats.checkpoints import (
    BlockPart,
    Format1Checkpoint,
    block_reads,
    found_among,
)
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.formats.pack import LENGTH, MAX_HEADER_NBYTES
from dist_ckpt_strategies.formats.pack_header import MALFORMED
from dist_ckpt_strategies.formats.pack_read import read_jobs
from dist_ckpt_strategies.storage.files import MARKER_NAME, file_errors, opened_file, write_vector
from dist_ckpt_strategies.storage.io_pool import Transfer
from dist_ckpt_strategies.storage.store import ArrayRead
from dist_ckpt_strategies.tools.plan_convert import SAFETENSORS_DTYPES, FileTask, contiguous_runs
from dist_ckpt_strategies.tools.writers import Read, Target, bytes_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
_WRITE = os.O_WRONLY | os.O_CREAT  # a file has several writers


def holds_safetensors(root: Path) -> bool:
    """Whether a directory without a marker has a model's arrays: an index, or the only file."""
    with file_errors(None, root):
        if (root / MARKER_NAME).exists():
            return False
        return any((root / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))


class SafetensorsCheckpoint(Format1Checkpoint):
    """A model's arrays, read like a checkpoint's; there are no objects, and no common state."""

    @cached_property
    def _places(self) -> dict[str, tuple[ArraySpec, str, int]]:
        """Each array, its file, and its first byte there."""
        names, places = [SINGLE_NAME], {}
        if INDEX_NAME in self._store.names(INDEX_NAME):
            with _damage(self._store.path(INDEX_NAME)):
                weights = json.loads(self._store.read(INDEX_NAME))["weight_map"]
                names = sorted({Path(name).name for name in weights.values()})
        for name in names:
            with _damage(self._store.path(name)):
                nbytes = min(
                    *LENGTH.unpack(self._store.read(name, 0, LENGTH.size)), MAX_HEADER_NBYTES
                )
                tensors = json.loads(self._store.read(name, LENGTH.size, nbytes))
                tensors.pop("__metadata__", None)
                for key, tensor in sorted(tensors.items()):
                    first, end = tensor["data_offsets"]
                    spec = _spec(key, tuple(tensor["shape"]), tensor["dtype"], end - first)
                    places[key] = spec, name, LENGTH.size + nbytes + first
        return places

    def keys(self) -> Iterator[str]:
        """See Format1Checkpoint."""
        return iter(self._places)

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """See Format1Checkpoint."""
        places = found_among(self._places, keys, self._root)
        return {key: spec for key, (spec, *_) in places.items()}

    def object_ids(self) -> Iterator[ObjectId]:
        """See Format1Checkpoint."""
        return iter(())

    def common_content(self) -> bytes:
        """See Format1Checkpoint: an empty one."""
        return dump_object({}, name="common state")

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See Format1Checkpoint."""
        parts: list[BlockPart] = []
        for read in reads:
            array, name, start = self._places[read.array.key]
            parts.append((name, start, array.key, array.shape, read.region, read.target))
        if not parts:
            return Transfer((), 0)
        jobs = read_jobs(self._store, block_reads(parts), {})
        return Transfer(jobs, self._store.num_readers)


@contextmanager
def _damage(path: str) -> Iterator[None]:
    try:
        yield
    except (*MALFORMED, struct.error) as error:
        text = f"{path} is damaged: it describes no tensors ({error!r})"
        raise CorruptCheckpointError(text, path=path) from error


def _spec(key: str, shape: Shape, dtype: str, nbytes: int) -> ArraySpec:
    spec = ArraySpec(key, shape, _DTYPES[dtype], tuple(max(1, size) for size in shape))
    if spec.nbytes != nbytes:
        raise ValueError(f"{key}: {nbytes} bytes, expected {spec.nbytes}")
    return spec


def write_safetensors(target: Target, task: FileTask, read: Read) -> None:
    """See ``Write``. Other threads and ranks write to the same file."""
    (item,) = task.items
    path, itemsize = target.files.path(task.name), item.array.dtype.itemsize
    with file_errors(task.key, path), opened_file(path, _WRITE) as handle:
        for block in item.blocks(target.block_nbytes):
            content, done = bytes_of(target.block(item, block, read)), 0
            for first, count in contiguous_runs(block, item.array.shape):
                run = content[done : done + count * itemsize]
                os.lseek(handle, item.byte_offset + first * itemsize, os.SEEK_SET)
                write_vector(handle, [run])
                done += run.size
        os.fsync(handle)


def finish_safetensors(target: Target, *_: Any) -> None:
    """See ``Finish``. By the index the files are known to be complete."""
    files, plan = target.files, target.plan
    for name, header in plan.headers.items():
        path = files.path(name)
        with file_errors(None, path), opened_file(path, _WRITE) as handle:
            write_vector(handle, [np.frombuffer(header, np.uint8)])
            os.fsync(handle)
    weights = {task.key: task.name for task in plan.tasks}
    index = {
        "metadata": {"total_size": plan.nbytes},
        "weight_map": {key: weights[key] for key in sorted(weights)},
    }
    files.write(INDEX_NAME, json.dumps(index, indent=2).encode())
