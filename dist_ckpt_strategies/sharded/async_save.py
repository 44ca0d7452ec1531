"""Write a planned save in the background."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dist_ckpt_strategies.comm.agree import agree_and_gather
from dist_ckpt_strategies.comm.base import (
    Message,
    report_level,
)
from dist_ckpt_strategies.config import limit_of_wait
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.sharded.async_request import (
    RUNNING_SAVES,
    BackgroundWork,
    LocalSaveRequest,
    SaveName,
    agree_to_start,
    yield_to_training,
)
from dist_ckpt_strategies.sharded.save import ShardedSave
from dist_ckpt_strategies.sharded.save_inputs import SaveInputs
from dist_ckpt_strategies.sharded.staged import StagedSave, WriteJob, Written
from dist_ckpt_strategies.sharded.write_plan import stage_plan
from dist_ckpt_strategies.sharded.writer_process import outcome_of
from dist_ckpt_strategies.storage.time_limit import restart_limit, time_limit

logger = logging.getLogger(__name__)

Outcome = Callable[[], Written]
"""Returns what writing the arrays has returned, or raises what it raised."""


def begin_in_background(save: ShardedSave) -> LocalSaveRequest:
    """Copy what this rank will write to host memory, and write it in the background.

    Collective. When it returns the tensors may be overwritten. Slices of irregular shards move
    between ranks before it returns. Takes as much host memory as this rank's main replicas.

    Returns:
        The request, whose finalisation is collective; it raises on every rank if the save has
        failed on any, and then nothing becomes visible.
    """
    comm = save.comm
    staged = stage_plan(save.planned.plan, save.tensors, comm, save.inputs.cache.reserve)
    save.release_tensors()
    inputs = save.inputs

    def prepare() -> BackgroundWork[Outcome]:
        save.open_arrays()
        write_arrays = _array_write(staged, inputs)

        def write() -> Outcome:
            yield_to_training()
            with time_limit(inputs.options.timeout_s):
                save.write_small_files()
                return write_arrays()

        work = BackgroundWork(write, "dist-ckpt-save")
        RUNNING_SAVES.add(inputs.writer.root, work)
        return work

    work = inputs.cache.running = agree_to_start(comm, prepare)
    name = SaveName(save.save_id, f"the end of the save to {inputs.writer.root}")
    return LocalSaveRequest.of(
        comm, name, work, _Ending(save, work).finalise, inputs.options.timeout_s
    )


@dataclass(frozen=True, slots=True)
class _Ending:
    """What is left of an asynchronous save, for all ranks to do together.

    Where another save has begun in its place, maybe ended too, nothing there is touched.
    """

    save: ShardedSave
    work: BackgroundWork[Outcome]

    @raises_megatron_errors
    def finalise(self) -> None:
        comm, timeout_s = self.save.comm, self.save.inputs.options.timeout_s
        reports: list[SaveReport] = []

        def written() -> Message:
            self.work.wait(limit_of_wait(timeout_s))
            writer = self.save.inputs.writer
            try:
                found = self.work.result()()
            except StorageError:
                writer.place.require_current()  # another save may have removed what this one wrote
                raise
            reports.append(found.report)
            writer.take_digests(found.digests)
            if comm.rank == 0:
                writer.place.require_current()
            return self.save.describe_files()

        try:
            with time_limit(timeout_s):
                described = agree_and_gather(comm, written)
                restart_limit()
                self.save.complete(described)
        finally:
            self.work.forget_mark()
        me = comm.global_rank(comm.rank)
        logger.log(report_level(comm), "rank %s: %s", me, reports[0])


def _array_write(staged: StagedSave, inputs: SaveInputs) -> Callable[[], Outcome]:
    """What writes the arrays, for a thread to call.

    All that takes Python long is done here, or where the outcome is asked for: a busy thread keeps
    training waiting.
    """
    cache, writer, options = inputs.cache, inputs.writer, inputs.options
    shared = cache.shared_bytes()
    process = cache.writer_process() if options.writer_process and shared else None
    if process is None or shared is None or writer.open_elsewhere is None:
        job = WriteJob(staged, lambda: writer.arrays, options.timeout_s)
        return lambda: partial(_itself, job.run(cache.staged_bytes()))
    content = pickle.dumps(WriteJob(staged, writer.open_elsewhere, options.timeout_s))
    return lambda: partial(outcome_of, process.run(content, shared))


def _itself(written: Written) -> Written:
    return written
