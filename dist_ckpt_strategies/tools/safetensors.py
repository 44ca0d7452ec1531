"""Files of safetensors: a model's arrays for other tools. Written region by region, and compared.

A file is the size of a JSON header, the header, and the elements of each tensor in C order. There
are no digests and no objects.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dist_ckpt_strategies.core.array import DType, ObjectId
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import CorruptCheckpointError, StrategyError
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.direct_io import begin_writeback
from dist_ckpt_strategies.storage.files import file_errors, read_file
from dist_ckpt_strategies.tools.plan_convert import (
    SAFETENSORS_DTYPES,
    ConvertPlan,
    FileTask,
    SourceArray,
)
from dist_ckpt_strategies.tools.readers import SAFETENSORS_INDEX, CheckpointReader, read_rows
from dist_ckpt_strategies.tools.writers import (
    Contents,
    Memory,
    ReadRegion,
    TargetFiles,
    read_item,
)

_SIZE_NBYTES = 8
_MAX_HEADER_NBYTES = 100_000_000
_ALIGNED_NBYTES = 8
_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Tensor:
    """An array, and where its elements lie."""

    array: SourceArray
    path: str
    byte_offset: int


class SafetensorsReader(CheckpointReader):
    """The arrays that ``model.safetensors.index.json`` lists; see CheckpointReader.

    Args:
        root: the directory.

    Raises:
        CorruptCheckpointError: the index or a file's header is damaged.
        IncompleteCheckpointError: a file is missing.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root, CheckpointMarker("safetensors"))
        self._tensors = dict(sorted(_tensors_of(root)))

    @property
    def arrays(self) -> Sequence[SourceArray]:
        """See CheckpointReader."""
        return tuple(tensor.array for tensor in self._tensors.values())

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """See CheckpointReader."""
        tensor = self._tensors[key]
        read_rows(tensor.path, key, tensor.byte_offset, tensor.array.shape, region, target)

    def object_content(self, object_id: ObjectId) -> bytes:  # noqa: ARG002
        """See CheckpointReader."""
        raise self._arrays_only()

    def common_content(self) -> bytes:
        """See CheckpointReader."""
        raise self._arrays_only()

    def _stored_objects(self) -> Sequence[ObjectId]:
        return ()

    def _arrays_only(self) -> StrategyError:
        return StrategyError(
            f"{self.root}: files of safetensors hold a model's arrays; a checkpoint needs its "
            "common state and objects too"
        )


def _tensors_of(root: Path) -> Iterator[tuple[str, _Tensor]]:
    path = root / SAFETENSORS_INDEX
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


class SafetensorsWriter:
    """Writes files of safetensors and their index; see CheckpointWriter."""

    marker = None

    def __init__(self, files: TargetFiles, plan: ConvertPlan) -> None:
        self._files, self._plan = files, plan
        self._memory = Memory()
        self._headers = dict(_headers(plan))

    def begin(self) -> None:
        """See CheckpointWriter. Every file gets its header."""
        for name, header in self._headers.items():
            self._files.write(name, header)

    def write(self, task: FileTask, read: ReadRegion) -> None:
        """See CheckpointWriter."""
        path = self._files.path(task.name)
        with file_errors(task.key, path), open(path, "r+b", 0) as file:  # noqa: PTH123
            for item in task.items:
                elements = read_item(item, item.region, read, self._memory)
                at = len(self._headers[task.name]) + item.byte_offset
                _write_at(file.fileno(), elements.reshape(-1).view(np.uint8), at)
            if self._files.is_flushed_each:
                os.fsync(file.fileno())
            else:
                begin_writeback(file.fileno())

    def finish(self, _records: Mapping[int, Any], _contents: Contents) -> None:
        """See CheckpointWriter. By the index the files are known to be complete."""
        plan = self._plan
        weights = {item.array.key: task.name for task in plan.tasks for item in task.items}
        index = {
            "metadata": {"total_size": plan.nbytes},
            "weight_map": {key: weights[key] for key in sorted(weights)},
        }
        self._files.write(SAFETENSORS_INDEX, json.dumps(index, indent=2).encode())


def _headers(plan: ConvertPlan) -> Iterator[tuple[str, bytes]]:
    """The beginning of each file: the size of its description, and the description."""
    files: dict[str, dict[str, Any]] = {}
    for task in plan.tasks:
        for item in task.items:
            tensor = {
                "dtype": SAFETENSORS_DTYPES[item.array.dtype],
                "shape": item.array.shape,
                "data_offsets": [item.byte_offset, item.byte_offset],
            }
            fields = files.setdefault(task.name, {}).setdefault(item.array.key, tensor)
            fields["data_offsets"][1] = item.byte_offset + item.nbytes
    for name, tensors in files.items():
        fields = {"__metadata__": {"format": "pt"}, **tensors}
        content = json.dumps(fields, separators=(",", ":")).encode()
        content += b" " * (-len(content) % _ALIGNED_NBYTES)
        yield name, len(content).to_bytes(_SIZE_NBYTES, "little") + content


def _write_at(handle: int, content: Any, byte_offset: int) -> None:
    done = 0
    while done < content.size:
        done += os.pwrite(handle, content[done:].data, byte_offset + done)
