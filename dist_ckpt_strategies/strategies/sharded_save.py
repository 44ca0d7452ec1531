"""Save between Megatron-Core's types and the plan and its runner, in any format."""

from __future__ import annotations

import logging
import pickle
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options, limit_of_wait
from dist_ckpt_strategies.local.background import (
    BackgroundWork,
    agree_to_start,
    yield_to_training,
)
from dist_ckpt_strategies.local.requests import LocalSaveRequest, SaveName
from dist_ckpt_strategies.local.running import RUNNING_SAVES
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.plan.array_grid import Cutting
from dist_ckpt_strategies.run.report import SaveReport
from dist_ckpt_strategies.run.save import run_save, stage_save
from dist_ckpt_strategies.run.staged import Digests, StagedSave, WriteJob, Written
from dist_ckpt_strategies.run.writer_process import outcome_of
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.locations import Location
from dist_ckpt_strategies.strategies.save_planning import (
    Facts,
    Holdings,
    Planned,
    SaveMemory,
    digest_of,
    facts_of,
    holdings_of,
    planned_save,
)

logger = logging.getLogger(__name__)


class SaveTarget(Protocol):
    """Where a save goes, and in which form."""

    @property
    def root(self) -> Location:
        """The place."""
        ...

    @property
    def cutting(self) -> Cutting:
        """What the files of chunks are made of."""
        ...

    @property
    def writer(self) -> ArrayWriter:
        """Writes the arrays."""
        ...

    @property
    def open_elsewhere(self) -> Callable[[], ArrayWriter] | None:
        """Gives such a writer in another process, once unpickled there; None: there is no way."""
        ...

    def dump(self, obj: Any, *, name: str) -> bytes:
        """What will be stored of an object."""
        ...

    def examine(self) -> None:
        """See what is there, and take an earlier checkpoint's marker away. On the first rank."""
        ...

    def clear(self, planned: Planned, token: str) -> None:
        """Make room for a checkpoint, and leave a token. On the first rank."""
        ...

    def require(self, token: str, owner: str) -> None:
        """Raise unless this rank sees the token of the first one, which ``complete`` looks for."""
        ...

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """Store what was dumped of this rank's objects, durably."""
        ...

    def take_digests(self, digests: Digests) -> None:
        """Take note of what another writer has written."""
        ...

    def require_current(self) -> None:
        """Raise unless the token is there. On the first rank.

        Raises:
            StorageError: another save has begun there, or all was removed.
        """
        ...

    def complete(self, planned: Planned, comm: Communicator) -> None:
        """Write what describes the checkpoint, all its files being durable. Collective.

        Raises:
            StorageError: the token is gone: another save has begun there, or all was removed.
        """
        ...


def save_sharded(
    state_dict: StateDict,
    open_target: Callable[[], SaveTarget],
    comm: Communicator,
    options: Options,
    memory: SaveMemory,
    save_common: Callable[[], None] | None = None,
) -> SaveReport:
    """Write the sharded part of a checkpoint, durably, but not its marker.

    Collective. It waits first for what this process still writes there behind training.

    Args:
        state_dict: what to save.
        open_target: gives where to; may raise what its opening raises.
        comm: ranks that save together.
        options: timeout and memory budget.
        memory: the plan is taken from here if every rank holds what it held at the last save.
        save_common: writes the common state, if that is not there yet: after all that could show
            that the state dict cannot be saved, and before what describes the checkpoint.

    Raises:
        PlanError: the main replicas do not make up the arrays.
        CheckpointExistsError: the directory holds other arrays, and no marker.
        StorageError: a write failed here; a PeerError of the same class on the other ranks.
    """
    target, mine, planned, _ = _prepared(state_dict, open_target, comm, options, memory)

    def write_objects() -> None:
        target.write_objects(mine.objects)

    report = run_save(planned.plan, mine.tensors, target.writer, comm, options, also=write_objects)
    if save_common is not None:
        agree(comm, save_common)
    target.complete(planned, comm)
    return report


