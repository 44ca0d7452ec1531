"""One tensor in an archive that ``torch.save`` wrote, read box by box from where it lies.

The archive is a zip file without compression: its elements lie in one piece in the record
``data/0``, and a short pickle says dtype, shape and strides. Nothing is unpickled freely: the names
that describe a plain tensor stand in a list, and make nothing but a description.

Source: torch.serialization, torch._utils.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dist_ckpt_strategies.errors import CorruptCheckpointError, UnsafeObjectError
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent, Region
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.disk.files import file_errors
from dist_ckpt_strategies.storage.format2.inner_codec import at_box

_LOCAL_HEADER = struct.Struct("<26x2H")
"""Sizes of the name and of the extra field, at the end of the header before a record."""

_PIECE_NBYTES = 1 << 20
STORAGES: Mapping[str, str] = MappingProxyType(
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

_DTYPES = frozenset(member.value for member in DType)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How the elements of a tensor lie in their storage.

    Attributes:
        dtype: torch's name of it.
        record: name of the storage's record, within the archive's folder.
        offset: of the first element, in elements.
        shape: in elements.
        strides: in elements.
    """

    dtype: str
    record: str
    offset: int
    shape: Extent
    strides: Extent

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other, in C order."""
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
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return self.offset + reach + 1


class _Layouts(pickle.Unpickler):
    """Turns the pickle of one plain tensor into its layout."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _REBUILT:
            return _REBUILT[module, name]
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module == "torch" and name in _DTYPES:
            return name
        raise UnsafeObjectError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, record, _, _ = pid
        if kind != "storage":
            raise ValueError(f"{kind!r}, expected a storage")
        return dtype, f"data/{record}"


def _of_typed(storage: Any, offset: int, shape: Any, strides: Any, *_: Any) -> TensorLayout:
    dtype, record = storage
    return TensorLayout(dtype, record, int(offset), tuple(shape), tuple(strides))


def _of_untyped(storage: Any, offset: int, shape: Any, strides: Any, *rest: Any) -> TensorLayout:
    dtype = rest[2]  # behind requires_grad and the hooks of the backward pass
    return TensorLayout(dtype, storage[1], int(offset), tuple(shape), tuple(strides))


def _of_parameter(layout: TensorLayout, *_: Any) -> TensorLayout:
    return layout


_REBUILT: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor_v2"): _of_typed,
        ("torch._utils", "_rebuild_tensor_v3"): _of_untyped,
        ("torch._utils", "_rebuild_parameter"): _of_parameter,
        ("torch.storage", "UntypedStorage"): "uint8",
        ("collections", "OrderedDict"): dict,
    }
)


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

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._nbytes - self._at))
        got = os.preadv(self._handle, [memoryview(buffer)[:wanted]], self._start + self._at)
        self._at += got
        return got


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """Where one tensor lies, once its archive has been looked at.

    Attributes:
        path: of the file.
        key: of the array, for messages.
        layout: of the elements.
        data_offset: where the storage begins in the file, in bytes.
        data_nbytes: of the storage.
    """

    path: str
    key: str
    layout: TensorLayout
    data_offset: int
    data_nbytes: int

    @classmethod
    def open(cls, path: str, key: str, byte_offset: int, nbytes: int) -> TensorArchive:
        """Look at an archive in a file, and compare its records with their checksums.

        Reads it once, in pieces.

        Raises:
            IncompleteCheckpointError: the file is missing.
            CorruptCheckpointError: this is no archive of one plain tensor, or it is damaged.
        """
        with file_errors(key, path):
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                window: Any = io.BufferedReader(_Window(handle, byte_offset, nbytes))
                return _looked_at(path, key, handle, byte_offset, window)
            except _DAMAGE as error:
                raise CorruptCheckpointError(
                    f"{key}: {path} is damaged between byte {byte_offset} and "
                    f"{byte_offset + nbytes}: {error}",
                    key=key,
                    path=path,
                ) from error
            finally:
                os.close(handle)

    def read(self, box: Region, target: HostArray) -> None:
        """Fill ``target`` with a box of the tensor; it is contiguous and of the box's shape.

        Raises:
            StorageError: the file cannot be read, or has become shorter.
        """
        with file_errors(self.key, self.path), open(self.path, "rb", 0) as file:  # noqa: PTH123
            itemsize = DType(self.layout.dtype).itemsize
            if not self.layout.is_contiguous or not _is_slab(box, self.layout.shape):
                self._copy(file.fileno(), box, target)
                return
            first = self.layout.offset + _flat(box.offset, self.layout.shape)
            memory = target.reshape(-1).view(np.uint8)
            try:
                _fill(file.fileno(), self.data_offset + first * itemsize, memory)
            except EOFError as error:
                raise CorruptCheckpointError(
                    f"{self.key}: {self.path}: {error}", key=self.key, path=self.path
                ) from error

    def _copy(self, handle: int, box: Region, target: HostArray) -> None:
        """Through a mapping of the file, whose pages the system takes back as it likes."""
        start = self.data_offset - self.data_offset % mmap.PAGESIZE
        skipped = self.data_offset - start
        with mmap.mmap(
            handle, skipped + self.data_nbytes, prot=mmap.PROT_READ, offset=start
        ) as memory:
            dtype = DType(self.layout.dtype)
            flat = np.frombuffer(memory, np.uint8, self.data_nbytes, skipped)
            usable = self.data_nbytes - self.data_nbytes % dtype.itemsize
            bits = np.dtype((np.void, dtype.itemsize))
            elements = flat[:usable].view(bits)[self.layout.offset :]
            strides = tuple(s * dtype.itemsize for s in self.layout.strides)
            view = as_strided(elements, self.layout.shape, strides, writeable=False)
            np.copyto(target.view(bits), at_box(view, box))
            del flat, elements, view  # the mapping closes only once nothing looks into it


