"""Save between Megatron-Core's types and the plan and its runner, in any format."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather, agree_on_first
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.plan.save import Cutting
from dist_ckpt_strategies.run.report import SaveReport
from dist_ckpt_strategies.run.save import run_save
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.base import ArrayWriter
from dist_ckpt_strategies.strategies.save_planning import (
    Facts,
    Holdings,
    PlanMemory,
    Planned,
    digest_of,
    facts_of,
    holdings_of,
    planned_save,
)


class SaveTarget(Protocol):
    """Where a save goes, and in which form."""

    @property
    def cutting(self) -> Cutting:
        """What the files of chunks are made of."""
        ...

    @property
    def writer(self) -> ArrayWriter:
        """Writes the arrays."""
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
        """Raise unless this rank sees the token of the first one."""
        ...

    def forget(self, token: str) -> None:
        """Take the token away. On the first rank."""
        ...

    def write_objects(self, objects: Mapping[ObjectId, bytes]) -> None:
        """Store what was dumped of this rank's objects, durably."""
        ...

    def complete(self, planned: Planned, comm: Communicator) -> None:
        """Write what describes the checkpoint, all its files being durable. Collective."""
        ...


def save_sharded(
    state_dict: StateDict,
    open_target: Callable[[], SaveTarget],
    comm: Communicator,
    options: Options,
    memory: PlanMemory,
    save_common: Callable[[], None] | None = None,
) -> SaveReport:
    """Write the sharded part of a checkpoint, durably, but not its marker.

    Collective.

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
    target, mine, planned, token = _prepared(state_dict, open_target, comm, options, memory)

    def write_objects() -> None:
        if comm.rank == 0:
            target.forget(token)  # every rank has seen it
        target.write_objects(mine.objects)

    report = run_save(planned.plan, mine.tensors, target.writer, comm, options, also=write_objects)
    if save_common is not None:
        agree(comm, save_common)
    target.complete(planned, comm)
    return report


def _prepared(
    state_dict: StateDict,
    open_target: Callable[[], SaveTarget],
    comm: Communicator,
    options: Options,
    memory: PlanMemory,
) -> tuple[SaveTarget, Holdings, Planned, str]:
    """Everything up to the first byte: the plan, and a place that all ranks see. Collective."""
    held: list[tuple[SaveTarget, Holdings, Facts]] = []

    def describe() -> Any:
        target = open_target()
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
