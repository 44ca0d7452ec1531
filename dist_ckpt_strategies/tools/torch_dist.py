"""Checkpoints of torch_dist, as torch.distributed.checkpoint and Megatron-Core write and read them.

Every shard of an array lies in a ``.distcp`` file as ``torch.save`` wrote it: a zip file without
compression.

Source: torch.distributed.checkpoint.filesystem, torch.serialization, torch._utils.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.device import host_view
from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompatibleVersionError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    dump_content,
    dump_object,
    load_content,
    load_pickle,
)
from dist_ckpt_strategies.formats.zarr3 import at_box
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.direct_io import write_buffered
from dist_ckpt_strategies.storage.files import COMMON_NAME, file_errors, read_span
from dist_ckpt_strategies.tools.plan_convert import (
    ConvertPlan,
    FileTask,
    SourceArray,
)
from dist_ckpt_strategies.tools.readers import CheckpointReader, read_rows
from dist_ckpt_strategies.tools.torch_metadata import (
    METADATA_NAME,
    Span,
    extent_of,
    metadata_content,
    read_metadata,
)
from dist_ckpt_strategies.tools.writers import (
    Contents,
    Memory,
    ReadRegion,
    TargetFiles,
    read_item,
)

_DTYPES = frozenset(member.value for member in DType)
_STORAGE_DTYPES = MappingProxyType(
    {
        "BoolStorage": "bool",
        "ByteStorage": "uint8",
        "CharStorage": "int8",
        "ShortStorage": "int16",
        "IntStorage": "int32",
        "LongStorage": "int64",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
        "FloatStorage": "float32",
        "DoubleStorage": "float64",
        "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128",
    }
)
"""torch's names of the storages that tell their dtype, and the dtypes; others are untyped."""

_LOCAL_HEADER = struct.Struct("<26x2H")
"""Sizes of the name and of the extra field, at the end of the header before a record."""

_READ_NBYTES = 1 << 20
_MAX_OPENED = 4096
"""Shards whose place and checksum are remembered, a few hundred bytes each."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Where the elements of a shard lie.

    Attributes:
        path: of the file.
        byte_offset: of the first element in the file; None where the elements are not in C order.
        span: of the whole archive.
    """

    path: str
    byte_offset: int | None
    span: Span


class TorchDistReader(CheckpointReader):
    """A checkpoint of torch_dist; see CheckpointReader. torch.save leaves a CRC-32 of each shard.

    Args:
        root: the directory.
        marker: of the checkpoint.
        allow: classes that objects may be unpickled to: they are kept in lists.

    Raises:
        CorruptCheckpointError, UnsafeObjectError, IncompatibleVersionError: ``.metadata`` is
            damaged, names a class that no checkpoint needs, or describes arrays in another form.
    """

    def __init__(self, root: Path, marker: CheckpointMarker, allow: Allowed) -> None:
        super().__init__(root, marker)
        self._allow = allow
        self._arrays, self._objects = read_metadata(root / METADATA_NAME)
        self._open_shard = lru_cache(_MAX_OPENED)(open_shard)

    @cached_property
    def arrays(self) -> Sequence[SourceArray]:
        """See CheckpointReader."""
        return tuple(
            SourceArray(
                key,
                array.shape,
                array.dtype,
                shards=tuple((region, _writer(span.name)) for region, span in array.shards),
            )
            for key, array in sorted(self._arrays.items())
        )

    def _stored_objects(self) -> Sequence[ObjectId]:
        found = []
        for key in self._objects:
            object_id = ObjectId.parse(key)
            if object_id is None:
                raise IncompatibleVersionError(
                    f"{key}: {self.root} holds this value under a name that is none of a "
                    "ShardedObject; Megatron-Core 0.16 did not write it",
                    key=key,
                )
            found.append(object_id)
        return found

    def read(self, key: str, region: Region, target: HostArray) -> None:
        """See CheckpointReader. A shard's checksum is compared when it is first read from."""
        array = self._arrays[key]
        for stored, span in array.shards:
            common = stored.intersect(region)
            if common is None:
                continue
            path = f"{self.root}/{span.name}"
            shard = self._open_shard(path, key, span, array.dtype, stored.shape)
            part, wanted = at_box(target, common.within(region)), common.within(stored)
            if shard.byte_offset is None:
                found = at_box(host_view(self._whole_shard(key, shard)), wanted)
            else:
                found = part if part.flags.c_contiguous else np.empty(common.shape, part.dtype)
                read_rows(path, key, shard.byte_offset, stored.shape, wanted, found)
            if found is not part:
                bits = np.dtype((np.void, part.dtype.itemsize))
                np.copyto(part.view(bits), found.view(bits))

    def _whole_shard(self, key: str, shard: Shard) -> torch.Tensor:
        """A tensor whose elements are in another order than C; it is held whole."""
        content = _span_content(shard.path, key, shard.span)
        tensor: torch.Tensor = load_pickle(content, shard.path, key, self._allow)
        return tensor.detach().contiguous()

    def object_content(self, object_id: ObjectId) -> bytes:
        """See CheckpointReader. torch_dist keeps each in a list of one."""
        name = object_id.unique_key
        span = self._objects[name]
        path = f"{self.root}/{span.name}"
        found = load_pickle(_span_content(path, name, span), path, name, self._allow)
        if not isinstance(found, list) or len(found) != 1:
            raise CorruptCheckpointError(
                f"{name}: {path} holds a {type(found).__name__} at byte {span.byte_offset}, "
                "expected a list of one object",
                key=name,
                path=path,
            )
        return dump_content(found[0], name=name)