def begin_save(  # noqa: PLR0913, PLR0917 - what a save is made of
    state_dict: StateDict,
    open_target: Callable[[], SaveTarget],
    comm: Communicator,
    options: Options,
    memory: SaveMemory,
    save_common: Callable[[], None] | None = None,
    publish: Callable[[], None] | None = None,
) -> LocalSaveRequest:
    """Copy what this rank will write, and write it behind training.

    Collective. When it returns the tensors may be overwritten. It waits first until the save before
    has written all it has to. Pieces of irregular shards move between ranks before it returns.

    Args:
        state_dict: what to save.
        open_target: gives where to; may raise what its opening raises.
        comm: ranks that save together.
        options: timeout and memory budget.
        memory: for the copies, as much as this rank's main replicas take; the plan is taken from
            here if every rank holds what it held at the last save.
        save_common: writes the common state, if that is not there yet. Called on every rank at
            finalisation.
        publish: makes the checkpoint visible. Called on the first rank, last of all.

    Returns:
        The request, whose finalisation is collective; it raises on every rank if the save has
        failed on any, and then nothing becomes visible.

    Raises:
        PlanError: the main replicas do not make up the arrays.
        CheckpointExistsError: the directory holds other arrays, and no marker.
        StorageError: preparing failed here; a PeerError of the same class on the other ranks.
    """
    agree(comm, lambda: memory.get_ready(options))
    target, mine, planned, token = _prepared(state_dict, open_target, comm, options, memory)
    staged = stage_save(planned.plan, mine.tensors, comm, memory.reserve)

    def prepare() -> BackgroundWork[Outcome]:
        write_arrays = _array_write(staged, target, memory, options)

        def write() -> Outcome:
            yield_to_training()
            target.write_objects(mine.objects)
            return write_arrays()

        return BackgroundWork(write, "dist-ckpt-save")

    work = memory.running = agree_to_start(comm, prepare)
    RUNNING_SAVES.add(target.root, work)
    ending = _Ending(target, planned, comm, options, work)
    name = SaveName(token, f"the end of the save to {target.root}")
    return LocalSaveRequest.of(
        comm, name, work, lambda: ending.finalise(save_common, publish), options.timeout_s
    )


@dataclass(frozen=True, slots=True)
class _Ending:
    """What is left of an asynchronous save, for all ranks to do together.

    Where another save has begun in its place, maybe ended too, nothing there is touched.
    """

    target: SaveTarget
    planned: Planned
    comm: Communicator
    options: Options
    work: BackgroundWork[Outcome]

    @raises_megatron_errors
    def finalise(
        self, save_common: Callable[[], None] | None, publish: Callable[[], None] | None
    ) -> None:
        try:
            report = agree(self.comm, self._written)
            if save_common is not None:
                agree(self.comm, save_common)
            self.target.complete(self.planned, self.comm)
            if publish is not None:
                agree_on_first(self.comm, publish)
        finally:
            self.work.forget_mark()
        logger.info("rank %s: %s", self.comm.global_rank(self.comm.rank), report)

    def _written(self) -> SaveReport:
        self.work.wait(limit_of_wait(self.options.timeout_s))
        written = self.work.result()()
        self.target.take_digests(written.digests)
        if self.comm.rank == 0:
            self.target.require_current()
        return written.report


Outcome = Callable[[], Written]
"""Tells what came of writing the arrays, or raises what it raised."""


def _array_write(
    staged: StagedSave, target: SaveTarget, memory: SaveMemory, options: Options
) -> Callable[[], Outcome]:
    """What writes the arrays, for a thread to call.

    All that takes Python long is done here, or by whoever asks what came of it: a thread that is
    busy keeps training waiting.
    """
    shared = memory.shared_bytes()
    process = memory.writer_process() if options.writer_process and shared else None
    if process is None or shared is None or target.open_elsewhere is None:
        job = WriteJob(staged, lambda: target.writer, options.timeout_s)
        return lambda: partial(_itself, job.run(memory.staged_bytes()))
    content = pickle.dumps(WriteJob(staged, target.open_elsewhere, options.timeout_s))
    return lambda: partial(outcome_of, process.run(content, shared))


def _itself(written: Written) -> Written:
    return written


def _prepared(
    state_dict: StateDict,
    open_target: Callable[[], SaveTarget],
    comm: Communicator,
    options: Options,
    memory: SaveMemory,
) -> tuple[SaveTarget, Holdings, Planned, str]:
    """Everything up to the first byte: the plan, a place that all ranks see, and the save's token.

    Collective.
    """
    held: list[tuple[SaveTarget, Holdings, Facts]] = []

    def describe() -> Any:
        target = open_target()
        RUNNING_SAVES.wait(target.root, limit_of_wait(options.timeout_s))
        if comm.rank == 0:
            target.examine()
        mine = holdings_of(state_dict, target.dump)
        facts = facts_of(mine, options, target.cutting)
        held.append((target, mine, facts))
        return [digest_of(facts), memory.last and memory.last.facts, uuid.uuid4().hex]

    answers = agree_and_gather(comm, describe)
    target, mine, facts = held[0]
    token = answers[0][-1]
    planned = planned_save(comm, facts, [(digest, last) for digest, last, _ in answers], memory)
    agree_on_first(comm, lambda: target.clear(planned, token))
    owner = f"rank {comm.global_rank(0)}"
    agree(comm, lambda: target.require(token, owner))
    return target, mine, planned, token
