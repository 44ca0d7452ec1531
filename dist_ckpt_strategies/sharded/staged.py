"""One rank's share of a save, copied to host memory, from where it is written without other ranks.

Nothing here needs torch, so that a process that only writes starts at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.core.region import Region, Shape
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.storage.base import ArrayWrite, ArrayWriter, HostArray
from dist_ckpt_strategies.storage.io_pool import InFlight
from dist_ckpt_strategies.storage.time_limit import time_limit

Digests = Mapping[tuple[str, Shape], list[int]]
"""Of each chunk, by key and index: of its inner chunks, then of its index."""


@dataclass(frozen=True, slots=True)
class StagedWrite:
    """Elements of ``region``, in C order, ``byte_offset`` bytes into the memory."""

    array: ArraySpec
    region: Region
    byte_offset: int

    @property
    def nbytes(self) -> int:
        """Of the elements."""
        return self.region.numel * self.array.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StagedSave:
    """What this rank writes.

    Attributes:
        creations: arrays whose metadata it writes.
        writes: its chunks.
        moved_nbytes: bytes that it sent to the writers of other chunks.
    """

    creations: tuple[ArraySpec, ...]
    writes: tuple[StagedWrite, ...]
    moved_nbytes: int


@dataclass(frozen=True, slots=True)
class Written:
    """What came of it.

    Attributes:
        report: in numbers.
        digests: of what was written; none in a format without them.
    """

    report: SaveReport
    digests: Digests


@dataclass(frozen=True, slots=True)
class WriteJob:
    """A share of a save, and where it goes.

    Attributes:
        staged: what is written.
        open_writer: gives what writes it, in the process that does.
        timeout_s: longest wait for the storage, in seconds.
    """

    staged: StagedSave
    open_writer: Callable[[], ArrayWriter]
    timeout_s: float

    def run(self, memory: memoryview) -> Written:
        """Write it, durably. Rank-local.

        Args:
            memory: where the elements lie.

        Raises:
            StorageError: a write failed.
        """
        started = time.monotonic()
        staged, writer = self.staged, self.open_writer()
        requests = [ArrayWrite(w.array, w.region, _elements(memory, w)) for w in staged.writes]
        with time_limit(self.timeout_s):
            with InFlight(self.timeout_s) as in_flight:
                in_flight.follow_with(writer.begin_creates(staged.creations))
                in_flight.follow_with(writer.begin_writes(requests))
            touched = {a.key: a for a in (*staged.creations, *(w.array for w in staged.writes))}
            writer.begin_syncs(list(touched.values())).wait(self.timeout_s)
        report = SaveReport(
            num_arrays=len(staged.creations),
            num_chunks=len(staged.writes),
            nbytes=sum(write.nbytes for write in staged.writes),
            moved_nbytes=staged.moved_nbytes,
            seconds=time.monotonic() - started,
        )
        return Written(report, dict(getattr(writer, "digests", {})))


def _elements(memory: memoryview, write: StagedWrite) -> HostArray:
    return np.ndarray(write.region.shape, write.array.dtype.numpy, memory, write.byte_offset)