_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    pickle.UnpicklingError,
    UnsafeObjectError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    struct.error,
    RuntimeError,
)
"""What parsing bytes that are no such archive can raise."""


def _looked_at(path: str, key: str, handle: int, byte_offset: int, window: Any) -> TensorArchive:
    with zipfile.ZipFile(window) as archive:
        entries = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
            raise ValueError("its elements are not little-endian")
        layout = _Layouts(io.BytesIO(archive.read(entries["data.pkl"]))).load()
        if not isinstance(layout, TensorLayout):
            raise TypeError(f"it holds a {type(layout).__name__}, expected a tensor")
        dtype = DType.named(layout.dtype, key=key)
        entry = entries[layout.record]
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its elements are compressed")
        needed = layout.num_needed * dtype.itemsize
        if needed > entry.file_size or min((*layout.shape, *layout.strides, 0)) < 0:
            raise ValueError(f"it has {entry.file_size} bytes of elements, expected {needed}")
    header = bytearray(_LOCAL_HEADER.size)
    start = byte_offset + entry.header_offset
    _fill(handle, start, np.frombuffer(header, np.uint8))
    data_offset = start + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
    _require_checksum(handle, data_offset, entry)
    return TensorArchive(path, key, layout, data_offset, entry.file_size)


def _require_checksum(handle: int, data_offset: int, entry: zipfile.ZipInfo) -> None:
    found = 0
    buffer = np.empty(min(_PIECE_NBYTES, entry.file_size), np.uint8)
    for at in range(0, entry.file_size, _PIECE_NBYTES):
        piece = buffer[: min(_PIECE_NBYTES, entry.file_size - at)]
        _fill(handle, data_offset + at, piece)
        found = zlib.crc32(piece.data, found)
    if found != entry.CRC:
        raise ValueError(f"its elements have CRC-32 {found:08x}, expected {entry.CRC:08x}")


def _fill(handle: int, byte_offset: int, memory: Any) -> None:
    done = 0
    while done < memory.size:
        got = os.preadv(handle, [memory[done:].data], byte_offset + done)
        if got == 0:
            raise EOFError(f"the file ends at byte {byte_offset + done}")
        done += got


def _is_slab(box: Region, shape: Extent) -> bool:
    """Whether a box of a tensor in C order lies in one piece."""
    is_free = True
    for extent, whole in zip(box.shape, shape, strict=True):
        if not is_free and extent != whole:
            return False
        is_free = is_free and extent == 1
    return True


def _flat(offset: Extent, shape: Extent) -> int:
    number = 0
    for at, extent in zip(offset, shape, strict=True):
        number = number * extent + at
    return number
