"""Get all ranks to the same step: finish steps, send state, make the weights anew."""

from __future__ import annotations

import base64
import logging
import pickle
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.collective import run_and_gather, run_collectively
from dist_ckpt_strategies.comm.exchange import Blocks, exchange
from dist_ckpt_strategies.comm.process_group import is_of_communication
from dist_ckpt_strategies.core.report import RecoveryReport
from dist_ckpt_strategies.errors import (
    CheckpointError,
    RestartError,
    ShapeMismatchError,
    text_of,
)
from dist_ckpt_strategies.recovery.part_transfer import (
    FlatPart,
    blocks_of,
    dump_objects,
    flat_parts,
    layout_differences,
    load_objects,
)
from dist_ckpt_strategies.recovery.plan import (
    RankFacts,
    RecoveryPlan,
    Role,
    build_recovery_plan,
    find_layout_conflict,
    require_equal_copies,
)
from dist_ckpt_strategies.recovery.provider import StateProvider

logger = logging.getLogger(__name__)

_MAX_SHOWN = 3

T = TypeVar("T")

RandomStates = Mapping[tuple[int, int], bytes]
"""Encoded random states, by rank and step."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """What a rank has kept through a fault.

    Attributes:
        provider: of the attempt that ended; its tensors are the source.
        finish_step: finishes its step from the provider's gradients, and notes that it has.
    """

    provider: StateProvider
    finish_step: Callable[[], None]


class UnfinishedStepError(RestartError):
    """A rank could not finish its step, and its state is torn; others may hold the same parts.

    Raised on all ranks alike, before any state has been moved.
    """


class BrokenGatherError(RestartError):
    """The weights could not be made anew, as ranks lost each other over it: nothing else is wrong.

    Raised on all ranks alike. What each of them has kept is good for another attempt.
    """


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a rank has after a recovery.

    Attributes:
        report: in numbers.
        random_states: those of the target that this rank knows, by rank; its own among them.
    """

    report: RecoveryReport
    random_states: dict[int, bytes]


def plan_recovery(
    comm: Communicator,
    describe: Callable[[], RankFacts],
    parts: Sequence[Mapping[str, FlatPart]],
) -> RecoveryPlan:
    """The plan, or the same error on all ranks; where tensors differ it names them.

    Collective.

    Args:
        comm: the ranks.
        describe: what this rank has and needs.
        parts: this rank's own, wanted ones first; ``describe`` may fill the sequence.
    """
    answers = run_and_gather(comm, lambda: base64.b85encode(pickle.dumps(describe())).decode())

    def decide() -> RecoveryPlan | CheckpointError | tuple[str, int, int]:
        contents = [base64.b85decode(answer) for answer in answers]
        facts = [pickle.loads(content) for content in contents]  # noqa: S301 - of this job
        try:
            return find_layout_conflict(facts) or build_recovery_plan(facts)
        except CheckpointError as error:  # all ranks find it alike, so no rank is to blame
            return error

    decision: RecoveryPlan | CheckpointError | tuple[str, int, int] = run_collectively(comm, decide)
    if isinstance(decision, tuple):
        _raise_conflict(comm, decision, parts)
    return _required(decision)


