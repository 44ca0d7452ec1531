"""An array of a checkpoint, of which only what is sliced is read."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec, Region, Shape
from dist_ckpt_strategies.errors import PlanError, raises_megatron_errors
from dist_ckpt_strategies.storage.store import ArrayRead, HostArray

if TYPE_CHECKING:
    import torch


_CHUNK_NBYTES = 16 << 20
_NUM_THREADS = 4


class LazyArray:
    """An array of a checkpoint, of which only what is sliced is read.

    Attributes:
        key: its name.
        shape: in elements.
        dtype: numpy's; of ml_dtypes for bfloat16 and float8.
    """

    def __init__(
        self, array: ArraySpec, read: Callable[[ArrayRead], None], max_inflight_bytes: int
    ) -> None:
        self._array, self._read, self._max_nbytes = array, read, max_inflight_bytes
        self.key, self.shape = array.key, array.shape
        self.dtype: np.dtype[Any] = array.dtype.numpy

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

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
        """The elements at each index of the first dim."""
        return (self[n] for n in range(len(self)))

    @raises_megatron_errors
    def __getitem__(self, index: Any) -> HostArray:
        """Elements, in memory of their own: by ints, slices with any steps, and one ``...``.

        With a step, what lies between is read too, at most ``max_inflight_bytes`` of it at a time.

        Raises:
            IndexError: an int is out of bounds, or the index is none of those.
            StorageError: see OpenedCheckpoint.
        """
        ranges, kept = _selection(self.key, self.shape, index)
        elements: HostArray = np.empty([len(r) for r in ranges], self.dtype)
        # Ascending, since a region is read in its own order.
        forward = [r if r.step > 0 else r[::-1] for r in ranges]
        turns: tuple[Any, ...] = tuple(slice(None, None, -1 if r.step < 0 else 1) for r in ranges)
        if elements.size:
            self._fill(forward, elements[(*turns, ...)])
        return elements[(*(slice(None) if k else 0 for k in kept), ...)]

    def _fill(self, ranges: Sequence[range], target: HostArray) -> None:
        """Fill memory with the elements at these indices, which ascend; in halves if need be."""
        region = Region(tuple(r.start for r in ranges), tuple(r[-1] + 1 - r.start for r in ranges))
        if region.shape == target.shape:
            self._read(ArrayRead(self._array, region, target))
            return
        if region.numel * self.dtype.itemsize > self._max_nbytes:
            dim = next(n for n, r in enumerate(ranges) if len(r) > 1)
            middle = len(ranges[dim]) // 2
            for half in (slice(None, middle), slice(middle, None)):
                part = [*ranges[:dim], ranges[dim][half], *ranges[dim + 1 :]]
                self._fill(part, target[(slice(None),) * dim + (half,)])
            return
        elements = np.empty(region.shape, self.dtype)
        self._read(ArrayRead(self._array, region, elements))
        target[...] = elements[tuple(slice(None, None, r.step) for r in ranges)]

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

    @property
    def chunk_shape(self) -> Shape:
        """The shape of what views read at once: at most 16 MiB, whole in the last dims."""
        left, chunk = max(1, _CHUNK_NBYTES // self.dtype.itemsize), []
        for size in reversed(self.shape):
            chunk.append(max(1, min(size, left)))
            left //= chunk[-1]
        return tuple(reversed(chunk))

    @raises_megatron_errors
    def tensorstore(self) -> Any:
        """A read-only ``tensorstore.TensorStore``, which reads and verifies what it is asked for.

        Raises a PlanError if TensorStore has no such dtype.
        """
        import tensorstore as ts  # noqa: PLC0415 - takes a while

        def read(domain: Any, target: Any, _: Any) -> None:
            index = tuple(slice(d.inclusive_min, d.exclusive_max) for d in domain)
            with ThreadPoolExecutor(1) as pool:  # torch does not unpickle on threads of others
                target[...] = pool.submit(self.__getitem__, index).result()

        try:
            dtype = ts.dtype(self.dtype)
        except TypeError as error:
            text = f"{self.key}: TensorStore has no dtype {self.dtype}; read it as a numpy array"
            raise PlanError(text, key=self.key) from error
        return ts.virtual_chunked(
            read,
            dtype=dtype,
            shape=self.shape,
            chunk_layout=ts.ChunkLayout(read_chunk_shape=self.chunk_shape),
            # Threads of its own: on shared ones it would wait for itself where TensorStore reads.
            context=ts.Context({"data_copy_concurrency": {"limit": _NUM_THREADS}}),
        )

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
