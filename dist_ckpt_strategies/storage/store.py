"""What the package asks of a place that holds checkpoints: a directory, or a bucket.

Arrays are read and written by region; small files have names below the checkpoint's root.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import ArraySpec, Region
from dist_ckpt_strategies.storage.io_pool import Transfer

HostArray = npt.NDArray[np.generic] | npt.NDArray[Any]

Bytes = npt.NDArray[Any]
"""A one-dimensional, contiguous array of uint8."""


@dataclass(frozen=True, slots=True)
class ArrayRead:
    """Elements of ``region`` to read into ``target``, which has its shape and may be strided."""

    array: ArraySpec
    region: Region
    target: HostArray


class ArrayReader(Protocol):
    """Moves regions of named arrays to memory."""

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """Issue all reads at once. A missing chunk is an error, never zeros."""
        ...


class Store(Protocol):
    """A directory, or what stands for one. Names have ``/`` between their parts.

    Every method raises StorageError, naming the file, where storage fails.

    Attributes:
        num_readers: threads that are best used to read many files.
    """

    @property
    def num_readers(self) -> int:
        """See the class."""
        ...

    def __str__(self) -> str:
        """The directory as its user calls it."""
        ...

    def path(self, name: str) -> str:
        """A file as its user calls it."""
        ...

    def read(self, name: str, byte_offset: int = 0, nbytes: int = -1) -> bytes:
        """The content of a file, from a byte on: to its end, or as many bytes as it has of these.

        Raises:
            IncompleteCheckpointError: it is missing.
        """
        ...

    def write(self, name: str, content: bytes) -> None:
        """Make a file, whole and durable, or replace it."""
        ...
