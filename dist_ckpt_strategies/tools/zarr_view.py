"""A checkpoint as a store of zarr-python: what is read is verified as ever."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np

from dist_ckpt_strategies.errors import MissingDependencyError, StorageError, text_of
from dist_ckpt_strategies.tools.lazy_array import LazyArray

_METADATA = "zarr.json"
_OF_ZARR = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)}
_OF_ZARR |= {"bool", "float16", "float32", "float64", "complex64", "complex128"}


def zarr_store(arrays: Mapping[str, LazyArray]) -> Any:
    """A read-only store of zarr-python in which arrays, by key, are a Zarr v3 hierarchy.

    Raises a MissingDependencyError without zarr-python 3.
    """
    try:
        from zarr.storage import MemoryStore  # noqa: PLC0415 - optional
    except ImportError as error:
        raise MissingDependencyError("a view for zarr-python needs zarr>=3; install it") from error
    view: Any = _ZarrFiles(arrays)  # read-only, so that no method is missing
    return MemoryStore(view, read_only=True)


class _ZarrFiles(Mapping[str, Any]):
    """The files of a Zarr v3 hierarchy, by name, made up as they are asked for."""

    def __init__(self, arrays: Mapping[str, LazyArray]) -> None:
        from zarr.core.buffer import default_buffer_prototype  # noqa: PLC0415 - optional

        self._buffer = default_buffer_prototype().buffer
        self._arrays = dict(arrays)
        self._groups = {""}
        for key in self._arrays:
            parts = key.split("/")
            self._groups |= {"/".join(parts[:n]) for n in range(len(parts))}
        self._groups -= self._arrays.keys()

    def __getitem__(self, name: str) -> Any:
        node, is_metadata = name.removesuffix(_METADATA).rstrip("/"), name.endswith(_METADATA)
        if is_metadata and node in self._arrays:
            content = json.dumps(_array_metadata(self._arrays[node])).encode()
        elif is_metadata and node in self._groups:
            group = {"zarr_format": 3, "node_type": "group", "attributes": {}}
            content = json.dumps(group).encode()
        else:
            array, starts = self._chunk(name)  # a KeyError is a chunk of zeros for zarr-python
            try:
                content = _chunk_content(array, starts)
            except KeyError as error:
                raise StorageError(f"{array.key}: {text_of(error)}", key=array.key) from error
        return self._buffer.from_bytes(content)

    def __iter__(self) -> Iterator[str]:
        for node in (*self._groups, *self._arrays):
            yield f"{node}/{_METADATA}".removeprefix("/")
        for key, array in self._arrays.items():
            counts = (-(-n // m) for n, m in zip(array.shape, array.chunk_shape, strict=True))
            for place in product(*map(range, counts)):
                yield "/".join((key, "c", *map(str, place)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _chunk(self, name: str) -> tuple[LazyArray, tuple[int, ...]]:
        """The array of a chunk, and its indices; a KeyError if there is no such chunk."""
        key, _, numbers = f"{name}/".rpartition("/c/")
        array = self._arrays[key]
        try:
            place = tuple(map(int, filter(None, numbers.split("/"))))
        except ValueError as error:
            raise KeyError(name) from error
        starts = tuple(n * m for n, m in zip(place, array.chunk_shape, strict=False))
        if len(place) != array.ndim or any(
            a >= n for a, n in zip(starts, array.shape, strict=True)
        ):
            raise KeyError(name)
        return array, starts


def _chunk_content(array: LazyArray, starts: tuple[int, ...]) -> bytes:
    """The bytes of a chunk; one at the edge is filled up, as Zarr has it."""
    shape = array.chunk_shape
    elements = array[tuple(slice(a, a + m) for a, m in zip(starts, shape, strict=True))]
    if elements.shape != shape:
        elements = np.pad(
            elements, [(0, m - n) for n, m in zip(elements.shape, shape, strict=True)]
        )
    return elements.tobytes()


def _array_metadata(array: LazyArray) -> dict[str, Any]:
    """The description of an array; of a dtype that Zarr lacks, of its bits."""
    dtype = array.dtype
    is_known = dtype.name in _OF_ZARR
    grid = {"name": "regular", "configuration": {"chunk_shape": array.chunk_shape}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": array.shape,
        "data_type": dtype.name if is_known else f"uint{8 * dtype.itemsize}",
        "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": [0, 0] if dtype.kind == "c" else False if dtype.name == "bool" else 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "attributes": {} if is_known else {"dtype": dtype.name},
    }
