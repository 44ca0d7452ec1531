"""Collective error checks: the failure of a step on one rank is raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import xxhash

from dist_ckpt_strategies.comm.base import (
    Bytes,
    Communicator,
    Message,
    Receive,
    Send,
    out_of_step,
)
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
"""Of a failure: see ``_description``."""

_NUM_HALVES = 2
"""Of an answer: a failure, and what the step has returned."""


def run_collectively(comm: Communicator, step: Callable[[], T]) -> T:
    """Run a rank-local step, then raise on every rank if it failed on any.

    Collective: every rank of ``comm`` calls this, once per step.

    The failed rank raises its own error, led by its global rank; one that is not of this package
    becomes a CheckpointError too. The others raise a PeerError of the same class as the first
    failed rank's error, which names that rank, the key and the file.
    """
    result, error = _attempt(step)
    try:
        failures = comm.all_gather(None if error is None else _description(error))
        if any(failure is not None for failure in failures):
            _raise_first(comm, error, failures)
        return cast("T", result)
    finally:
        del result, error  # or a raised error would hold this frame and its tensors, in a cycle


def run_and_gather(
    comm: Communicator, step: Callable[[], Message], *, is_sparse: bool = False
) -> list[Message]:
    """Like ``run_collectively``, and return what the step returned on every rank, by rank.

    Collective. One gather serves for both.

    Args:
        comm: the ranks.
        step: what to run.
        is_sparse: None, the usual result, is sent as nothing, which takes one collective of torch's
            in place of two; a rank in another step is detected only where a step has a result.
    """
    result, error = _attempt(step)
    try:
        answer = [None if error is None else _description(error), result]
        answers = comm.all_gather(None if is_sparse and answer == [None, None] else answer)
        if is_sparse:
            answers = [[None, None] if found is None else found for found in answers]
        for rank, found in enumerate(answers):
            if not (isinstance(found, list) and len(found) == _NUM_HALVES):
                raise out_of_step(comm.global_rank(rank), "this step")
        if any(failure is not None for failure, _ in answers):
            _raise_first(comm, error, [failure for failure, _ in answers])
        return [result for _, result in answers]
    finally:
        del result, error


def run_and_gather_bytes(comm: Communicator, step: Callable[[], bytes]) -> list[bytes]:
    """Like ``run_and_gather``, for bytes: every rank's, by rank.

    Collective: one gather, and where ranks have different bytes another one and an exchange.
    Equal bytes are sent once to each rank that lacks them, and the list holds one object many
    times: replicas that ask for the same cost little.
    """
    held: list[bytes] = []

    def describe() -> list[Any]:
        held.append(step())
        return [len(held[0]), xxhash.xxh3_128_hexdigest(held[0])]

    described = [tuple(answer) for answer in run_and_gather(comm, describe)]
    holder: dict[tuple[int, str], int] = {}
    for rank, what in enumerate(described):
        holder.setdefault(what, rank)
    mine, content = described[comm.rank], held[0]
    if len(holder) == 1:
        return [content for _ in described]

    def prepare() -> tuple[list[Send], dict[tuple[int, str], Bytes]]:
        buffers = {what: np.empty(what[0], np.uint8) for what in holder if what != mine}
        if holder[mine] != comm.rank or not content:
            return [], buffers
        data = np.frombuffer(bytearray(content), np.uint8)
        return [Send(rank, data) for rank, what in enumerate(described) if what != mine], buffers

    sends, buffers = run_collectively(comm, prepare)
    comm.exchange(sends, [Receive(holder[what], to) for what, to in buffers.items() if what[0]])
    found = {what: buffer.tobytes() for what, buffer in buffers.items()} | {mine: content}
    return [found[what] for what in described]


def run_on_first_rank(comm: Communicator, step: Callable[[], None]) -> None:
    """Run a step on the group's first rank alone, then raise on every rank if it failed.

    Collective.
    """
    run_collectively(comm, step if comm.rank == 0 else lambda: None)


def _attempt(step: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
    """The step's result or error; where ranks are out of step there is no collective any more."""
    try:
        return step(), None
    except SaveTimeoutError as error:
        return None, error
    except (PeerTimeoutError, PeerLostError):
        raise
    except Exception as error:  # noqa: BLE001 - raised again by the caller, on every rank
        return None, as_checkpoint_error(error)


def _raise_first(
    comm: Communicator, own: CheckpointError | None, failures: Sequence[Message]
) -> None:
    """Raise a rank's own error, else the first other rank's.

    Where storage was silent on any rank, every rank raises that: no rank must go on to another
    checkpoint for the damage that it has found itself.
    """
    found = []
    try:
        if own is not None:
            if own.global_rank is None:
                own.at_rank(comm.global_rank(comm.rank))
            found.append(own)
        for rank, failure in enumerate(failures):
            if failure is not None:
                found.append(_reported(comm, rank, failure))
        raise min(found, key=lambda error: not isinstance(error, StorageTimeoutError))
    finally:
        del own, found


def _reported(comm: Communicator, rank: int, failure: Message) -> CheckpointError:
    """The error that another rank's failure stands for."""
    if not (isinstance(failure, list) and len(failure) == _NUM_FIELDS):
        return out_of_step(comm.global_rank(rank), "this step")
    kind, message, key, path, global_rank = failure
    who = comm.global_rank(rank) if global_rank is None else global_rank
    return error_from_peer(who, kind, message, key=key, path=path)


def _description(error: CheckpointError) -> Message:
    """What the others learn; the rank only where it is another one's that this rank reports."""
    key, path = (None if text is None else str(text) for text in (error.key, error.path))
    return [kind_of(error), error.message, key, path, error.global_rank]
