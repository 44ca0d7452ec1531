"""A global array as a checkpoint stores it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent, Region

Wire = list[Any]
"""What travels between ranks in place of a spec: JSON types only."""


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
        inner_shape: of the inner chunks that make up a chunk, in elements; it divides
            ``chunk_shape``. None in format 1, whose chunks are of one piece.
        has_crc32c: whether a CRC32C follows every inner chunk.
    """

    key: str
    shape: Extent
    dtype: DType
    chunk_shape: Extent
    separator: str = "."
    is_raw: bool = True
    inner_shape: Extent | None = None
    has_crc32c: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, chunk padding not counted."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one whole chunk, which a raw chunk file has even at the array's edge."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def grid(self) -> Extent:
        """Number of chunks in each dim; any 0 means that the array has no element."""
        return tuple([-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)])

    @property
    def num_chunks(self) -> int:
        """Number of chunk files of the complete array; 1 for a scalar."""
        return math.prod(self.grid)

    def chunk_region(self, index: Extent) -> Region:
        """The chunk's whole box, which may reach past the array's edge."""
        offset = tuple(i * c for i, c in zip(index, self.chunk_shape, strict=True))
        return Region(offset, self.chunk_shape)

    def chunk_at(self, region: Region) -> Extent | None:
        """The index of the chunk whose whole box is ``region``; None where no chunk's is."""
        if region.shape != self.chunk_shape:
            return None
        index = tuple(map(operator.floordiv, region.offset, self.chunk_shape))
        exact = tuple(map(operator.mul, index, self.chunk_shape)) == region.offset
        return index if exact else None

    def chunk_indices(self) -> Iterator[Extent]:
        """Every chunk of the grid, in C order."""
        return product(*map(range, self.grid))

    def chunks_of(self, region: Region) -> Iterator[Extent]:
        """The chunks that share an element with ``region``, in C order."""
        if region.numel == 0:
            return iter(())
        spans = (
            range(a // c, (e - 1) // c + 1)
            for a, e, c in zip(region.offset, region.end, self.chunk_shape, strict=True)
        )
        return product(*spans)

    def chunk_name(self, index: Extent) -> str:
        """File name of a chunk, below the array's directory; ``0`` for a scalar."""
        return self.separator.join(map(str, index)) if index else "0"


def array_to_wire(array: ArraySpec) -> Wire:
    """The spec as JSON types."""
    return [
        array.key,
        list(array.shape),
        array.dtype.value,
        list(array.chunk_shape),
        array.separator,
        int(array.is_raw),
        None if array.inner_shape is None else list(array.inner_shape),
        int(array.has_crc32c),
    ]


def array_from_wire(wire: Wire) -> ArraySpec:
    """The spec that ``array_to_wire`` made."""
    key, shape, dtype, chunk_shape, separator, is_raw, inner_shape, has_crc32c = wire
    return ArraySpec(
        str(key),
        tuple(map(int, shape)),
        DType.named(dtype, key=key),
        tuple(map(int, chunk_shape)),
        str(separator),
        is_raw=bool(is_raw),
        inner_shape=None if inner_shape is None else tuple(map(int, inner_shape)),
        has_crc32c=bool(has_crc32c),
    )