def _span_content(path: str, key: str, span: Span) -> bytes:
    with file_errors(key, path):
        return read_span(path, span.byte_offset, span.nbytes)


def _writer(name: str) -> int:
    """The rank that wrote a file, by its name; 0 where that does not say."""
    number = name.removeprefix("__").partition("_")[0]
    return int(number) if number.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tensor lies in the record of its storage, in elements."""

    dtype: str
    record: str
    offset: int
    shape: Shape
    strides: Shape

    @classmethod
    def of_v2(cls, storage: Any, offset: int, shape: Any, strides: Any, *_: Any) -> _Layout:
        return cls(storage[0], storage[1], int(offset), extent_of(shape), extent_of(strides))

    @classmethod
    def of_v3(
        cls, storage: Any, offset: int, shape: Any, strides: Any, *rest: Any
    ) -> _Layout:  # requires_grad, the hooks of the backward pass, dtype
        return cls(rest[2], storage[1], int(offset), extent_of(shape), extent_of(strides))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in C order."""
        step = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent > 1 and stride != step:
                return False
            step *= extent
        return True

    @property
    def num_needed(self) -> int:
        """Elements that the storage has to have."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return self.offset + sum((extent - 1) * stride for extent, stride in pairs) + 1


class _TensorUnpickler(pickle.Unpickler):
    """Turns the pickle of one plain tensor into its layout."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch" and name in _DTYPES:
            return name
        known = {
            ("torch._utils", "_rebuild_tensor_v2"): _Layout.of_v2,
            ("torch._utils", "_rebuild_tensor_v3"): _Layout.of_v3,
            ("torch._utils", "_rebuild_parameter"): lambda layout, *_: layout,
            ("torch.storage", "UntypedStorage"): "uint8",
            ("collections", "OrderedDict"): dict,
        }
        if (module, name) not in known:
            raise UnsafeObjectError(f"{module}.{name}")
        return known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, record, _, _ = pid
        return dtype, f"data/{record}"


class _Window(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, handle: int, start: int, nbytes: int) -> None:
        super().__init__()
        self._handle, self._start, self._nbytes = handle, start, nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._nbytes - self._at))
        got = os.preadv(self._handle, [memoryview(buffer)[:wanted]], self._start + self._at)
        self._at += got
        return got


def open_shard(path: str, key: str, span: Span, dtype: DType, shape: Shape) -> Shard:
    """Find the elements of a shard in its file, and compare its records with their checksums.

    Reads it once, a megabyte at a time.

    Raises:
        IncompleteCheckpointError: the file is missing.
        CorruptCheckpointError: this is no archive of such a tensor, or it is damaged.
    """
    with file_errors(key, path), open(path, "rb", 0) as file:  # noqa: PTH123
        window: Any = io.BufferedReader(_Window(file.fileno(), span.byte_offset, span.nbytes))
        try:
            byte_offset = _offset_of_elements(window, dtype, shape)
        except OSError:
            raise
        except Exception as error:
            raise CorruptCheckpointError(
                f"{key}: {path} is damaged between byte {span.byte_offset} and "
                f"{span.byte_offset + span.nbytes}: {error}",
                key=key,
                path=path,
            ) from error
    return Shard(path, None if byte_offset is None else span.byte_offset + byte_offset, span)


