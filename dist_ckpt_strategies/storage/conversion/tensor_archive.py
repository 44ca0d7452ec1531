"""One tensor as ``torch.save`` writes it, from numpy's memory: checked by CRC-32, never copied.

The archive is a zip file without compression. Each record begins at a multiple of 64 bytes, so that
it can be mapped into memory. Elements are summed and written a megabyte at a time, while they are
in the processor's cache; ``torch.save`` sums them whole, and holds Python's lock while it writes.

Source: torch.serialization; APPNOTE.TXT of PKWARE.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._utils import _rebuild_tensor_v2, _rebuild_tensor_v3

from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.conversion.torch_archives import STORAGES

_FOLDER = "archive"
_ALIGNED_NBYTES = 64
_PIECE_NBYTES = 1 << 20
_PROTOCOL = 2
"""Of the pickle: what ``torch.load(weights_only=True)`` reads."""

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_PADDING = struct.Struct("<2sH")
_VERSION = 20
_UTF8 = 0x800
_DATE = 0x21
"""The first day that a zip file can name, 1980-01-01."""


@dataclass(frozen=True, slots=True)
class _Record:
    """A record that was written.

    Attributes:
        name: within the archive.
        start: of its header, from the archive's start, in bytes.
        nbytes: of its content.
        checksum: CRC-32 of that.
    """

    name: bytes
    start: int
    nbytes: int
    checksum: int

    @property
    def _fields(self) -> tuple[int, ...]:
        """What both headers have: no compression, no time."""
        return _UTF8, 0, 0, _DATE, self.checksum, self.nbytes, self.nbytes, len(self.name)

    def local_header(self, content_start: int) -> bytes:
        """The header before the content, with an extra field that fills the gap."""
        gap = content_start - self.start - _LOCAL.size - len(self.name)
        header = _LOCAL.pack(b"PK\x03\x04", _VERSION, *self._fields, gap)
        padding = _PADDING.pack(b"FB", gap - _PADDING.size) + b"Z" * (gap - _PADDING.size)
        return header + self.name + padding

    def central_header(self) -> bytes:
        """The entry in the directory at the archive's end."""
        header = _CENTRAL.pack(
            b"PK\x01\x02", _VERSION, _VERSION, *self._fields, 0, 0, 0, 0, 0, self.start
        )
        return header + self.name


def write_tensor_archive(handle: int, byte_offset: int, elements: HostArray, dtype: DType) -> int:
    """Write a tensor to a file from a position on; where the archive ends.

    Args:
        handle: the open file.
        byte_offset: where the archive begins.
        elements: in C order; less than 4 GiB.
        dtype: of the elements.
    """
    small = {
        "data.pkl": _description(elements.shape, dtype),
        ".format_version": b"1",
        ".storage_alignment": str(_ALIGNED_NBYTES).encode(),
        "byteorder": b"little",
        "version": b"3\n",
    }
    contents = {name: np.frombuffer(content, np.uint8) for name, content in small.items()}
    contents["data/0"] = elements.reshape(-1).view(np.uint8)
    at = 0
    records = []
    for name, content in contents.items():
        record, at = _write_record(handle, byte_offset, at, f"{_FOLDER}/{name}".encode(), content)
        records.append(record)
    directory = b"".join(record.central_header() for record in records)
    count = len(records)
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), at, 0)
    _write_at(handle, byte_offset + at, np.frombuffer(directory + end, np.uint8))
    return byte_offset + at + len(directory) + len(end)


def _write_record(
    handle: int, byte_offset: int, start: int, name: bytes, content: HostArray
) -> tuple[_Record, int]:
    """A record, and where the next one begins. The header comes last, as it has the checksum."""
    content_start = start + _LOCAL.size + len(name) + _PADDING.size
    content_start += -content_start % _ALIGNED_NBYTES
    checksum = 0
    for at in range(0, content.size, _PIECE_NBYTES):
        piece = content[at : at + _PIECE_NBYTES]
        checksum = zlib.crc32(piece.data, checksum)
        _write_at(handle, byte_offset + content_start + at, piece)
    record = _Record(name, start, content.size, checksum)
    header = np.frombuffer(record.local_header(content_start), np.uint8)
    _write_at(handle, byte_offset + start, header)
    return record, content_start + content.size


def _write_at(handle: int, byte_offset: int, content: Any) -> None:
    done = 0
    while done < content.size:
        done += os.pwrite(handle, content[done:].data, byte_offset + done)


@dataclass(frozen=True, slots=True)
class _Storage:
    """Stands in the pickle for the record with the elements."""

    kind: Any
    size: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Stands in the pickle for the tensor."""

    shape: Extent
    dtype: DType

    def __reduce__(self) -> tuple[Any, ...]:
        size = int(np.prod(self.shape, dtype=np.int64))
        strides = _strides(self.shape)
        hooks: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        kind = _STORAGE_OF.get(self.dtype.value)
        if kind is not None:
            storage = _Storage(getattr(torch, kind), size)
            return _rebuild_tensor_v2, (storage, 0, self.shape, strides, False, hooks)
        storage = _Storage(torch.UntypedStorage, size * self.dtype.itemsize)
        dtype = getattr(torch, self.dtype.value)
        return _rebuild_tensor_v3, (storage, 0, self.shape, strides, False, hooks, dtype)


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", obj.kind, "0", "cpu", obj.size
        return None


def _description(shape: Extent, dtype: DType) -> bytes:
    """The pickle of a tensor whose elements are in the record ``data/0``."""
    content = io.BytesIO()
    _Pickler(content, _PROTOCOL).dump(_Tensor(tuple(shape), dtype))
    return content.getvalue()


def _strides(shape: Extent) -> Extent:
    """Of a tensor in C order, as torch gives them: an empty dim counts as one of one element."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))