def run_recovery(  # noqa: PLR0913 - options by name
    comm: Communicator,
    plan: RecoveryPlan,
    survivor: Survivor | None,
    new: StateProvider,
    random_states: RandomStates,
    *,
    compares_copies: bool = False,
    max_bucket_nbytes: int = 64 << 20,
    on_filling: Callable[[], None] = lambda: None,
) -> Recovered:
    """Carry out a plan: afterwards ``new`` has the state of the target on every rank.

    Collective: either every rank returns, or every rank raises, and then the state of ``new`` is
    good for nothing on ranks that were to receive. What ``survivor`` has is only changed by
    finishing its step.

    Args:
        comm: the ranks of the plan.
        plan: equal on all of them.
        survivor: what this rank has kept; None if nothing.
        new: what is to be filled; it may have the survivor's tensors, or be the same object.
        random_states: that this rank knows.
        compares_copies: whether all copies of a part have to be equal before any is sent.
        max_bucket_nbytes: bound on what travels at once to, or from, all peers of a rank.
        on_filling: called when the new state is about to be changed; on all ranks, or on none.

    Raises:
        UnfinishedStepError: a rank could not finish its step; another plan may do without it.
        BrokenGatherError: ranks lost each other while they made the weights anew.
        CorruptCheckpointError: bytes arrived damaged, or copies of a part differ.
    """
    started = time.monotonic()
    role = plan.roles[comm.rank]
    if any(one is Role.ROLL_FORWARD for one in plan.roles):
        _finish_steps(comm, survivor, role)
    transfer = _Transfer(comm, plan, survivor, new, random_states)
    described = run_and_gather(comm, lambda: transfer.describe(with_digests=compares_copies))
    if compares_copies:
        _compare_copies(comm, [digests for _, digests in described])
    on_filling()
    exchange(
        comm,
        lambda: transfer.prepare([nbytes for nbytes, _ in described]),
        max_inflight_nbytes=max_bucket_nbytes,
    )
    random = run_collectively(comm, transfer.take)
    if plan.needs_gather:
        _gather_weights(comm, new)
    report = transfer.report(time.monotonic() - started)
    return Recovered(report, random)


