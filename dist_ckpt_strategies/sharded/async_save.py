"""Write a planned save in the background; what is kept for that from one save to the next."""

import logging
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dist_ckpt_strategies.comm.base import Message, run_and_gather
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import HostSnapshot, Slot, bytes_of_mapping, torch_dtype
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.formats.arrays import DirectoryWriter
from dist_ckpt_strategies.formats.chunks import Digests
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.sharded.async_request import (
    BackgroundWork,
    LocalSaveRequest,
    start_on_all,
    yield_to_training,
)
from dist_ckpt_strategies.sharded.plan import WriteItem
from dist_ckpt_strategies.sharded.save import RUNNING_SAVES, Planned, ShardedSave
from dist_ckpt_strategies.sharded.transfer import stage_plan
from dist_ckpt_strategies.sharded.writer_process import (
    SharedBytes,
    StagedWrite,
    WriteJob,
    WriterProcess,
    digests_from,
    is_supported,
)
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.io_pool import ENDING, WORK, restart_limit, time_limit, uncounted

logger = logging.getLogger(__name__)


class _SharedMemory:
    """Allocates the memory of a snapshot, so that another process can map ``shared``, the last."""

    def __init__(self) -> None:
        self.shared: SharedBytes | None = None

    def allocate(self, nbytes: int, *, is_pinned: bool) -> torch.Tensor:
        """See HostSnapshot; a StorageError if there is not so much."""
        self.shared = None  # before the new one is made
        self.shared = SharedBytes(nbytes)
        return bytes_of_mapping(self.shared.memory, is_pinned=is_pinned)


class SaveCache:
    """What is kept from save to save, because a training run saves the same shards again and again.

    One to each strategy, or shared by those that save the same state. ``running`` writes in the
    background; the snapshot is its own until it is done.
    """

    def __init__(self) -> None:
        self.planned: Planned | None = None
        self._shared = _SharedMemory() if is_supported() else None
        self._snapshot = HostSnapshot(self._shared.allocate) if self._shared else HostSnapshot()
        self.running: BackgroundWork[Any] | None = None
        self._process: WriterProcess | None = None
        self._has_process = is_supported()

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

        A process that will write starts meanwhile. Raises a SaveTimeoutError if that save takes
        most of the time limit.
        """
        if options.writer_process:
            self.writer_process()
        if self.running is not None:
            with uncounted():
                self.running.wait(WORK * options.timeout_s, "the save before")

    def writer_process(self) -> WriterProcess | None:
        """The process that writes for this one, started where there is none; None: it cannot be."""
        if self._has_process and (self._process is None or not self._process.is_usable):
            try:
                self._process = WriterProcess()
            except StorageError as error:
                logger.warning("threads of this process write asynchronous saves: %s", error)
                self._process, self._has_process = None, False
        return self._process


_Written = Digests | bytes
"""What the thread of a save gives: the digests, or the writer process's answer. Python that takes
long runs before the thread or after it: a busy thread keeps training waiting."""


def begin_in_background(save: ShardedSave) -> LocalSaveRequest:
    """Copy what this rank will write to host memory, and write it in the background.

    Collective. When it returns the tensors may be overwritten. Slices of irregular shards move
    between ranks before it returns. Takes as much host memory as this rank's main replicas. The
    finalisation of the request is collective; it raises on every rank if the save has failed on
    any, and then nothing becomes visible.
    """
    comm, writer, timeout_s = save.comm, save.writer, save.writer.options.timeout_s
    staged = stage_plan(save.planned.plan, save.tensors, comm, save.cache.reserve)
    save.release_tensors()

    def prepare() -> BackgroundWork[_Written]:
        writer.require(f"rank {comm.global_ranks[0]}")
        write_arrays = _array_write(save, staged)

        def write() -> _Written:
            yield_to_training()
            with time_limit(timeout_s, WORK):
                save.write_small_files()
                return write_arrays()

        work = BackgroundWork(write, "dist-ckpt-save", save.planned.nbytes)
        RUNNING_SAVES.add(writer.root, work)
        return work

    work = save.cache.running = start_on_all(comm, prepare)
    name = (save.save_id, f"the end of the save to {writer.root}")
    return LocalSaveRequest(comm, name, work, partial(_finalise, save, work), timeout_s)


@raises_megatron_errors
def _finalise(save: ShardedSave, work: BackgroundWork[_Written]) -> None:
    """Make the save the checkpoint's content, once all ranks have written it. Collective.

    Where another save has begun in its place, maybe ended too, nothing of that is touched.
    """
    comm, writer, timeout_s = save.comm, save.writer, save.writer.options.timeout_s

    def written() -> Message:
        work.wait((WORK + 1 / 8) * timeout_s)  # longer than the work's own limit, which says more
        restart_limit()
        try:
            outcome = work.result()
            digests = digests_from(outcome) if isinstance(outcome, bytes) else outcome
        except StorageError:
            writer.place.require()  # another save may have removed what this one wrote
            raise
        writer.arrays.digests.update(digests)
        if comm.rank == 0:
            writer.place.require()
        return save.describe_files()

    with time_limit(timeout_s, then=ENDING):
        try:
            described = run_and_gather(comm, written)
            restart_limit()
            save.complete(described, lambda: work.seconds)
        except StorageError:
            save.abandon()
            raise


def _array_write(save: ShardedSave, staged: tuple[StagedWrite, ...]) -> Callable[[], _Written]:
    """What writes the arrays, for a thread to call: by the writer process if there is one."""
    cache, writer, options = save.cache, save.writer, save.writer.options
    creations = tuple(creation.array for creation in save.planned.plan.creations)
    shared = cache.shared_bytes()
    process = cache.writer_process() if options.writer_process and shared else None
    place = writer.place.location
    if process is None or shared is None or isinstance(place, Bucket):
        here = WriteJob(creations, staged, lambda: writer.arrays, options.timeout_s)
        return lambda: here.run(cache.staged_bytes())
    open_writer = partial(DirectoryWriter, place, options)
    there = WriteJob(creations, staged, open_writer, options.timeout_s)
    return partial(process.run, pickle.dumps(there), shared)
