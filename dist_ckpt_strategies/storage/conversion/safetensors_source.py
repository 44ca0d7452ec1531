"""Files of safetensors, read box by box; they hold arrays and nothing else."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.errors import CorruptCheckpointError, StrategyError
from dist_ckpt_strategies.plan.convert import SAFETENSORS_DTYPES, slabs
from dist_ckpt_strategies.spec.conversion import SourceArray
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.marker import CheckpointMarker
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.disk.files import file_errors, read_file
from dist_ckpt_strategies.storage.format2.inner_codec import at_box
from dist_ckpt_strategies.storage.raw_chunks import read_buffered

INDEX_NAME = "model.safetensors.index.json"

_SIZE_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Where the elements of an array lie, in C order."""

    array: SourceArray
    path: str
    byte_offset: int


class SafetensorsSource:
    """The arrays that ``model.safetensors.index.json`` lists; see Source. No digests, no objects.

    Args:
        root: the directory.

    Raises:
        CorruptCheckpointError: the index or a file's header is damaged.
        IncompleteCheckpointError: a file is missing.
    """

    marker = CheckpointMarker("safetensors")

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tensors = dict(sorted(_tensors_of(root)))

    @cached_property
    def arrays(self) -> Sequence[SourceArray]:
        """See Source."""
        return tuple(tensor.array for tensor in self._tensors.values())

    @property
    def objects(self) -> Sequence[ObjectId]:
        """See Source."""
        return ()

    @property
    def identity(self) -> str:
        """See Source."""
        raise self._arrays_only()

    @property
    def layout(self) -> Mapping[str, int]:
        """See Source."""
        return {}

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """See Source."""
        tensor = self._tensors[key]
        array = tensor.array
        itemsize = array.dtype.itemsize
        strides = _strides(array.shape)
        with file_errors(key, tensor.path), open(tensor.path, "rb", 0) as file:  # noqa: PTH123
            for run in _runs(region, array.shape):
                first = sum(o * s for o, s in zip(run.offset, strides, strict=True))
                part = at_box(target, run.within(region)).reshape(-1).view(np.uint8)
                at = tensor.byte_offset + first * itemsize
                if read_buffered(file.fileno(), at, part) != part.size:
                    raise _damaged(tensor.path, "it has become shorter")

    def object_content(self, object_id: ObjectId) -> bytes:  # noqa: ARG002
        """See Source."""
        raise self._arrays_only()

    def common_content(self) -> bytes:
        """See Source."""
        raise self._arrays_only()

    def _arrays_only(self) -> StrategyError:
        return StrategyError(
            f"{self.root}: files of safetensors hold a model's arrays; a checkpoint needs its "
            "common state and objects too"
        )


def _runs(region: Region, shape: Extent) -> Iterator[Region]:
    """The parts of a region that each lie in one piece of an array in C order."""
    whole = len(shape)
    while whole and region.shape[whole - 1] == shape[whole - 1]:
        whole -= 1
    limit = math.prod(region.shape[max(0, whole - 1) :])
    return slabs(region, 1, max(1, limit))


def _strides(shape: Extent) -> Extent:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _tensors_of(root: Path) -> Iterator[tuple[str, _Tensor]]:
    path = root / INDEX_NAME
    with file_errors(None, path):
        content = read_file(path)
    try:
        weights = json.loads(content)["weight_map"]
        names = sorted({str(name) for name in weights.values()})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(str(path), f"it is no index of safetensors ({error!r})") from error
    for name in names:
        if "/" in name or name in {"", ".", ".."}:
            raise _damaged(str(path), f"it names the file {name!r}")
        for key, tensor in _tensors_in(f"{root}/{name}"):
            if weights.get(key) == name:
                yield key, tensor


def _tensors_in(path: str) -> Iterator[tuple[str, _Tensor]]:
    with file_errors(None, path), open(path, "rb", 0) as file:  # noqa: PTH123
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_SIZE_NBYTES), "little")
        if length > min(_MAX_HEADER_NBYTES, size - _SIZE_NBYTES):
            raise _damaged(path, f"its header has {length} bytes, the file {size}")
        content = file.read(length)
    start = _SIZE_NBYTES + length
    try:
        for key, fields in json.loads(content).items():
            if key != "__metadata__":
                yield key, _tensor(key, fields, path, start, size)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its header describes no tensors ({error!r})") from error


def _tensor(key: str, fields: Any, path: str, start: int, size: int) -> _Tensor:
    shape = tuple(map(int, fields["shape"]))
    dtype: DType = _DTYPES[fields["dtype"]]
    array = SourceArray(key, shape, dtype, tuple(max(1, n) for n in shape))
    first, last = fields["data_offsets"]
    if last - first != array.nbytes or first < 0 or start + last > size:
        raise ValueError(f"{key}: bytes {first} to {last} of {size - start}")
    return _Tensor(array, path, start + first)


def _damaged(path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} is damaged: {what}", path=path)
