"""Nested values as JSON and buffers of bytes: an encoding that runs nothing when it is read.

Containers, numbers and text become JSON; tensors, numpy arrays and bytes become buffers. Objects of
other classes are taken apart into their fields, and put together without calling their code, if the
class is on the list of those allowed. Names are looked up in that list and never imported.
"""

from __future__ import annotations

import collections
import datetime as dt
import io
import json
import math
import pathlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.device import as_bytes, dtype_of, host_view, require_plain, torch_dtype
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError, UnsafeObjectError
from dist_ckpt_strategies.local.part_format import BufferSpec
from dist_ckpt_strategies.local.plain_objects import (
    Base,
    base_of,
    fields_of,
    made_on,
    name_of,
    require_named,
)

_KIND = "$"
"""The key that marks a JSON object as something else than a dict with texts as keys."""

_BIG = 1 << 63
"""Numbers beyond it are written in hexadecimal: Python bounds the digits of decimal ones."""

_SEQUENCES: Mapping[type, str] = MappingProxyType(
    {tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "size"}
)
_MAKERS: Mapping[str, Callable[[Iterable[Any]], Any]] = MappingProxyType(
    {name: kind for kind, name in _SEQUENCES.items()}
)


@dataclass(frozen=True, slots=True)
class Extension:
    """How values of a class that the caller knows are taken apart and made again.

    Attributes:
        name: stands for the class in the encoding.
        cls: the class; subclasses too.
        to_value: its content, of values that can be packed.
        from_value: the value that had this content.
    """

    name: str
    cls: Any
    to_value: Callable[[Any], Any]
    from_value: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """A value, packed.

    Attributes:
        tree: of JSON types.
        buffers: what is in each buffer.
        payloads: the elements of each: the tensors themselves, not copies, and arrays as tensors.
    """

    tree: Any
    buffers: tuple[BufferSpec, ...]
    payloads: tuple[torch.Tensor, ...]


def pack(value: Any, allowed: Mapping[str, Any], extensions: Sequence[Extension] = ()) -> Packed:
    """Take a value apart; tensors are numbered in the order in which the value holds them.

    Args:
        value: nested containers, numbers, text, bytes, tensors, arrays, and objects of classes
            that are allowed.
        allowed: classes and functions by the name that stands for each.
        extensions: further classes.

    Raises:
        UnsafeObjectError: it holds an object of a class that is not allowed; says where and which.
        PlanError: a tensor is sparse, or of a dtype that cannot be stored.
    """
    packer = _Packer({id(found): name for name, found in allowed.items()}, tuple(extensions))
    try:
        tree = packer.packed(value, "")
    except RecursionError:
        raise PlanError("the state is nested too deeply to be stored, or holds itself") from None
    return Packed(tree, tuple(packer.buffers), tuple(packer.payloads))


def unpack(
    tree: Any,
    payloads: Sequence[torch.Tensor],
    allowed: Mapping[str, Any],
    extensions: Sequence[Extension] = (),
) -> Any:
    """The value that ``pack`` took apart.

    Args:
        tree: as it was read.
        payloads: the elements of each buffer, on the host. Arrays share memory with them.
        allowed: as in ``pack``.
        extensions: as in ``pack``.

    Raises:
        UnsafeObjectError: it names a class that is not allowed.
        CorruptCheckpointError: it is not what ``pack`` makes.
    """
    made_by = {extension.name: extension for extension in extensions}
    try:
        return _Unpacker(tuple(payloads), allowed, made_by).unpacked(tree)
    except (
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        RuntimeError,
        OverflowError,
    ) as error:
        raise CorruptCheckpointError(
            f"the state's description is damaged: {type(error).__name__}: {error}"
        ) from error


def dump_value(value: Any, allowed: Mapping[str, Any]) -> bytes:
    """A value and the bytes of its buffers in one piece; errors as in ``pack``."""
    packed = pack(value, allowed)
    contents = [as_bytes(host.contiguous()) for host in map(torch.Tensor.cpu, packed.payloads)]
    buffers = [[spec.dtype.value, list(spec.shape)] for spec in packed.buffers]
    head = json.dumps([packed.tree, buffers], allow_nan=False).encode()
    return b"".join([struct.pack("<Q", len(head)), head, *(c.numpy().tobytes() for c in contents)])


