"""Save in the background, from a copy in host memory that is laid out as the packs are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from dist_ckpt_strategies.comm.base import run_collectively
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.device import bytes_of_mapping, copy_into, host_memory, uses_cuda
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.formats.pack import Layout
from dist_ckpt_strategies.formats.pack_write import pack_starts, places_of, write_copy
from dist_ckpt_strategies.sharded.async_request import (
    BackgroundWork,
    LocalSaveRequest,
    yield_to_training,
)
from dist_ckpt_strategies.sharded.ledger import proved
from dist_ckpt_strategies.sharded.save import (
    Contents,
    PlanCache,
    Started,
    finish_save,
    require_space,
)
from dist_ckpt_strategies.sharded.writer_process import SharedBytes, WriterProcess, is_supported
from dist_ckpt_strategies.storage.bucket import Bucket, Place
from dist_ckpt_strategies.storage.io_pool import WORK

logger = logging.getLogger(__name__)


class Kept:
    """State that a strategy keeps from save to save.

    ``cache`` is what ranks know of each other, ``running`` the last save in the background. For
    these it keeps memory for the copy, and a process that writes it.
    """

    def __init__(self) -> None:
        self.cache: PlanCache | None = None
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

    def writer(
        self, write: Callable[[memoryview], Any], store: Place, options: Options
    ) -> Callable[[], Any]:
        """The call that writes the copy, for a thread: through the process if there is one."""
        shared, memory = self._shared, self._memory
        process = self.process() if options.writer_process and shared is not None else None
        if process is None or shared is None or isinstance(store, Bucket):
            assert memory is not None  # noqa: S101 - ``copy`` has made it
            return lambda: write(memory.numpy().data)
        return lambda: process.run(write, shared)


def copy_contents(contents: Contents, layout: Layout, memory: torch.Tensor) -> None:
    """Copy what is to be written to where ``write_copy`` and ``seal`` look for it in memory."""
    targets: list[torch.Tensor] = []
    tensors: list[torch.Tensor] = []
    for pack, start in zip(layout.packs, pack_starts(layout.packs), strict=False):
        for number, at, size in places_of(pack, start):
            if number < 0:
                continue
            place, source = memory[at : at + size], contents.source(number)
            if isinstance(source, bytes):
                place.numpy()[:] = np.frombuffer(source, np.uint8)
            else:
                targets.append(place.view(source.dtype).reshape(source.shape))
                tensors.append(source)
    copy_into(targets, tensors)


def begin_in_background(
    started: Started, kept: Kept, marker: bytes | None, *, overwrite: bool
) -> LocalSaveRequest:
    """Copy what this rank writes to host memory, and write it in the background. Collective.

    When it returns the tensors may be overwritten. When the request is finalised, ``finish_save``
    is called with ``marker`` and ``overwrite``.
    """
    comm, options, cache = started.comm, started.options, started.cache
    ledgers, works = [cache.ledger], list[BackgroundWork[Any]]()

    def prepare() -> None:
        if cache.ledger is not None:
            ledgers[0] = proved(cache.ledger, comm.global_ranks)
        require_space(started)
        kept.copy(started.contents, cache.layout)
        copied = partial(write_copy, cache.layout.packs, started.format.writer(started))
        write = kept.writer(copied, started.store, options)

        def work() -> Any:
            yield_to_training()
            return write()

        nbytes = sum(shard.nbytes for shard in started.contents.shards)
        works.append(BackgroundWork(work, "dist-ckpt-save", nbytes))

    try:
        run_collectively(comm, prepare, follows=True)
    except BaseException:  # nothing begins on any rank
        for prepared in works:
            prepared.call_off()
        raise
    (share,) = works
    kept.running = share
    share.begin()
    begun = replace(
        started,
        contents=replace(started.contents, tensors=(), objects=()),
        cache=replace(cache, ledger=ledgers[0]),
    )

    def written() -> Any:
        share.wait((WORK + 1 / 8) * options.timeout_s)  # longer than the work's own limit
        return share.result()

    def finish() -> None:
        last = None if kept.cache is None else kept.cache.last  # of a save that ended meanwhile
        current = replace(begun, cache=replace(begun.cache, last=last))
        kept.cache = finish_save(current, written, marker=marker, overwrite=overwrite)

    name = (started.save_id, f"the end of the save to {started.store}")
    return LocalSaveRequest(comm, name, share, finish, options.timeout_s)
