"""Turn one rank's failure into a failure everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from dist_ckpt_strategies.comm.base import Communicator, Message, out_of_step
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    SaveTimeoutError,
    StorageTimeoutError,
    as_checkpoint_error,
    error_from_peer,
    kind_of,
)

T = TypeVar("T")

_NUM_FIELDS = 5
"""Of a verdict: see ``_verdict``."""

_NUM_HALVES = 2
"""Of an answer: a verdict, and what the step has returned."""

_NOTHING = [None, None]
"""The answer of a rank that has neither failed nor a result."""


def agree(comm: Communicator, step: Callable[[], T]) -> T:
    """Run a rank-local step, then raise on every rank if it failed on any.

    Collective: every rank of ``comm`` calls this, once per step.

    The failed rank raises its own error, led by its global rank; one that is not of this package
    becomes a CheckpointError too. The others raise a PeerError of the same class as the first
    failed rank's error, which names that rank, the key and the file.
    """
    outcome = _attempt(step)
    try:
        verdicts = comm.all_gather(_verdict(outcome.error))
        _raise_first(comm, outcome.error, verdicts)
        return cast("T", outcome.result)
    finally:
        del outcome  # or a raised error would hold this frame, and all its tensors, in a cycle


def agree_and_gather(
    comm: Communicator, step: Callable[[], Message], *, is_sparse: bool = False
) -> list[Message]:
    """Like ``agree``, and return what the step returned on every rank, by rank.

    Collective. One gather serves for both.

    Args:
        comm: the ranks.
        step: what to run.
        is_sparse: None, the usual result, is sent as nothing, which takes one collective of torch's
            in place of two; a rank in another step is detected only where a step has a result.
    """
    outcome = _attempt(step)
    try:
        answer = [_verdict(outcome.error), outcome.result]
        answers = comm.all_gather(None if is_sparse and answer == _NOTHING else answer)
        if is_sparse:
            answers = [_NOTHING if found is None else found for found in answers]
        _raise_first(comm, outcome.error, _verdicts_in(comm, answers))
        return [result for _, result in answers]
    finally:
        del outcome


def agree_on_first(comm: Communicator, step: Callable[[], None]) -> None:
    """Run a step on the group's first rank alone, then raise on every rank if it failed.

    Collective.
    """
    agree(comm, step if comm.rank == 0 else lambda: None)


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    result: T | None
    error: CheckpointError | None


def _attempt(step: Callable[[], T]) -> _Outcome[T]:
    """The step's outcome; but where ranks are out of step, there is nobody left to agree with."""
    try:
        return _Outcome(step(), None)
    except SaveTimeoutError as error:
        return _Outcome(None, error)
    except (PeerTimeoutError, PeerLostError):
        raise
    except Exception as error:  # noqa: BLE001 - raised again by the caller, on every rank
        return _Outcome(None, as_checkpoint_error(error))


def _verdicts_in(comm: Communicator, answers: Iterable[Message]) -> Iterator[Message]:
    """The first half of each answer."""
    for rank, answer in enumerate(answers):
        if not _is_list(answer, _NUM_HALVES):
            raise out_of_step(comm.global_rank(rank), "this step")
        yield answer[0]


def _is_list(message: Message, size: int) -> bool:
    return isinstance(message, list) and len(message) == size


def _raise_first(
    comm: Communicator, own: CheckpointError | None, verdicts: Iterable[Message]
) -> None:
    """Raise a rank's own error, else the first other rank's.

    Where storage was silent on any rank, every rank raises that: no rank must go on to another
    checkpoint for the damage that it has found itself.
    """
    found = [] if own is None else [_named(own, comm.global_rank(comm.rank))]
    try:
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                found.append(_reported(comm, rank, verdict))
        found.sort(key=_is_damage)
        if found:
            raise found[0]
    finally:
        del own, found


def _reported(comm: Communicator, rank: int, verdict: Message) -> CheckpointError:
    """The error that another rank's verdict stands for."""
    if not _is_list(verdict, _NUM_FIELDS):
        return out_of_step(comm.global_rank(rank), "this step")
    kind, message, key, path, global_rank = cast("list[Any]", verdict)
    who = comm.global_rank(rank) if global_rank is None else global_rank
    return error_from_peer(who, kind, message, key=key, path=path)


def _is_damage(error: CheckpointError) -> bool:
    return not isinstance(error, StorageTimeoutError)


def _verdict(error: CheckpointError | None) -> Message:
    """What the others learn; the rank only where it is another one's that this rank reports."""
    if error is None:
        return None
    key, path = (None if text is None else str(text) for text in (error.key, error.path))
    return [kind_of(error), error.message, key, path, error.global_rank]


def _named(error: CheckpointError, global_rank: int) -> CheckpointError:
    return error if error.global_rank is not None else error.at_rank(global_rank)