def load_value(content: bytes, allowed: Mapping[str, Any]) -> Any:
    """The value that ``dump_value`` put in; errors as in ``unpack``."""
    try:
        (size,) = struct.unpack_from("<Q", content)
        start = 8 + size
        tree, buffers = json.loads(content[8:start])
        payloads = []
        for name, shape in buffers:
            spec = BufferSpec("", DType(name), tuple(map(int, shape)))
            data = bytearray(content[start : start + spec.nbytes])
            flat = torch.frombuffer(data or bytearray(16), dtype=torch_dtype(spec.dtype))
            payloads.append(flat[: math.prod(spec.shape)].reshape(spec.shape))
            start += spec.nbytes
    except (ValueError, TypeError, struct.error, RuntimeError) as error:
        raise CorruptCheckpointError(f"a value from a peer is damaged: {error}") from error
    return unpack(tree, payloads, allowed)


@dataclass(slots=True)
class _Packer:
    names: Mapping[int, str]
    extensions: tuple[Extension, ...]
    buffers: list[BufferSpec] = field(default_factory=list)
    payloads: list[torch.Tensor] = field(default_factory=list)
    num_objects: int = 0
    """Objects around the value at hand: their tensors are theirs, and move nowhere."""

    def packed(self, value: Any, where: str) -> Any:
        """The tree of a value; ``where`` it stands is for messages."""
        for pack_kind in (self._scalar, self._container, self._bytes, self._object):
            found = pack_kind(value, where)
            if found is not _NOTHING:
                return found
        if isinstance(value, type):
            raise UnsafeObjectError(
                f"{where or 'the state'}: the class {name_of(value)} itself cannot be stored; "
                "store its name, or pass it in allow=",
                key=where,
            )
        raise UnsafeObjectError(
            f"{where or 'the state'}: an object of {name_of(type(value))} cannot be stored; "
            "convert it to plain values, or pass its class in allow=",
            key=where,
        )

    def _scalar(self, value: Any, where: str) -> Any:  # noqa: ARG002 - one shape for all four
        if value is None or type(value) in {bool, str}:
            return value
        if type(value) is int:
            return value if -_BIG < value < _BIG else {_KIND: "int", "hex": hex(value)}
        if type(value) is float:
            is_plain = value == value and abs(value) != float("inf")  # noqa: PLR0124 - NaN
            return value if is_plain else {_KIND: "float", "text": repr(value)}
        maker = _SCALARS.get(type(value))
        if maker is not None:
            return {_KIND: maker.name, "text": maker.to_text(value)}
        return self._of_numpy(value)

    @staticmethod
    def _of_numpy(value: Any) -> Any:
        if isinstance(value, np.dtype) and value.isbuiltin and not value.hasobject:
            return {_KIND: "numpy dtype", "text": value.name}
        if isinstance(value, np.generic) and value.dtype.name in _STORED:
            return {_KIND: "numpy", "dtype": value.dtype.name, "hex": value.tobytes().hex()}
        return _NOTHING

    def _container(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind is list:
            return self._items(value, where)
        if kind in _SEQUENCES:
            return {_KIND: _SEQUENCES[kind], "items": self._items(_in_order(value), where)}
        if kind is dict and _KIND not in value and all(type(key) is str for key in value):
            return {key: self.packed(held, _below(where, key)) for key, held in value.items()}
        if kind in {dict, collections.OrderedDict}:
            pairs = [
                [self.packed(key, where), self.packed(held, _below(where, key))]
                for key, held in value.items()
            ]
            return {_KIND: "dict" if kind is dict else "ordered", "items": pairs}
        if kind is slice:
            bounds = (value.start, value.stop, value.step)
            return {_KIND: "slice", "items": self._items(bounds, where)}
        return _NOTHING

    def _items(self, values: Iterable[Any], where: str) -> list[Any]:
        return [self.packed(held, _below(where, place)) for place, held in enumerate(values)]

    def _bytes(self, value: Any, where: str) -> Any:
        if isinstance(value, torch.Tensor):
            require_plain(value, key=where)
            shape = tuple(value.shape)
            device = _NO_DEVICE if self.num_objects else value.device.type
            spec = BufferSpec(where, dtype_of(value, key=where), shape, device)
            return {_KIND: "tensor", "buffer": self._add(spec, value.detach())}
        if type(value) is np.ndarray:
            dtype = DType.from_numpy(value.dtype, key=where)
            native = np.ascontiguousarray(value, dtype.numpy)
            spec = BufferSpec(where, dtype, value.shape, _NO_DEVICE)
            return {_KIND: "array", "buffer": self._add(spec, _as_tensor(native))}
        name = _BYTES.get(type(value))
        if name is None:
            return _NOTHING
        content: bytes = value.getvalue() if isinstance(value, io.BytesIO) else value
        data = torch.frombuffer(bytearray(content or b"0"), dtype=torch.uint8)[: len(content)]
        spec = BufferSpec(where, DType.UINT8, tuple(data.shape), _NO_DEVICE)
        return {_KIND: name, "buffer": self._add(spec, data)}

    def _add(self, spec: BufferSpec, payload: torch.Tensor) -> int:
        self.buffers.append(spec)
        self.payloads.append(payload)
        return len(self.buffers) - 1

    def _object(self, value: Any, where: str) -> Any:
        for extension in self.extensions:
            if isinstance(value, extension.cls):
                content = self.packed(extension.to_value(value), where)
                return {_KIND: "extension", "name": extension.name, "value": content}
        if id(value) in self.names:
            return {_KIND: "global", "name": self.names[id(value)]}
        name = self.names.get(id(type(value)))
        if name is None or isinstance(value, (type, FunctionType)):
            return _NOTHING
        if isinstance(value, Enum):
            require_named(value, where)
            return {_KIND: "enum", "class": name, "name": value.name}
        if isinstance(value, tuple):
            return {_KIND: "named tuple", "class": name, "items": self._items(value, where)}
        base = base_of(type(value), where)
        return {
            _KIND: "object",
            "class": name,
            **({} if base is None else self._held(base, value, where)),
            "fields": self._fields(value, where),
        }

    def _held(self, base: Base, value: Any, where: str) -> dict[str, Any]:
        """What an object holds beside its fields; tensors in a dict are those of the state."""
        is_object = not issubclass(base.cls, dict)
        self.num_objects += is_object
        items = self._items(base.content_of(value), where)
        self.num_objects -= is_object
        return {"base": base.name, "items": items}

    def _fields(self, value: Any, where: str) -> dict[str, Any]:
        self.num_objects += 1
        fields = {key: self.packed(held, _below(where, key)) for key, held in fields_of(value)}
        self.num_objects -= 1
        return fields


@dataclass(frozen=True, slots=True)
class _Unpacker:
    payloads: tuple[torch.Tensor, ...]
    allowed: Mapping[str, Any]
    extensions: Mapping[str, Extension]

    def unpacked(self, tree: Any) -> Any:
        """The value of a tree."""
        if isinstance(tree, list):
            return [self.unpacked(held) for held in tree]
        if not isinstance(tree, dict):
            return tree
        if _KIND not in tree:
            return {key: self.unpacked(held) for key, held in tree.items()}
        kind = tree[_KIND]
        if kind in _TEXTS:
            return _TEXTS[kind].from_text(tree["text"])
        if kind in _MAKERS:
            return _MAKERS[kind](self.unpacked(tree["items"]))
        return _UNPACKERS[kind](self, tree)

    def _dict(self, tree: Any) -> Any:
        made = dict if tree[_KIND] == "dict" else collections.OrderedDict
        return made((self.unpacked(key), self.unpacked(held)) for key, held in tree["items"])

    def _slice(self, tree: Any) -> Any:
        return slice(*self.unpacked(tree["items"]))

    def _int(self, tree: Any) -> Any:
        return int(tree["hex"], 16)

    def _numpy(self, tree: Any) -> Any:
        dtype = DType(tree["dtype"]).numpy
        return np.frombuffer(bytes.fromhex(tree["hex"]), dtype)[0]

    def _tensor(self, tree: Any) -> Any:
        return self.payloads[tree["buffer"]]

    def _array(self, tree: Any) -> Any:
        return host_view(self.payloads[tree["buffer"]])

    def _content(self, tree: Any) -> Any:
        content = self.payloads[tree["buffer"]].numpy().tobytes()
        return {"bytes": bytes, "bytearray": bytearray, "bytesio": io.BytesIO}[tree[_KIND]](content)

    def _extension(self, tree: Any) -> Any:
        return self.extensions[tree["name"]].from_value(self.unpacked(tree["value"]))

    def _global(self, tree: Any) -> Any:
        return self._named(tree["name"])

    def _enum(self, tree: Any) -> Any:
        found = self._named(tree["class"])
        if not issubclass(found, Enum):
            raise TypeError(f"{tree['class']} is no enum")
        return found[tree["name"]]

    def _named_tuple(self, tree: Any) -> Any:
        found = self._named(tree["class"])
        if not issubclass(found, tuple):
            raise TypeError(f"{tree['class']} is no tuple")
        return tuple.__new__(found, self.unpacked(tree["items"]))

    def _object(self, tree: Any) -> Any:
        found = self._named(tree["class"])
        if "base" in tree:
            made = made_on(tree["base"], found, self.unpacked(tree["items"]))
        else:
            made = object.__new__(found)
        for key, held in tree["fields"].items():
            object.__setattr__(made, key, self.unpacked(held))
        return made

    def _named(self, name: str) -> Any:
        if name not in self.allowed:
            raise UnsafeObjectError(
                f"the state needs {name}, which the list of classes allowed does not hold; if you "
                f"trust this checkpoint, pass allow=[{name}]",
                key=name,
            )
        return self.allowed[name]


@dataclass(frozen=True, slots=True)
class _Scalar:
    """A value that is one text."""

    name: str
    to_text: Callable[[Any], str]
    from_text: Callable[[str], Any]


def _complex_text(value: complex) -> str:
    return f"{value.real!r} {value.imag!r}"


def _complex_of(text: str) -> complex:
    real, imag = map(float, text.split())
    return complex(real, imag)


def _dtype_of_text(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."))
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{text} is no dtype")
    return found


def _seconds_text(value: dt.timedelta) -> str:
    return f"{value.days} {value.seconds} {value.microseconds}"


def _seconds_of(text: str) -> dt.timedelta:
    return dt.timedelta(*map(int, text.split()))


_SCALARS: Mapping[type, _Scalar] = MappingProxyType(
    {
        complex: _Scalar("complex", _complex_text, _complex_of),
        torch.dtype: _Scalar("dtype", str, _dtype_of_text),
        torch.device: _Scalar("device", str, torch.device),
        pathlib.PosixPath: _Scalar("path", str, pathlib.Path),
        pathlib.PurePosixPath: _Scalar("pure path", str, pathlib.PurePosixPath),
        np.str_: _Scalar("numpy text", str, np.str_),
        dt.datetime: _Scalar("datetime", dt.datetime.isoformat, dt.datetime.fromisoformat),
        dt.timedelta: _Scalar("timedelta", _seconds_text, _seconds_of),
    }
)
_TEXTS: Mapping[str, _Scalar] = MappingProxyType(
    {scalar.name: scalar for scalar in _SCALARS.values()}
    | {
        "float": _Scalar("float", repr, float),
        "numpy dtype": _Scalar("numpy dtype", str, np.dtype),
    }
)
_BYTES: Mapping[type, str] = MappingProxyType(
    {bytes: "bytes", bytearray: "bytearray", io.BytesIO: "bytesio"}
)
_UNPACKERS: Mapping[str, Callable[[_Unpacker, Any], Any]] = MappingProxyType(
    {
        "dict": _Unpacker._dict,  # noqa: SLF001 - a table of its own methods
        "ordered": _Unpacker._dict,  # noqa: SLF001
        "slice": _Unpacker._slice,  # noqa: SLF001
        "int": _Unpacker._int,  # noqa: SLF001
        "numpy": _Unpacker._numpy,  # noqa: SLF001
        "tensor": _Unpacker._tensor,  # noqa: SLF001
        "array": _Unpacker._array,  # noqa: SLF001
        "bytes": _Unpacker._content,  # noqa: SLF001
        "bytearray": _Unpacker._content,  # noqa: SLF001
        "bytesio": _Unpacker._content,  # noqa: SLF001
        "extension": _Unpacker._extension,  # noqa: SLF001
        "global": _Unpacker._global,  # noqa: SLF001
        "enum": _Unpacker._enum,  # noqa: SLF001
        "named tuple": _Unpacker._named_tuple,  # noqa: SLF001
        "object": _Unpacker._object,  # noqa: SLF001
    }
)
_STORED = frozenset(dtype.numpy.name for dtype in DType)
_NOTHING = object()

_NO_DEVICE = ""
"""Where arrays and bytes are: they are no tensors, and move nowhere."""


def _in_order(value: Iterable[Any]) -> list[Any]:
    """Elements of a set in an order that does not depend on the process."""
    return sorted(value, key=repr) if isinstance(value, (set, frozenset)) else list(value)


def _below(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """A tensor that shares the memory of an array, of the same shape and type."""
    dtype = torch_dtype(DType.from_numpy(array.dtype, key=""))
    content = np.require(array.reshape(-1).view(np.uint8), requirements="W")
    return torch.from_numpy(content).view(dtype).reshape(array.shape)
