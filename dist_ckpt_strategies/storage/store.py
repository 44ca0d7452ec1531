"""Regions of stored arrays to be read, and the memory that they are read into."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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


BeginReads = Callable[[Sequence[ArrayRead]], Transfer]
"""Issues all reads at once. A missing chunk is an error, never zeros."""
