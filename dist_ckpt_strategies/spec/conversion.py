"""What a conversion reads and writes, box by box."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Extent, Region


class Format(StrEnum):
    """What a checkpoint can be converted to; the values are those of the command line."""

    ZARR2 = "zarr@2"
    ZARR1 = "zarr@1"
    TORCH_DIST = "torch_dist"
    SAFETENSORS = "safetensors"

    @classmethod
    def named(cls, name: str) -> Format:
        """The format of that name.

        Raises:
            PlanError: there is none.
        """
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(cls)
            raise PlanError(f"format: expected one of {known}, found {name!r}") from None


@dataclass(frozen=True, slots=True)
class SourceArray:
    """An array as the source keeps it.

    Attributes:
        key: its name there.
        shape: in elements.
        dtype: of its elements.
        chunk_shape: of the regular grid it lies on; None where ``pieces`` lists its boxes.
        pieces: the boxes and, for each, the rank that wrote it.
        grain: box sizes whose multiples are read without waste, in elements; None for any.
    """

    key: str
    shape: Extent
    dtype: DType
    chunk_shape: Extent | None = None
    pieces: tuple[tuple[Region, int], ...] = ()
    grain: Extent | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return Region.whole(self.shape).numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """A box that is written in one go.

    Attributes:
        source: key of the array in the source.
        array: as the target has it.
        region: which elements; a chunk's whole box, which may reach past the array's edge.
        grain: see SourceArray.
        byte_offset: where they begin in the file, for formats where that is fixed.
    """

    source: str
    array: ArraySpec
    region: Region
    grain: Extent | None = None
    byte_offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the elements that the array has."""
        held = self.region.intersect(Region.whole(self.array.shape))
        return 0 if held is None else held.numel * self.array.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Unit:
    """What is done, or not done, as a whole: a file, or a range of one.

    Attributes:
        name: of the file, below the target's directory.
        parts: what goes there, in order.
    """

    name: str
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return sum(part.nbytes for part in self.parts)
