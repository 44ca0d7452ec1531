"""Arrays, shards and objects, stored or in memory, as frozen values."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Any, NamedTuple, Self, TypeVar

import ml_dtypes
import numpy as np

from dist_ckpt_strategies.errors import PlanError

T = TypeVar("T", bound=Any)
Shape = tuple[int, ...]


class Region(NamedTuple):
    """Half-open region ``[offset, offset + shape)``, in elements of the global array."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Region:
        """The region that covers an array of that shape."""
        return cls((0,) * len(shape), shape)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Elements in the region; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def end(self) -> Shape:
        """First element past the region, in each dim."""
        return tuple(map(operator.add, self.offset, self.shape))

    def intersect(self, other: Region) -> Region | None:
        """The common region, or None where the two share no element."""
        low = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(operator.sub, map(min, self.end, other.end), low))
        return Region(low, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: Region) -> bool:
        """Whether no element of ``other`` lies outside."""
        return all(
            a <= b and f <= e
            for a, b, e, f in zip(self.offset, other.offset, self.end, other.end, strict=True)
        )

    def cells(self, cell: Shape) -> Iterator[Shape]:
        """Indices, in C order, of the cells of a regular grid that share an element with it."""
        if 0 in self.shape:
            return iter(())
        spans = zip(self.offset, self.shape, cell, strict=True)
        return product(*[range(a // c, (a + n - 1) // c + 1) for a, n, c in spans])

    def within(self, frame: Region) -> Region:
        """The same region, in coordinates relative to ``frame``."""
        return Region(tuple(map(operator.sub, self.offset, frame.offset)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Indexing form of the region."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        """Python indexing form, for messages: ``[0:4, 8:16]``."""
        return "[" + ", ".join(f"{s.start}:{s.stop}" for s in self.slices()) + "]"


def runs(shape: Shape, start: int, stop: int) -> Iterator[Region]:
    """Regions that are, one after the other, elements ``start`` to ``stop`` in C order."""
    while start < stop:
        dim, inner = len(shape), 1  # elements of an index of the dim before: all later dims, whole
        while dim and not start % (row := inner * shape[dim - 1]) and row <= stop - start:
            dim, inner = dim - 1, row
        at, offset = start // inner, [0] * (len(shape) - dim)
        for size in reversed(shape[:dim]):
            at, index = divmod(at, size)
            offset.insert(0, index)
        extent = [1] * dim + [*shape[dim:]]
        if dim:
            extent[dim - 1] = min((stop - start) // inner, shape[dim - 1] - offset[dim - 1])
        yield Region(tuple(offset), tuple(extent))
        start += math.prod(extent)


def flat_index(shape: Shape, index: Shape) -> int:
    """The number of an element in C order."""
    number = 0
    for size, at in zip(shape, index, strict=True):
        number = number * size + at
    return number


class DType(Enum):
    """An element type that a checkpoint can hold.

    The value is torch's name for it without the ``torch.`` in front.

    Attributes:
        numpy: the numpy dtype of the same bytes; bfloat16 and float8 come from ml_dtypes.
        itemsize: bytes of one element.
        is_extension: whether numpy alone does not know it.
    """

    BOOL = "bool"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    BFLOAT16 = "bfloat16"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    FLOAT8_E4M3FN = "float8_e4m3fn"
    FLOAT8_E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8_E5M2 = "float8_e5m2"
    FLOAT8_E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8_E8M0FNU = "float8_e8m0fnu"

    numpy: np.dtype[np.generic]
    itemsize: int
    is_extension: bool

    def __init__(self, name: str) -> None:
        self.is_extension = hasattr(ml_dtypes, name)
        self.numpy = np.dtype(getattr(ml_dtypes, name, name))
        self.itemsize = self.numpy.itemsize

    @classmethod
    def named(cls, name: str, *, key: str) -> DType:
        """The type of that name.

        Raises:
            PlanError: no checkpoint format here holds it.
        """
        try:
            return cls(name.removeprefix("torch."))
        except ValueError:
            names = ", ".join(member.value for member in cls)
            raise PlanError(f"{key}: dtype {name} cannot be stored; {names} can", key=key) from None


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape, dtype and regular chunk grid of a stored array.

    Attributes:
        key: name of the array; ``/`` separates directories.
        shape: in elements; empty for a scalar.
        dtype: element type.
        chunk_shape: in elements, each at least 1; one chunk is one file.
        separator: what joins the chunk index in a file name, ``.`` or ``/``.
        is_raw: whether a chunk's bytes are its elements in C order, little-endian, with no codec.
        blocks: where it is stored as such and not on the grid, the regions, each with the global
            rank that wrote it.
    """

    key: str
    shape: Shape
    dtype: DType
    chunk_shape: Shape
    separator: str = "."
    is_raw: bool = True
    blocks: tuple[tuple[Region, int], ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, chunk padding not counted."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one whole chunk, which a raw chunk file has even at the array's edge."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def grid(self) -> Shape:
        """Number of chunks in each dim; any 0 means that the array has no element."""
        return tuple([-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)])

    @property
    def num_chunks(self) -> int:
        """Number of chunk files of the complete array; 1 for a scalar."""
        return math.prod(self.grid)

    def chunk_region(self, index: Shape) -> Region:
        """The chunk's whole region, which may reach past the array's edge."""
        offset = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        return Region(offset, self.chunk_shape)

    def chunk_indices(self) -> Iterator[Shape]:
        """Every chunk of the grid, in C order."""
        return product(*map(range, self.grid))

    def regions(self) -> Iterator[Region]:
        """The regions in which it is stored, cut at its edge; of an empty one, itself."""
        whole = Region.whole(self.shape)
        if not whole.numel:
            yield whole
        elif self.blocks is not None:
            yield from sorted(region for region, _ in self.blocks if region.numel)
        else:
            cut = (self.chunk_region(index).intersect(whole) for index in self.chunk_indices())
            yield from filter(None, cut)

    def chunk_file(self, index: Shape) -> str:
        """The file of a chunk, below the checkpoint's directory; ends in ``/0`` for a scalar."""
        return f"{self.key}/{self.separator.join(map(str, index)) or '0'}"


_NAME = re.compile(r"shard_(\d+(?:\.\d+)*)_(\d+(?:\.\d+)*)", re.ASCII)
UNKNOWN = -1


@dataclass(frozen=True, slots=True, order=True)
class ObjectId:
    """One shard of a grid of objects.

    Attributes:
        key: name of the object; ``/`` separates directories.
        offset: position in the grid, in shards.
        shape: of the grid, in shards; its last number is UNKNOWN (-1) in a name of the older form.
    """

    key: str
    offset: Shape
    shape: Shape

    @property
    def unique_key(self) -> str:
        """The name under which Megatron-Core stores the shard, without ``.pt``.

        Early releases left out the last number of the shape, as this does where it is UNKNOWN.
        """
        shape = self.shape[:-1] if self.shape[-1:] == (UNKNOWN,) else self.shape
        return f"{self.key}/shard_{joined(self.offset)}_{joined(shape)}"

    @classmethod
    def parse(cls, unique_key: str) -> Self | None:
        """The shard of that name, in the present or the older form; None for another name."""
        key, _, name = unique_key.rpartition("/")
        match = _NAME.fullmatch(name)
        if not key or match is None:
            return None
        offset, shape = (tuple(map(int, part.split("."))) for part in match.groups())
        if len(shape) + 1 == len(offset):
            shape = (*shape, UNKNOWN)
        return cls(key, offset, shape) if len(shape) == len(offset) else None


COMMON_OBJECT = ObjectId("common_state", (0,), (1,))
"""The shard that holds the common state where it is no file: Megatron-Core 0.19 and later."""


def joined(numbers: Shape) -> str:
    """Numbers with dots between them, as in the names of files and tensors."""
    return ".".join(map(str, numbers))


class ShardId(NamedTuple):
    """Names a shard, whichever rank or replica holds it."""

    key: str
    region: Region


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One replica of one shard, without its data.

    Attributes:
        id: key of the array and the region of it.
        array_shape: shape of the whole array as this rank sees it, in elements.
        dtype: element type.
        is_main: whether this replica is the one that is written.
        may_mismatch: whether the stored array may have another shape (padded vocabularies).
    """

    id: ShardId
    array_shape: Shape
    dtype: DType
    is_main: bool = True
    may_mismatch: bool = False

    @property
    def key(self) -> str:
        """Key of the array."""
        return self.id.key

    @property
    def region(self) -> Region:
        """Region of the array, in elements."""
        return self.id.region

    @property
    def nbytes(self) -> int:
        """Payload size in bytes."""
        return self.region.numel * self.dtype.itemsize


_MAX_COMPONENT_NBYTES = 255
_FILES_OF_AN_ARRAY = re.compile(r"\.zarray|\.zattrs|\.zgroup|\d+(\.\d+)*")
_TAKEN = re.compile(
    r"\.zarray|metadata\.json|common\.pt|shard_\d+(\.\d+)*_\d+(\.\d+)*\.pt"
    r"|\.(removed|partial)-.*|.*\.__lock",
    re.DOTALL,
)
"""A directory of such a name would be taken for the file that marks an array, a checkpoint, an
object, or for something on its way out."""


def require_storable_keys(array_keys: Collection[str], object_keys: Collection[str]) -> None:
    """Raise unless every key names a directory of its own below the checkpoint.

    Raises:
        PlanError: a key is empty, leaves the directory, is too long for a file system, or
            collides with a file of the checkpoint or of another array.
    """
    arrays = frozenset(array_keys)
    for key in sorted(arrays.union(object_keys)):
        problem = _problem(key) or _collision(key, arrays)
        if problem:
            raise PlanError(f"key {key!r} cannot be stored: {problem}", key=key)


def _problem(key: str) -> str | None:
    for part in key.split("/"):
        if part in {"", ".", ".."}:
            return "it is empty, starts or ends with '/', or has an empty, '.' or '..' component"
        if "\0" in part or "\\" in part:
            return "it holds a NUL character, or a backslash, which TensorStore takes for '/'"
        if _TAKEN.fullmatch(part):
            return f"{part!r} is the name of a file of a checkpoint, or of one on its way out"
        try:
            nbytes = len(part.encode())
        except UnicodeEncodeError:
            return "it cannot be encoded as UTF-8"
        if nbytes > _MAX_COMPONENT_NBYTES:
            return (
                f"a component has {nbytes} bytes, file systems take {_MAX_COMPONENT_NBYTES}; "
                "shorten it or split it with '/'"
            )
    return None


def _collision(key: str, array_keys: frozenset[str]) -> str | None:
    """Describes the file of another array in the place of the key's directory; None without one."""
    parts = key.split("/")
    for depth in range(1, len(parts)):
        above = "/".join(parts[:depth])
        if above in array_keys and _FILES_OF_AN_ARRAY.fullmatch(parts[depth]):
            return f"'{parts[depth]}' is a file of the array {above!r}"
    return None


def groups(
    items: Iterable[T],
    max_nbytes: int,
    nbytes_of: Callable[[T], int] = operator.attrgetter("nbytes"),
) -> Iterator[list[T]]:
    """Items in order, in groups of a bounded size; a larger item has one of its own."""
    group: list[T] = []
    held = 0
    for item in items:
        nbytes = nbytes_of(item)
        if group and held + nbytes > max_nbytes:
            yield group
            group, held = [], 0
        group.append(item)
        held += nbytes
    if group:
        yield group