def _offset_of_elements(window: Any, dtype: DType, shape: Shape) -> int | None:
    """Where in an archive the first element lies; None where they are not in C order."""
    with zipfile.ZipFile(window) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("its elements are not little-endian")
        layout = _TensorUnpickler(io.BytesIO(archive.read(entries["data.pkl"]))).load()
        if not isinstance(layout, _Layout):
            raise TypeError(f"it holds a {type(layout).__name__}, expected a tensor")
        found, expected = (layout.dtype, layout.shape), (dtype.value, shape)
        if found != expected:
            raise ValueError(f"it holds {found[0]} {found[1]}, expected {dtype.value} {shape}")
        entry = entries[layout.record]
        needed = layout.num_needed * dtype.itemsize
        if needed > entry.file_size or min((*layout.strides, layout.offset, 0)) < 0:
            raise ValueError(f"it has {entry.file_size} bytes of elements, expected {needed}")
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its elements are compressed")
        with archive.open(entry) as record:
            while record.read(_READ_NBYTES):  # raises where the checksum is another
                pass
    if not layout.is_contiguous:
        return None
    window.seek(entry.header_offset)
    header = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
    start: int = entry.header_offset + _LOCAL_HEADER.size + sum(header)
    return start + layout.offset * dtype.itemsize


class TorchDistWriter:
    """Writes torch_dist; see CheckpointWriter.

    A block of an array is held whole while it is written; the plan bounds blocks.

    Args:
        files: of the target.
        plan: what is written.
        allow: classes that objects may be unpickled to: here each goes into a list.
    """

    marker = CheckpointMarker("torch_dist", 1)

    def __init__(self, files: TargetFiles, plan: ConvertPlan, allow: Allowed) -> None:
        self._files, self._plan = files, plan
        self._allow = allow
        self._memory = Memory()

    def begin(self) -> None:
        """See CheckpointWriter. Arrays are described in the end."""

    def write(self, task: FileTask, read: ReadRegion) -> list[int]:
        """See CheckpointWriter. Gives where the archive of each item ends."""
        ends: list[int] = []
        with (
            self._files.new(task.name, task.key) as handle,
            open(handle, "wb", closefd=False) as file,
        ):
            for item in task.items:
                elements = read_item(item, item.region, read, self._memory)
                torch.save(_tensor(elements, item.array.dtype), file)
                ends.append(file.tell())
        return ends

    def finish(self, records: Mapping[int, list[int]], contents: Contents) -> None:
        """See CheckpointWriter."""
        name = f"__0_{len(self._plan.tasks)}.distcp"
        objects: dict[str, Span] = {}
        byte_offset = 0
        with self._files.new(name, None) as handle:
            for object_id, content in contents.objects:
                key = object_id.unique_key
                found = load_content(content, self._files.path(name), key, self._allow)
                dumped = dump_object([found], name=key)
                write_buffered(handle, np.frombuffer(dumped, np.uint8))
                objects[key] = Span(name, byte_offset, len(dumped))
                byte_offset += len(dumped)
        self._files.write(COMMON_NAME, contents.common)
        shards = _shards(self._plan, records)
        self._files.write(METADATA_NAME, metadata_content(shards, objects))


def _tensor(elements: HostArray, dtype: DType) -> torch.Tensor:
    """The tensor in the same memory."""
    torch_dtype: torch.dtype = getattr(torch, dtype.value)
    if not elements.size:
        return torch.empty(elements.shape, dtype=torch_dtype)
    content = torch.from_numpy(elements.reshape(-1).view(np.uint8))
    return content.view(torch_dtype).reshape(elements.shape)


def _shards(
    plan: ConvertPlan, records: Mapping[int, list[int]]
) -> Iterator[tuple[ArraySpec, Region, Span]]:
    for number, task in enumerate(plan.tasks):
        ends = records[number]
        for item, start, end in zip(task.items, [0, *ends[:-1]], ends, strict=True):
            yield item.array, item.region, Span(task.name, start, end - start)
