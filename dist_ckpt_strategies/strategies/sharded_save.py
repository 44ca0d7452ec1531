"""Save between Megatron-Core's types and the plan and its runner, in any format."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import Communicator, report_level
from dist_ckpt_strategies.config import Options, limit_of_wait
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.formats.commit import SavePlace
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.local.background import (
    BackgroundWork,
    agree_to_start,
    yield_to_training,
)
from dist_ckpt_strategies.local.requests import LocalSaveRequest, SaveName
from dist_ckpt_strategies.local.running import RUNNING_SAVES
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.sharded.plan_grids import Cutting
from dist_ckpt_strategies.sharded.save import run_save, stage_save
from dist_ckpt_strategies.sharded.staged import Digests, StagedSave, WriteJob, Written
from dist_ckpt_strategies.sharded.writer_process import outcome_of
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.storage.time_limit import restart_limit, time_left, time_limit
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
        """The checkpoint."""
        ...

    @property
    def place(self) -> SavePlace:
        """Where this save writes until its commit."""
        ...

    @property
    def cutting(self) -> Cutting:
        """What the files of chunks are made of."""
        ...

    @property
    def writer(self) -> ArrayWriter:
        """Writes the arrays; after ``require``."""
        ...

    @property
    def open_elsewhere(self) -> Callable[[], ArrayWriter] | None:
        """Picklable factory of such a writer for another process; None if not supported."""
        ...

    def dump(self, obj: Any, *, name: str, allow: Allowed) -> bytes:
        """What will be stored of an object.

        Raises:
            UnsafeObjectError: it needs a class that a load would refuse.
        """
        ...

    def begin(self, planned: Planned) -> None:
        """Make room for the save. On the first rank."""
        ...

    def require(self, owner: str) -> None:
        """Raise unless this rank sees what ``begin`` has made on the rank called ``owner``."""
        ...

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """Store what was dumped of this rank's objects, durably."""
        ...

    def take_digests(self, digests: Digests) -> None:
        """Take note of what another writer has written."""
        ...

    def complete(self, planned: Planned, comm: Communicator) -> None:
        """Write what describes the checkpoint, all its files being durable. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class Completion:
    """What makes the sharded part a checkpoint, where Megatron-Core's own save does not.

    Attributes:
        save_common: writes the common state to the place of the save; called on every rank.
        marker: content of ``metadata.json``.
        overwrite: also replace arrays and objects that belong to no finished checkpoint.
    """

    save_common: Callable[[Location], None]
    marker: bytes
    overwrite: bool


@dataclass(frozen=True, slots=True)
class SaveSetting:
    """How a strategy saves.

    Attributes:
        open_target: gives where to; may raise what its opening raises.
        comm: ranks that save together.
        options: timeout and memory budget.
        memory: the plan is taken from here if every rank holds what it held at the last save.
        allow: further classes that objects may be of.
        completion: None where the caller writes common state and marker.
    """

    open_target: Callable[[], SaveTarget]
    comm: Communicator
    options: Options
    memory: SaveMemory
    allow: Allowed = ()
    completion: Completion | None = None


def save_sharded(state_dict: StateDict, setting: SaveSetting) -> SaveReport:
    """Write the sharded part of a checkpoint, durably; with a completion, the whole checkpoint.

    Collective. It waits first for what this process still writes there in the background.

    Raises:
        PlanError: the main replicas do not make up the arrays.
        CheckpointExistsError: the directory holds other arrays, and no marker.
        UnsafeObjectError: an object needs a class that a load would refuse.
        StorageError: a write failed here; a PeerError of the same class on the other ranks.
    """
    comm, options = setting.comm, setting.options
    with time_limit(options.timeout_s):
        target, mine, planned, _ = _prepared(state_dict, setting)

        def write_objects() -> None:
            target.write_objects(mine.objects)

        report = run_save(
            planned.plan, mine.tensors, target.writer, comm, options, also=write_objects
        )
        _complete(target, planned, setting)
    return report


def _complete(target: SaveTarget, planned: Planned, setting: SaveSetting) -> None:
    """Write the rest, and make it the checkpoint's content. Collective."""
    comm, completion = setting.comm, setting.completion
    if completion is not None:
        agree(comm, lambda: completion.save_common(target.place.location))
    target.complete(planned, comm)
    marker = None if completion is None else completion.marker
    agree_on_first(comm, lambda: target.place.commit(marker))


