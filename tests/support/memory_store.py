"""An array store in memory that does the job, keeps count, and fails when told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dist_ckpt_strategies.core.array import ArraySpec
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.storage.io_pool import Transfer
from dist_ckpt_strategies.storage.store import ArrayRead, ArrayWrite
from tests.support.samples import Values


@dataclass
class Operation(Transfer):
    """A transfer that happens when it is waited for, as late as a store may do it."""

    act: Callable[[], None]
    is_done: bool = False

    def wait(self, timeout_s: float) -> None:
        """Do it, once."""
        if not self.is_done:
            self.is_done = True
            self.act()


@dataclass
class MemoryArrays:
    """Arrays by key. See ArrayStore.

    Attributes:
        arrays: what is stored.
        fails: keys whose transfers fail.
        writes: the requests of each ``begin_writes``.
        reads: the requests of each ``begin_reads``.
        deeds: every transfer that was begun.
        events: names of what happened, in order.
    """

    arrays: dict[str, Values] = field(default_factory=dict)
    fails: set[str] = field(default_factory=set)
    writes: list[list[ArrayWrite]] = field(default_factory=list)
    reads: list[list[ArrayRead]] = field(default_factory=list)
    deeds: list[Operation] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    @property
    def in_flight(self) -> list[Operation]:
        """Transfers that nobody has waited for."""
        return [operation for operation in self.deeds if not operation.is_done]

    def begin_creates(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        return self._begun("create", [array.key for array in arrays], lambda: None)

    def begin_syncs(self, arrays: Sequence[ArraySpec]) -> Transfer:
        """See ArrayStore."""
        return self._begun("sync", [array.key for array in arrays], lambda: None)

    def begin_writes(self, writes: Sequence[ArrayWrite]) -> Transfer:
        """See ArrayStore."""
        self.writes.append(list(writes))

        def act() -> None:
            for write in writes:
                empty = np.zeros(write.array.shape, write.array.dtype.numpy)
                held = self.arrays.setdefault(write.array.key, empty)
                held[write.region.slices()] = write.source

        return self._begun("write", [write.array.key for write in writes], act)

    def begin_reads(self, reads: Sequence[ArrayRead]) -> Transfer:
        """See ArrayStore."""
        self.reads.append(list(reads))

        def act() -> None:
            for read in reads:
                read.target[...] = self.arrays[read.array.key][read.region.slices()]

        return self._begun("read", [read.array.key for read in reads], act)

    def _begun(self, name: str, keys: Sequence[str], act: Callable[[], None]) -> Transfer:
        def operation() -> None:
            self.events.append(f"{name} done")
            for key in keys:
                if key in self.fails:
                    raise StorageError(f"{key}: told to fail", key=key)
            act()

        self.events.append(f"{name} begun")
        self.deeds.append(Operation(operation))
        return self.deeds[-1]