class _Transfer:
    """One rank's side of a plan: what it has at the target, and what it receives."""

    def __init__(
        self,
        comm: Communicator,
        plan: RecoveryPlan,
        survivor: Survivor | None,
        new: StateProvider,
        random_states: RandomStates,
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._survivor = survivor
        self._new = new
        self._random_states = random_states
        self._copied_nbytes = 0
        self._sources: dict[str, FlatPart] = {}
        self._targets: dict[str, FlatPart] = {}
        self._objects: dict[int, torch.Tensor] = {}

    def describe(self, *, with_digests: bool) -> list[Any]:
        """The size of this rank's objects, and digests of its parts at the target."""
        plan, rank = self._plan, self._comm.rank
        # Asked for after the roll-forward: an update may replace tensors by new ones.
        self._sources = _sources(self._survivor, plan.roles[rank])
        self._targets = flat_parts(_asked("parts", self._new.parts))
        for copy in plan.copies:
            if copy.receiver == rank:
                self._targets[copy.part_id].require_fillable()
        has_objects = plan.object_sources[rank] == rank
        known = {
            of_rank: found
            for (of_rank, step), found in self._random_states.items()
            if step == plan.target
        }
        content = dump_objects((_objects_of(self._survivor if has_objects else None), known))
        self._objects[rank] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        compared = plan.local_parts(rank) if with_digests else ()
        return [len(content), {name: self._sources[name].digest() for name in compared}]

    def prepare(self, objects_nbytes: Sequence[int]) -> Blocks:
        """Copy this rank's own parts to the new state; what it sends and receives beside them."""
        plan, rank = self._plan, self._comm.rank
        for part_id in plan.local_parts(rank):
            if part_id in self._targets:
                self._copied_nbytes += self._targets[part_id].copy_from(self._sources[part_id])
        for source, receiver in plan.message_pairs():
            if receiver == rank:
                memory = torch.empty(objects_nbytes[source], dtype=torch.uint8, device="cpu")
                self._objects[source] = memory
        return blocks_of(self._comm, plan, self._sources, self._targets, self._objects)

    def take(self) -> dict[int, bytes]:
        """Complete the new state; returns the random states of the target, by rank."""
        plan, rank = self._plan, self._comm.rank
        for part in self._targets.values():
            part.write_back()
        states = {
            source: load_objects(content.numpy().tobytes())
            for source, content in self._objects.items()
        }
        random: dict[int, bytes] = {}
        for source in {plan.random_sources[rank], *states}:
            random = {**states[source][1], **random}
        objects, _ = states[plan.object_sources[rank]]
        _asked("load_objects", lambda: self._new.load_objects(objects))
        _asked("set_step", lambda: self._new.set_step(plan.target))
        return random

    def report(self, seconds: float) -> RecoveryReport:
        """What was done, in numbers."""
        plan, rank = self._plan, self._comm.rank
        received = [copy for copy in plan.copies if copy.receiver == rank]
        return RecoveryReport(
            step=plan.target,
            role=plan.roles[rank],
            sources=tuple(sorted({copy.source for copy in received})),
            received_nbytes=sum(copy.nbytes for copy in received),
            sent_nbytes=sum(copy.nbytes for copy in plan.copies if copy.source == rank),
            copied_nbytes=self._copied_nbytes,
            gathered=plan.needs_gather,
            seconds=seconds,
        )


def _required(decision: T | CheckpointError) -> T:
    """What every rank decided alike, or the error that all decided on alike."""
    if isinstance(decision, CheckpointError):
        raise decision
    return decision


def _finish_steps(comm: Communicator, survivor: Survivor | None, role: Role) -> None:
    def finish() -> str:
        try:
            if role is Role.ROLL_FORWARD and survivor is not None:
                _asked("apply_update", survivor.finish_step)
        except CheckpointError as error:
            return str(error)
        return ""

    _raise_if_any(comm, run_and_gather(comm, finish), UnfinishedStepError)


def _gather_weights(comm: Communicator, new: StateProvider) -> None:
    """Have the weights made anew. Collective."""

    def gather() -> str:
        try:
            _asked("gather_weights", new.gather_weights)
        except CheckpointError as error:
            if is_of_communication(error) or is_of_communication(error.__cause__):
                return str(error)
            raise
        return ""

    _raise_if_any(comm, run_and_gather(comm, gather), BrokenGatherError)


def _raise_if_any(
    comm: Communicator, answers: Sequence[str], kind: Callable[[str], RestartError]
) -> None:
    failed = [f"rank {comm.global_rank(rank)}: {why}" for rank, why in enumerate(answers) if why]
    if failed:
        raise kind("; ".join(failed[:_MAX_SHOWN]))


def _asked(what: str, call: Callable[[], T]) -> T:
    """What a provider answers; where it raises, an error that all ranks raise alike."""
    try:
        return call()
    except CheckpointError:
        raise
    except Exception as error:  # whatever a training's own code raises
        text = f"the state provider's {what} raised {type(error).__name__}: {text_of(error)}"
        logger.warning("%s\n%s", text, traceback.format_exc().rstrip())
        raise RestartError(text) from error


def _sources(survivor: Survivor | None, role: Role) -> dict[str, FlatPart]:
    if survivor is None or role is Role.RECEIVE:
        return {}
    return flat_parts(_asked("parts", survivor.provider.parts))


def _compare_copies(comm: Communicator, answers: Sequence[Mapping[str, str]]) -> None:
    def compare() -> CheckpointError | None:
        digests: defaultdict[str, dict[int, str]] = defaultdict(dict)
        for rank, found in enumerate(answers):
            for part_id, digest in found.items():
                digests[part_id][rank] = digest
        try:
            require_equal_copies(digests)
        except CheckpointError as error:
            return error
        return None

    _required(run_collectively(comm, compare))


def _objects_of(survivor: Survivor | None) -> dict[str, Any] | None:
    return None if survivor is None else dict(_asked("objects", survivor.provider.objects))


def _raise_conflict(
    comm: Communicator, conflict: tuple[str, int, int], parts: Sequence[Mapping[str, FlatPart]]
) -> NoReturn:
    """Raise on all ranks, naming the tensors that differ. Collective."""
    part_id, first, second = conflict

    def describe() -> Any:
        found = [known[part_id].lines() for known in parts if part_id in known]
        return found if comm.rank in {first, second} else None

    answers = run_and_gather(comm, describe)
    pairs = ((answers[first][0], lines) for lines in (*answers[second], *answers[first]))
    differences = next(filter(None, (layout_differences(*pair) for pair in pairs)), [])
    shown = "; ".join(differences[:_MAX_SHOWN])
    more = f", and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    raise ShapeMismatchError(
        f"{part_id}: tensors differ between ranks {comm.global_rank(first)} and "
        f"{comm.global_rank(second)}: {shown}{more}",
        key=part_id,
    )
