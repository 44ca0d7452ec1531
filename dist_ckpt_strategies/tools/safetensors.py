"""Whole arrays in files of safetensors with an index, as Hugging Face's tools write and read them.

Each file is the size of a JSON header, the header, and the elements of each tensor in C order.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region, Shape
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CorruptCheckpointError,
    similar_text,
)
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.formats.pack import LENGTH, MAX_HEADER_NBYTES
from dist_ckpt_strategies.formats.pack_header import MALFORMED
from dist_ckpt_strategies.storage.files import MARKER_NAME, Directory, file_errors
from dist_ckpt_strategies.storage.io_pool import Transfer
from dist_ckpt_strategies.storage.store import ArrayRead
from dist_ckpt_strategies.tools.plan_convert import SAFETENSORS_DTYPES, contiguous_runs

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


def holds_safetensors(root: Path) -> bool:
    """Whether a directory without a marker has a model's arrays: an index, or the only file."""
    with file_errors(None, root):
        if (root / MARKER_NAME).exists():
            return False
        return any((root / name).is_file() for name in (INDEX_NAME, SINGLE_NAME))


class SafetensorsCheckpoint:
    """A model's arrays, to be read as those of a checkpoint: there are no objects or common state.

    Attributes:
        save: what consumers read through; files that change meanwhile are not noticed.
        identity: empty, since nothing tells.
    """

    identity = ""

    def __init__(self, root: Path) -> None:
        self._root, self._files = root, Directory(root)

    @property
    def save(self) -> "SafetensorsCheckpoint":
        """See the class."""
        return self

    def read(self, step: Any) -> Any:
        """What a step gives."""
        return step()

    @cached_property
    def _places(self) -> dict[str, tuple[ArraySpec, str, int]]:
        """Each array, its file, and its first byte there."""
        names, places = [SINGLE_NAME], {}
        if INDEX_NAME in self._files.names(INDEX_NAME):
            with _damage(self._files.path(INDEX_NAME)):
                weights = json.loads(self._files.read(INDEX_NAME))["weight_map"]
                names = sorted({Path(name).name for name in weights.values()})
        for name in names:
            with _damage(self._files.path(name)):
                nbytes = min(
                    *LENGTH.unpack(self._files.read(name, 0, LENGTH.size)), MAX_HEADER_NBYTES
                )
                tensors = json.loads(self._files.read(name, LENGTH.size, nbytes))
                tensors.pop("__metadata__", None)
                for key, tensor in sorted(tensors.items()):
                    first, end = tensor["data_offsets"]
                    spec = _spec(key, tuple(tensor["shape"]), tensor["dtype"], end - first)
                    places[key] = spec, name, LENGTH.size + nbytes + first
        return places

    def keys(self) -> Iterator[str]:
        """The keys of all arrays."""
        return iter(self._places)

    def find(self, keys: Iterable[str]) -> dict[str, ArraySpec]:
        """The arrays of these keys, sorted by key; ArrayNotFoundError names a missing one."""
        for key in sorted(keys):
            if key not in self._places:
                text = f"{key}: no such array among the {len(self._places)} in {self._root}"
                text += similar_text(key, list(self._places))
                raise ArrayNotFoundError(text, key=key, path=str(self._root))
        return {key: self._places[key][0] for key in sorted(keys)}

    def blocks(self, key: str) -> Iterator[tuple[Region, int]]:
        """The whole array, written by rank 0."""
        yield Region.whole(self._places[key][0].shape), 0

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """Read regions of arrays, on this thread; all is done when it returns."""
        for read in reads:
            spec, name, start = self._places[read.array.key]
            whole = np.empty(read.region.shape, spec.dtype.numpy)
            memory: Any = whole.reshape(-1).view(np.uint8)
            done = 0
            for first, count in contiguous_runs(read.region, spec.shape):
                run = memory[done : done + count * spec.dtype.itemsize]
                self._files.read_into(name, start + first * spec.dtype.itemsize, [run])
                done += run.size
            read.target[...] = whole
        return Transfer((), 0)

    def object_ids(self) -> Iterator[ObjectId]:
        """None."""
        return iter(())

    def object_path(self, object_id: ObjectId) -> str:
        """See Format1Checkpoint."""
        return f"{self._root}/{object_id.unique_key}"

    def object_content(self, object_id: ObjectId) -> bytes:
        """There is none."""
        text = f"{object_id.unique_key}: {self._root} has files of safetensors, and no objects"
        raise ArrayNotFoundError(text, key=object_id.key)

    def common_content(self) -> bytes:
        """An empty common state."""
        return dump_object({}, name="common state")


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