def begin_save(state_dict: StateDict, setting: SaveSetting) -> LocalSaveRequest:
    """Copy what this rank will write, and write it in the background.

    Collective. When it returns the tensors may be overwritten. It waits first until the save before
    has written all it has to. Pieces of irregular shards move between ranks before it returns.
    Takes as much host memory as this rank's main replicas.

    Returns:
        The request, whose finalisation is collective; it raises on every rank if the save has
        failed on any, and then nothing becomes visible.

    Raises:
        CheckpointError: as ``save_sharded``, of what is known before anything is written.
    """
    comm, options, memory = setting.comm, setting.options, setting.memory
    agree(comm, lambda: memory.get_ready(options))
    with time_limit(options.timeout_s):
        target, mine, planned, save_id = _prepared(state_dict, setting)
    staged = stage_save(planned.plan, mine.tensors, comm, memory.reserve)

    def prepare() -> BackgroundWork[Outcome]:
        write_arrays = _array_write(staged, target, memory, options)

        def write() -> Outcome:
            yield_to_training()
            with time_limit(options.timeout_s):
                target.write_objects(mine.objects)
                return write_arrays()

        return BackgroundWork(write, "dist-ckpt-save")

    work = memory.running = agree_to_start(comm, prepare)
    RUNNING_SAVES.add(target.root, work)
    ending = _Ending(target, planned, setting, work)
    name = SaveName(save_id, f"the end of the save to {target.root}")
    return LocalSaveRequest.of(comm, name, work, ending.finalise, options.timeout_s)


@dataclass(frozen=True, slots=True)
class _Ending:
    """What is left of an asynchronous save, for all ranks to do together.

    Where another save has begun in its place, maybe ended too, nothing there is touched.
    """

    target: SaveTarget
    planned: Planned
    setting: SaveSetting
    work: BackgroundWork[Outcome]

    @raises_megatron_errors
    def finalise(self) -> None:
        comm = self.setting.comm
        try:
            with time_limit(self.setting.options.timeout_s):
                report = agree(comm, self._written)
                restart_limit()
                _complete(self.target, self.planned, self.setting)
        finally:
            self.work.forget_mark()
        me = comm.global_rank(comm.rank)
        logger.log(report_level(comm), "rank %s: %s", me, report)

    def _written(self) -> SaveReport:
        self.work.wait(limit_of_wait(self.setting.options.timeout_s))
        written = self.work.result()()
        self.target.take_digests(written.digests)
        if self.setting.comm.rank == 0:
            self.target.place.require_current()
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
    state_dict: StateDict, setting: SaveSetting
) -> tuple[SaveTarget, Holdings, Planned, str]:
    """Everything up to the first byte: the plan, a place that all ranks see, and the save's id.

    Collective.
    """
    comm, options, memory = setting.comm, setting.options, setting.memory
    held: list[tuple[SaveTarget, Holdings, Facts]] = []

    def describe() -> Any:
        target = setting.open_target()
        RUNNING_SAVES.wait(target.root, time_left(options.timeout_s))
        save_id = target.place.new_save_id() if comm.rank == 0 else ""
        mine = holdings_of(state_dict, partial(target.dump, allow=setting.allow))
        facts = facts_of(mine, options, target.cutting)
        held.append((target, mine, facts))
        return [digest_of(facts), memory.last and memory.last.facts, save_id]

    answers = agree_and_gather(comm, describe)
    restart_limit()
    target, mine, facts = held[0]
    save_id = answers[0][-1]
    target.place.join(save_id)
    planned = planned_save(comm, facts, [(digest, last) for digest, last, _ in answers], memory)
    agree_on_first(comm, lambda: target.begin(planned))
    owner = f"rank {comm.global_rank(0)}"
    agree(comm, lambda: target.require(owner))
    return target, mine, planned, save_id
