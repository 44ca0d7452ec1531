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
from typing import Any, TypeVar

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
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
    PartTransfer,
    flat_parts,
    layout_differences,
)
from dist_ckpt_strategies.recovery.plan import (
    Phase,
    RankFacts,
    RecoveryPlan,
    Role,
    build_recovery_plan,
    find_layout_conflict,
    require_equal_copies,
)
from dist_ckpt_strategies.recovery.provider import StateProvider
from dist_ckpt_strategies.recovery.state_exchange import RandomStates, exchange_states

logger = logging.getLogger(__name__)

_MAX_SHOWN = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Survivor:
    """What a rank has kept through a fault.

    Attributes:
        provider: of the attempt that ended; its tensors are the source.
        step: that it was in.
        phase: how far it was within it.
        finish_step: finishes that step from the provider's gradients, and notes that it has.
    """

    provider: StateProvider
    step: int
    phase: Phase
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


def gather_facts(comm: Communicator, describe: Callable[[], RankFacts]) -> tuple[RankFacts, ...]:
    """What every rank has and needs, by rank; all ranks have the same answer.

    Collective.
    """
    answers = agree_and_gather(comm, lambda: base64.b85encode(pickle.dumps(describe())).decode())

    def decode() -> tuple[RankFacts, ...]:
        contents = [base64.b85decode(answer) for answer in answers]
        return tuple(pickle.loads(content) for content in contents)  # noqa: S301 - of this job

    return agree(comm, decode)


def plan_recovery(
    comm: Communicator, facts: Sequence[RankFacts], parts: Sequence[Mapping[str, FlatPart]]
) -> RecoveryPlan:
    """The plan, or the same error on all ranks; where tensors differ it names them.

    Collective: whatever else goes wrong on one rank, such as memory that it does not get, is
    raised on all too.

    Args:
        comm: the ranks.
        facts: what ``gather_facts`` gave.
        parts: this rank's own, wanted ones first.
    """
    conflict = agree(comm, lambda: find_layout_conflict(facts))
    if conflict is not None:
        _raise_conflict(comm, conflict, parts)
    return _decided(comm, lambda: build_recovery_plan(facts))


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
        max_bucket_nbytes: bound on what a rank has under way to, or from, all of its peers
            together, equal on all ranks; a message to each of them may be 1 MiB in any case.
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
    sources = agree(comm, lambda: _sources(survivor, role))
    if compares_copies:
        _compare_copies(comm, plan, sources)

    def prepare() -> PartTransfer:
        targets = flat_parts(_asked("parts", new.parts))
        return PartTransfer(comm, plan, sources, targets, max_bucket_nbytes)

    transfer = agree(comm, prepare)
    on_filling()
    copied_nbytes = agree(comm, transfer.copy_own)
    transfer.run()
    has_objects = plan.object_sources[comm.rank] == comm.rank
    own = survivor if has_objects else None
    states = exchange_states(comm, plan, lambda: _objects_of(own), random_states)
    agree(comm, lambda: _take_objects(new, states.objects, plan.target))
    if plan.needs_gather:
        _gather_weights(comm, new)
    report = RecoveryReport(
        step=plan.target,
        role=role,
        sources=transfer.sources,
        received_nbytes=transfer.received_nbytes,
        sent_nbytes=transfer.sent_nbytes,
        copied_nbytes=copied_nbytes,
        gathered=plan.needs_gather,
        seconds=time.monotonic() - started,
    )
    return Recovered(report, states.random)


def _decided(comm: Communicator, decide: Callable[[], T]) -> T:
    """What every rank decides alike, from the same facts, or the error that all decide on alike.

    Collective: what goes wrong on one rank alone, such as memory that it does not get, is raised
    on all.
    """

    def attempt() -> T | CheckpointError:
        try:
            return decide()
        except CheckpointError as error:
            return error

    decision = agree(comm, attempt)
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

    _raise_if_any(comm, agree_and_gather(comm, finish), UnfinishedStepError)


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

    _raise_if_any(comm, agree_and_gather(comm, gather), BrokenGatherError)


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
    """Asked for after the roll-forward: an update may put new tensors in the place of old ones."""
    if survivor is None or role is Role.RECEIVE:
        return {}
    return flat_parts(_asked("parts", survivor.provider.parts))


def _compare_copies(
    comm: Communicator, plan: RecoveryPlan, sources: Mapping[str, FlatPart]
) -> None:
    def describe() -> dict[str, str]:
        return {name: sources[name].digest() for name in plan.local_parts(comm.rank)}

    answers = agree_and_gather(comm, describe)
    digests: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for rank, found in enumerate(answers):
        for part_id, digest in found.items():
            digests[part_id][rank] = digest
    _decided(comm, lambda: require_equal_copies(digests))


def _objects_of(survivor: Survivor | None) -> dict[str, Any] | None:
    """Of the target; None where this rank takes those of another one."""
    return None if survivor is None else dict(_asked("objects", survivor.provider.objects))


def _take_objects(new: StateProvider, objects: Mapping[str, Any], target: int) -> None:
    _asked("load_objects", lambda: new.load_objects(objects))
    _asked("set_step", lambda: new.set_step(target))


def _raise_conflict(
    comm: Communicator, conflict: tuple[str, int, int], parts: Sequence[Mapping[str, FlatPart]]
) -> None:
    """Raise on all ranks, naming the tensors that differ. Collective."""
    part_id, first, second = conflict

    def describe() -> Any:
        found = [known[part_id].lines() for known in parts if part_id in known]
        return found if comm.rank in {first, second} else None

    answers = agree_and_gather(comm, describe)
    pairs = ((answers[first][0], lines) for lines in (*answers[second], *answers[first]))
    differences = next(filter(None, (layout_differences(*pair) for pair in pairs)), [])
    shown = "; ".join(differences[:_MAX_SHOWN])
    more = f", and {len(differences) - _MAX_SHOWN} more" if len(differences) > _MAX_SHOWN else ""
    raise ShapeMismatchError(
        f"{part_id}: tensors differ between ranks {comm.global_rank(first)} and "
        f"{comm.global_rank(second)}: {shown}{more}",
        key=part_id,
    )
