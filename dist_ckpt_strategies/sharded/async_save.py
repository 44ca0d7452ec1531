"""Write a planned save in the background."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dist_ckpt_strategies.comm.agree import agree_and_gather
from dist_ckpt_strategies.comm.base import Message
from dist_ckpt_strategies.errors import StorageError
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.sharded.async_request import (
    RUNNING_SAVES,
    BackgroundWork,
    LocalSaveRequest,
    start_on_all,
    yield_to_training,
)
from dist_ckpt_strategies.sharded.save import ShardedSave
from dist_ckpt_strategies.sharded.write_plan import stage_plan
from dist_ckpt_strategies.sharded.writer_process import (
    Digests,
    StagedWrite,
    WriteJob,
    digests_from,
)
from dist_ckpt_strategies.storage.time_limit import ENDING, WORK, restart_limit, time_limit


@dataclass(frozen=True, slots=True)
class _Written:
    """What the thread of a save has done: the digests, or the writer process's answer.

    Python that takes long runs before the thread or after it: a busy thread keeps training waiting.
    """

    outcome: Digests | bytes
    seconds: float

    def digests(self) -> Digests:
        """Of all chunks; raises what the writer process has raised."""
        return digests_from(self.outcome) if isinstance(self.outcome, bytes) else self.outcome


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

    def prepare() -> BackgroundWork[_Written]:
        save.open_arrays()
        write_arrays = _array_write(save, staged)

        def write() -> _Written:
            yield_to_training()
            started = time.monotonic()
            with time_limit(inputs.options.timeout_s, WORK):
                save.write_small_files()
                outcome = write_arrays()
            return _Written(outcome, time.monotonic() - started)

        work = BackgroundWork(write, "dist-ckpt-save")
        RUNNING_SAVES.add(inputs.writer.root, work)
        return work

    work = inputs.cache.running = start_on_all(comm, prepare)
    name = (save.save_id, f"the end of the save to {inputs.writer.root}")
    return LocalSaveRequest.of(
        comm, name, work, partial(_finalise, save, work), inputs.options.timeout_s
    )


@raises_megatron_errors
def _finalise(save: ShardedSave, work: BackgroundWork[_Written]) -> None:
    """Make the save the checkpoint's content, once all ranks have written it. Collective.

    Where another save has begun in its place, maybe ended too, nothing there is touched.
    """
    comm, writer, timeout_s = save.comm, save.inputs.writer, save.inputs.options.timeout_s
    seconds: list[float] = []

    def written() -> Message:
        work.wait(WORK * timeout_s)
        restart_limit()
        try:
            found = work.result()
            digests = found.digests()
        except StorageError:
            writer.place.require_current()  # another save may have removed what this one wrote
            raise
        seconds.append(found.seconds)
        writer.take_digests(digests)
        if comm.rank == 0:
            writer.place.require_current()
        return save.describe_files()

    with time_limit(timeout_s, then=ENDING):
        described = agree_and_gather(comm, written)
        restart_limit()
        save.complete(described)
    save.log_report(seconds[0])


def _array_write(
    save: ShardedSave, staged: tuple[StagedWrite, ...]
) -> Callable[[], Digests | bytes]:
    """What writes the arrays, for a thread to call: by the writer process if there is one."""
    cache, writer, options = save.inputs.cache, save.inputs.writer, save.inputs.options
    creations = save.planned.plan.creations_of(save.comm.global_rank(save.comm.rank))
    shared = cache.shared_bytes()
    process = cache.writer_process() if options.writer_process and shared else None
    if process is None or shared is None or writer.open_elsewhere is None:
        here = WriteJob(creations, staged, lambda: writer.arrays, options.timeout_s)
        return lambda: here.run(cache.staged_bytes())
    there = WriteJob(creations, staged, writer.open_elsewhere, options.timeout_s)
    return partial(process.run, pickle.dumps(there), shared)
