"""What the package asks of a place that holds arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.storage.io_pool import Transfer

HostArray = npt.NDArray[np.generic] | npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ArrayWrite:
    """Elements of ``region`` to store; ``source`` has its shape and stays untouched until done."""

    array: ArraySpec
    region: Region
    source: HostArray


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


class ArrayWriter(Protocol):
    """Moves regions of named arrays from memory to storage."""

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """Write the metadata of new arrays."""
        ...

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """Make durable all that this store has written, and the metadata of these arrays.

        The names of their files too, those that other ranks wrote included: call it when every
        rank has written.
        """
        ...

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """Issue all writes at once. Each covers whole chunks, no chunk is written twice.

        They need not wait for the array's creation.
        """
        ...
