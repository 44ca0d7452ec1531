"""Write packs in the background, from a copy in host memory that is laid out as the packs are."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import bytes_of_mapping, copy_into, host_memory, uses_cuda
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.formats.pack import Layout
from dist_ckpt_strategies.formats.pack_write import PackJob, pack_starts
from dist_ckpt_strategies.formats.zarr_write import ChunkJob
from dist_ckpt_strategies.sharded.async_request import (
    BackgroundWork,
    LocalSaveRequest,
    start_on_all,
    yield_to_training,
)
from dist_ckpt_strategies.sharded.ledger import proved
from dist_ckpt_strategies.sharded.pack_save import Contents, Started, num_writers
from dist_ckpt_strategies.sharded.writer_process import SharedBytes, WriterProcess, is_supported
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.io_pool import OPENING, WORK, Deadline, run_within

logger = logging.getLogger(__name__)

WriteJob = PackJob | ChunkJob
"""What writes a copy; it can be sent to another process."""


class Background:
    """What a strategy keeps for saves in the background: memory for the copy, and a process."""

    def __init__(self) -> None:
        self.running: BackgroundWork[Any] | None = None
        self._shared: SharedBytes | None = None
        self._memory: torch.Tensor | None = None
        self._process: WriterProcess | None = None
        self._has_process = is_supported()

    def get_ready(self, options: Options) -> None:
        """Return when the save before has written all it has to, well or not.

        A process that will write starts meanwhile. Raises a StorageTimeoutError if that save takes
        most of the time limit.
        """
        if options.writer_process:
            self.process()
        if self.running is not None:
            self.running.wait(WORK * options.timeout_s, "the save before")

    def process(self) -> WriterProcess | None:
        """The process that writes for this one, started where there is none; None: it cannot be."""
        if self._has_process and (self._process is None or not self._process.is_usable):
            try:
                self._process = WriterProcess()
            except StorageError as error:
                logger.warning("threads of this process write asynchronous saves: %s", error)
                self._process, self._has_process = None, False
        return self._process

    def copy(self, contents: Contents, layout: Layout) -> None:
        """Copy what is to be written to host memory, which grows to its size and is kept."""
        *_, nbytes = pack_starts(layout.packs)
        if self._memory is None or self._memory.numel() < nbytes:
            self._memory = self._shared = None  # before the new one is made
            self._memory = self._new_memory(nbytes)
        copy_contents(contents, layout, self._memory)

    def _new_memory(self, nbytes: int) -> torch.Tensor:
        is_pinned = uses_cuda()
        if is_supported():
            try:
                self._shared = SharedBytes(nbytes)
                return bytes_of_mapping(self._shared.memory, is_pinned=is_pinned)
            except StorageError as error:  # a limit on the size of files is one on it
                logger.warning("threads write in place of another process: %s", error)
                self._shared = None
        return host_memory(nbytes, is_pinned=is_pinned)

    def writer(self, job: WriteJob, options: Options) -> Callable[[], Any]:
        """What writes the copy, for a thread to call: by the process if there is one."""
        shared, memory = self._shared, self._memory
        process = self.process() if options.writer_process and shared is not None else None
        if process is None or shared is None or isinstance(job.store, Bucket):
            assert memory is not None  # noqa: S101 - ``copy`` has made it
            return lambda: job.run(memory.numpy().data)
        content = pickle.dumps(job)
        return lambda: _answer(process.run(content, shared))


def copy_contents(contents: Contents, layout: Layout, memory: torch.Tensor) -> None:
    """Copy what is to be written to where ``PackJob`` and ``seal`` look for it in host memory."""
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    tail = [content for _, content in contents.objects] + [contents.common or b""]
    for pack, start in zip(layout.packs, pack_starts(layout.packs), strict=False):
        places = accumulate(pack.sizes, initial=start + pack.data_start)
        for source, at, size in zip(pack.sources, places, pack.sizes, strict=False):
            place = memory[at : at + size]
            if 0 <= source < len(contents.tensors):
                tensor = contents.tensors[source]
                targets.append(place.view(tensor.dtype).reshape(tensor.shape))
                sources.append(tensor)
            elif source >= 0:
                content = tail[source - len(contents.tensors)]
                place.numpy()[:] = np.frombuffer(content, np.uint8)
    copy_into(targets, sources)


def _answer(content: bytes) -> Any:
    found = pickle.loads(content)  # noqa: S301 - from our own process
    if isinstance(found, Exception):
        raise found
    return found


def pack_job(started: Started) -> PackJob:
    """What writes the copy of a save as packs."""
    options = started.options
    return PackJob(
        started.store,
        started.known.layout.packs,
        started.save_id,
        started.comm.global_ranks[started.comm.rank],
        WORK * options.timeout_s,
        num_writers(started.store, options),
        started.num_packs,
    )


def begin_in_background(
    started: Started,
    background: Background,
    job_of: Callable[[Started], WriteJob],
    finish: Callable[[Started, Callable[[], Any]], None],
) -> LocalSaveRequest:
    """Copy what this rank writes to host memory, and write it in the background. Collective.

    When it returns the tensors may be overwritten. ``job_of`` gives what writes the copy.
    ``finish`` is called when the request is finalised, with what waits for this rank's share.
    """
    comm, options, known = started.comm, started.options, started.known
    ledgers = [known.ledger]

    def prepare() -> BackgroundWork[Any]:
        if known.ledger is not None:
            ledgers[0] = proved(known.ledger, comm.global_ranks)
        deadline = Deadline.after(OPENING * options.timeout_s)
        run_within(deadline, started.store, started.require_space)
        background.copy(started.contents, known.layout)
        job = job_of(started)
        write = background.writer(job, options)

        def work() -> Any:
            yield_to_training()
            return write()

        nbytes = sum(shard.nbytes for shard in started.contents.shards)
        return BackgroundWork(work, "dist-ckpt-save", nbytes)

    work = background.running = start_on_all(comm, prepare)
    kept = replace(
        started,
        contents=replace(started.contents, tensors=(), objects=()),
        known=replace(known, ledger=ledgers[0]),
    )

    def written() -> Any:
        work.wait((WORK + 1 / 8) * options.timeout_s)  # longer than the work's own limit
        return work.result()

    name = (started.save_id, f"the end of the save to {started.store}")
    return LocalSaveRequest(comm, name, work, partial(finish, kept, written), options.timeout_s)
