"""A checkpoint of any format as a mapping of lazy arrays: no process group, no GPU."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.errors import ArrayNotFoundError, CheckpointError
from dist_ckpt_strategies.formats.locations import located
from dist_ckpt_strategies.formats.manifest import similar_text
from dist_ckpt_strategies.formats.objects import Allowed, load_content
from dist_ckpt_strategies.megatron.types import (
    as_megatron_error,
    default_allowed,
    raises_megatron_errors,
)
from dist_ckpt_strategies.storage.files import COMMON_NAME
from dist_ckpt_strategies.storage.store import HostArray
from dist_ckpt_strategies.tools.readers import CheckpointReader, open_reader

if TYPE_CHECKING:
    import torch

    from dist_ckpt_strategies.tools.plan_convert import SourceArray

_SPARSE_NBYTES = 1 << 20
"""What a slice with a step reads at once, with the elements between those that are wanted."""


@raises_megatron_errors
def open(  # noqa: A001 - dist_ckpt_strategies.open
    path: str | Path,
    *,
    options: Options | None = None,
    allow: Allowed = (),
    verify: Verify | str | None = None,
) -> OpenedCheckpoint:
    """Open a finished checkpoint of any format to read it; nothing on disk changes.

    Works in any process, alone: needs no process group and no GPU. Reads names, shapes and places;
    elements are read when they are asked for.

    Args:
        path: directory of a checkpoint of ("safetensors", 1), ("zarr", 1), ("zarr", 2) or
            ("torch_dist", 1); of ("safetensors", 1) and ("zarr", 2) also its URL.
        options: timeouts and memory bounds; by default from the environment.
        allow: further classes that objects and the common state may be unpickled to.
        verify: ``"read"`` compares all that is read with its digests, ``"off"`` does not; by
            default as the options say.

    Raises:
        CheckpointNotFoundError: there is nothing at that place.
        IncompleteCheckpointError: what is there is no finished checkpoint.
        CorruptCheckpointError: its index is damaged.
        IncompatibleVersionError: this package does not read its format, or not from there.
        StrategyError: it is no address, or an option is out of range.
    """
    chosen = (options or options_from_environment()).with_changes(verify=verify)
    root = located(path, chosen, what="path")
    allowed = [*default_allowed(), *allow]
    return OpenedCheckpoint(open_reader(root, chosen, allowed), chosen, allowed)


class OpenedCheckpoint(Mapping[str, "LazyArray"]):
    """The arrays of a checkpoint by key, read as they are asked for. Any thread may read.

    A read raises a StorageError where elements are missing or damaged, or where another save has
    replaced the checkpoint since it was opened. What is compared:

    - ("safetensors", 1), ("zarr", 2): everything, with its digest, unless ``verify`` is ``"off"``.
    - ("torch_dist", 1): it has no digests. Each shard is compared with the CRC-32 in its archive.
    - ("zarr", 1): it has no digests. The sizes of chunks are compared.

    Attributes:
        objects: the ShardedObjects by unique key, ``KEY/shard_OFFSET_SHAPE``; each is unpickled,
            with the list of allowed classes, when it is asked for.
    """

    def __init__(self, reader: CheckpointReader, options: Options, allow: Allowed) -> None:
        self._reader, self._options, self._allow = reader, options, allow
        self.objects: Mapping[str, Any] = _Objects(reader, allow)

    @property
    def format(self) -> tuple[str, int]:
        """Backend and version of the sharded state, such as ("safetensors", 1)."""
        return self._reader.format.backend

    @property
    def identity(self) -> str:
        """Tells this save from others at the same place, where anything does."""
        return self._reader.identity

    @cached_property
    def common(self) -> dict[str, Any]:
        """The common state: all that is neither a sharded tensor nor a ShardedObject."""
        reader = self._reader
        path = f"{reader.root}/{COMMON_NAME}"

        @raises_megatron_errors
        def load() -> dict[str, Any]:
            content = reader.save.read(reader.common_content)
            state: dict[str, Any] = load_content(content, path, "common state", self._allow)
            return state

        return load()

    def __getitem__(self, key: str) -> LazyArray:
        """The array of that key; ArrayNotFoundError, a KeyError, if there is none."""
        try:
            (array,) = self._reader.save.read(lambda: self._reader.find([key]))
        except CheckpointError as error:
            raise as_megatron_error(error) from error.__cause__
        return LazyArray(self._reader, array, self._options)

    def __iter__(self) -> Iterator[str]:
        """The keys, sorted."""
        return iter(self._keys)

    def __len__(self) -> int:
        """Number of arrays."""
        return len(self._keys)

    def __repr__(self) -> str:
        """Place, format and number of arrays."""
        return f"<checkpoint {self._reader.root}: {self.format}, {len(self)} arrays>"

    @cached_property
    def _keys(self) -> tuple[str, ...]:
        return tuple(sorted(self._reader.keys()))


class _Objects(Mapping[str, Any]):
    """Objects by unique key."""

    def __init__(self, reader: CheckpointReader, allow: Allowed) -> None:
        self._reader, self._allow = reader, allow

    @cached_property
    def _ids(self) -> dict[str, Any]:
        return {object_id.unique_key: object_id for object_id in self._reader.objects}

    @raises_megatron_errors
    def __getitem__(self, key: str) -> Any:
        reader = self._reader
        if key not in self._ids:
            raise ArrayNotFoundError(
                f"{key}: no such object among the {len(self._ids)} in {reader.root}"
                f"{similar_text(key, list(self._ids))}",
                key=key,
                path=str(reader.root),
            )
        content = reader.save.read(lambda: reader.object_content(self._ids[key]))
        return load_content(content, f"{reader.root}/{key}", key, self._allow)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<objects of {self._reader.root}: {', '.join(self._ids) or 'none'}>"


class LazyArray:
    """An array of a checkpoint, of which only what is sliced is read.

    Attributes:
        key: its name.
        shape: in elements.
        dtype: numpy's; of ml_dtypes for bfloat16 and float8.
    """

    def __init__(self, reader: CheckpointReader, array: SourceArray, options: Options) -> None:
        self._reader, self._array, self._options = reader, array, options
        self.key, self.shape = array.key, array.shape
        self.dtype: np.dtype[Any] = array.dtype.numpy

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return Region.whole(self.shape).numel

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self._array.nbytes

    def __len__(self) -> int:
        """Length of the first dim."""
        if not self.shape:
            raise TypeError(f"{self.key}: len() of an array without dims")
        return self.shape[0]

    def __iter__(self) -> Iterator[HostArray]:
        """What is at each index of the first dim."""
        return (self[n] for n in range(len(self)))

    @raises_megatron_errors
    def __getitem__(self, index: Any) -> HostArray:
        """Elements, in memory of their own: by ints, slices with any steps, and one ``...``.

        Raises:
            IndexError: an int is out of bounds, or the index is none of those.
            StorageError: see OpenedCheckpoint.
        """
        ranges, kept = _selection(self.key, self.shape, index)
        found = np.empty([len(r) for r in ranges], self.dtype)
        # Ascending, since a region is read in its own order; the result is turned round at the end.
        forward = [r if r.step > 0 else r[::-1] for r in ranges]
        if found.size:
            self._reader.save.read(lambda: self._fill(forward, found))
        turned = tuple(slice(None, None, 1 if r.step > 0 else -1) for r in ranges)
        dims = tuple(slice(None) if is_kept else 0 for is_kept in kept)
        result: HostArray = found[turned][(*dims, ...)]
        return result

    def _fill(self, ranges: list[range], target: HostArray) -> None:
        """Read the elements at these indices, in parts if there is a step."""
        region = Region(tuple(r.start for r in ranges), tuple(r[-1] + 1 - r.start for r in ranges))
        if region.shape == target.shape:
            self._reader.read([(self.key, region, target)])
        elif region.numel * self.dtype.itemsize <= _SPARSE_NBYTES:
            elements = np.empty(region.shape, self.dtype)
            self._reader.read([(self.key, region, elements)])
            target[...] = elements[tuple(slice(None, None, r.step) for r in ranges)]
        else:
            dim = next(dim for dim, r in enumerate(ranges) if len(r) > 1)
            middle = len(ranges[dim]) // 2
            for part in (slice(None, middle), slice(middle, None)):
                of_dim = (*(slice(None),) * dim, part)
                self._fill([*ranges[:dim], ranges[dim][part], *ranges[dim + 1 :]], target[of_dim])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> HostArray:  # noqa: FBT001
        """All elements, for numpy."""
        if copy is False:
            raise ValueError(f"{self.key}: elements have to be read into new memory")
        elements = self[...]
        return elements if dtype is None else elements.astype(dtype, copy=False)

    def torch(self) -> torch.Tensor:
        """All elements as a tensor on the CPU, bit for bit."""
        from dist_ckpt_strategies.device import as_tensor  # noqa: PLC0415 - torch takes a while

        return as_tensor(self[...], self._array.dtype)

    def __repr__(self) -> str:
        """Key, shape and dtype."""
        return f"<array {self.key}: {self.shape} {self.dtype}>"


def _selection(key: str, shape: Shape, index: Any) -> tuple[list[range], list[bool]]:
    """The indices that are wanted in each dim, and whether the result has the dim."""
    given = list(index) if isinstance(index, tuple) else [index]
    places = [n for n, one in enumerate(given) if one is Ellipsis]
    missing = len(shape) - (len(given) - len(places))
    if len(places) > 1 or missing < 0:
        raise IndexError(f"{key}: {len(given)} indices {index!r} for {len(shape)} dims")
    at = places[0] if places else len(given)
    given[at : at + 1] = [slice(None)] * missing
    ranges = []
    for dim, (one, length) in enumerate(zip(given, shape, strict=True)):
        if isinstance(one, slice):
            ranges.append(range(length)[one])
            continue
        try:
            number = operator.index(one)
        except TypeError:
            number = None
        if number is None or isinstance(one, bool | np.bool_):
            raise IndexError(f"{key}: expected ints, slices and ..., found {one!r}")
        if not -length <= number < length:
            raise IndexError(f"{key}: index {number} is out of bounds for dim {dim} of {length}")
        ranges.append(range(number % length, number % length + 1))
    return ranges, [isinstance(one, slice) for one in given]
