"""What is kept from save to save: the last plan, host memory for a copy, and a writer process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import HostSnapshot, Slot, pin_while_alive, torch_dtype
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.sharded.async_request import BackgroundWork
from dist_ckpt_strategies.sharded.plan_save import WriteItem
from dist_ckpt_strategies.sharded.writer_process import (
    SharedBytes,
    WriterProcess,
    is_supported,
    start_writer,
)
from dist_ckpt_strategies.storage.time_limit import WORK, uncounted

if TYPE_CHECKING:
    from dist_ckpt_strategies.sharded.save import Planned

logger = logging.getLogger(__name__)


class _SharedMemory:
    """Allocates the memory of a snapshot, so that another process can map it.

    Attributes:
        shared: what was given last.
    """

    def __init__(self) -> None:
        self.shared: SharedBytes | None = None

    def allocate(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        """See HostSnapshot.

        Raises:
            StorageError: there is not so much.
        """
        self.shared = None  # before the new one is made
        self.shared = SharedBytes(nbytes)
        memory = torch.frombuffer(self.shared.memory, dtype=torch.uint8)
        if is_pinned:
            pin_while_alive(self.shared, memory)
        return memory


class SaveCache:
    """What is kept from save to save, because a training run saves the same shards again and again.

    One to each strategy, or shared by those that save the same state.

    Attributes:
        planned: the last plan, and what it followed from.
        running: what writes in the background, if anything does; the snapshot is its own until it
            is done.
    """

    def __init__(self) -> None:
        self.planned: Planned | None = None
        self._shared = _SharedMemory() if is_supported() else None
        self._snapshot = HostSnapshot(self._shared.allocate) if self._shared else HostSnapshot()
        self.running: BackgroundWork[Any] | None = None
        self._process: WriterProcess | None = None
        self._has_process = True

    def reserve(self, writes: Sequence[WriteItem], is_cuda: bool) -> list[Slot]:  # noqa: FBT001 - see stage_plan
        """A place for each chunk; those of the save before are gone."""
        layouts = [(write.region.shape, torch_dtype(write.array.dtype)) for write in writes]
        try:
            return self._snapshot.slots(layouts, is_pinned=is_cuda)
        except StorageError as error:  # of shared memory: a limit on the size of files is one on it
            logger.warning("%s: threads of this process write instead of another process", error)
            self._shared, self._snapshot = None, HostSnapshot()
            return self._snapshot.slots(layouts, is_pinned=is_cuda)

    def staged_bytes(self) -> memoryview:
        """The memory that ``reserve`` has given places in."""
        return self._snapshot.memory.numpy().data

    def shared_bytes(self) -> SharedBytes | None:
        """The same, for another process; None where none can have it."""
        return None if self._shared is None else self._shared.shared

    def get_ready(self, options: Options) -> None:
        """Return when the asynchronous save before has written all it has to, well or not.

        A process that will write starts meanwhile.

        Raises:
            SaveTimeoutError: that save goes on for most of the time limit.
        """
        if options.writer_process:
            self.writer_process()
        if self.running is not None:
            with uncounted():
                self.running.wait(WORK * options.timeout_s, "the save before")

    def writer_process(self) -> WriterProcess | None:
        """The process that writes for this one, started where there is none; None: it cannot be."""
        if self._has_process and (self._process is None or not self._process.is_usable):
            self._process = start_writer()
            self._has_process = self._process is not None
        return self._process
