"""Whether what the ranks came to is what had to come: nothing else may ever happen.

Every function returns what is wrong, in words; nothing, if nothing is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.chaos.oracle import Found, Ledger
from tests.chaos.orders import Recovered, SaveResult, Trained
from tests.chaos.schedule import HANGS, Event, Kind
from tests.chaos.traps import INJECTED
from tests.chaos.world import Answer, Gone, Stopped
from tests.support.entries import Failure

Reference = Sequence[Sequence[str]]
"""By rank and step, the digest of the state of a run that nothing disturbs."""

LOSSES = HANGS | {Kind.KILL}
"""A rank falls silent: what the others were told by it before may differ."""

_SLACK_S = 20.0
_LOST = {"PeerLostError", "PeerTimeoutError"}
_LATE_STORE = {"StoreUnreachableError"}
"""A request may not take longer than peers wait, which is short where one falls silent."""

_NOTHING_THERE = {"CheckpointNotFoundError", "NoUsableCheckpointError"}
_CAUSES: Mapping[Kind, tuple[str, ...]] = {
    Kind.FAIL: (INJECTED,),
    Kind.LIMIT: ("file too large",),
    Kind.FULL: ("no space left", "bytes on the file system", "file too large"),
    Kind.LOSE_NODE: ("/node",),
    Kind.RESTART: ("s3://",),
    Kind.EMPTIED: ("s3://",),
}


def check_steps(answers: Mapping[int, Answer], reference: Reference) -> Iterator[str]:
    """The training itself: each state is that of the undisturbed run."""
    for rank, answer in answers.items():
        if isinstance(answer.value, Trained):
            for step, digest in answer.value.digests.items():
                if digest != reference[rank][step]:
                    yield f"rank {rank}: another state at step {step} than undisturbed"


def check_training(
    event: Event | None, answers: Mapping[int, Answer], timeout_s: float
) -> Iterator[str]:
    """How training and its saves ended. ``event``: what struck meanwhile, if anything did."""
    yield from _check_losses(event, answers)
    for rank, answer in answers.items():
        may_end = event is not None and event.kind in LOSSES
        if isinstance(answer.value, Trained) and answer.value.failure and not may_end:
            yield f"rank {rank}: training ended with {answer.value.failure}"
    for results in saves_by_order(answers).values():
        yield from _check_save(event, results, timeout_s)


def saves_by_order(answers: Mapping[int, Answer]) -> dict[Any, dict[int, SaveResult]]:
    """How each save ended, by rank, for those that answered."""
    found: dict[Any, dict[int, SaveResult]] = {}
    for rank, answer in answers.items():
        if isinstance(answer.value, Trained):
            for result in answer.value.saves:
                found.setdefault(result.order, {})[rank] = result
    return found


def _check_save(
    event: Event | None, results: Mapping[int, SaveResult], timeout_s: float
) -> Iterator[str]:
    failures = {rank: one.failure for rank, one in results.items() if one.failure is not None}
    if not failures:
        return
    what = next(iter(results.values()))
    if event is None or event.kind is Kind.PAUSE:
        yield f"nothing struck, and the {what.order.tier} save of {what.iteration}: {failures}"
        return
    if event.kind not in LOSSES and len(failures) < len(results):
        yield f"the {what.order.tier} save of {what.iteration} failed on some ranks: {results}"
    for rank, failure in failures.items():
        yield from (f"rank {rank}: {why}" for why in _unexplained(event, rank, failure, timeout_s))


def _unexplained(event: Event, rank: int, failure: Failure, timeout_s: float) -> Iterator[str]:
    """What an error lacks: it has to be one of ours, in time, and to name the cause."""
    if not failure.is_ours:
        yield f"no error of the package: {failure}"
    is_asleep = event.kind is Kind.WAKE and rank == event.victim  # and its clock goes on
    if failure.seconds > 2 * timeout_s + _SLACK_S and not is_asleep:
        yield f"an error after {failure.seconds:.1f} s, the limit is {timeout_s:g} s: {failure}"
    if event.kind in LOSSES:
        if not (_LOST | _LATE_STORE) & set(failure.kinds):
            yield f"rank {event.victim} was lost, and the error is {failure}"
        return
    causes = _CAUSES.get(event.kind, ())
    if not any(cause in failure.text.lower() for cause in map(str.lower, causes)):
        yield f"expected an error that names {' or '.join(causes)}, found {failure}"
    if event.kind in {Kind.FAIL, Kind.LIMIT} and failure.global_rank != event.victim:
        yield f"expected an error of rank {event.victim}, found {failure}"


def check_disturbed_recovery(
    event: Event,
    answers: Mapping[int, Answer],
    ledger: Ledger,
    reference: Reference,
    timeout_s: float,
) -> Iterator[str]:
    """A recovery in which something struck: the right state of some checkpoint, or an error."""
    yield from _check_losses(event, answers)
    results = {r: a.value for r, a in answers.items() if isinstance(a.value, Recovered)}
    failures = {r: one.failure for r, one in results.items() if one.failure is not None}
    for rank, one in results.items():
        if one.failure is None:
            yield from _check_found(rank, one, ledger.usable(), reference)
    if event.kind not in LOSSES and 0 < len(failures) < len(results):
        yield f"a load failed on some ranks alone: {failures}"
    is_something = ledger.newest_whole() is not None
    if event.kind is Kind.PAUSE and failures and is_something:
        yield f"a pause that is short, and a load: {failures}"
    for rank, failure in failures.items():
        if results[rank].is_loaded and event.kind in LOSSES:
            continue  # the ranks met once more, without the package
        if is_something or not _NOTHING_THERE & set(failure.kinds):
            yield from (
                f"rank {rank}: {why}" for why in _unexplained(event, rank, failure, timeout_s)
            )


def _check_losses(event: Event | None, answers: Mapping[int, Answer]) -> Iterator[str]:
    """Nobody is lost but the rank that was hit; and what has come is an answer."""
    for rank, answer in answers.items():
        is_lost = isinstance(answer.value, (Gone, Stopped))
        is_meant = event is not None and event.kind in LOSSES and rank == event.victim
        is_right = is_meant if is_lost else isinstance(answer.value, (Trained, Recovered))
        if not is_right:
            yield f"rank {rank}: {answer.value}"


def check_recovery(
    answers: Mapping[int, Answer], ledger: Ledger, reference: Reference
) -> Iterator[str]:
    """A recovery that nothing disturbs: the newest state that is whole, on every rank."""
    results = {rank: answer.value for rank, answer in answers.items()}
    for rank, one in results.items():
        if not isinstance(one, Recovered):
            yield f"rank {rank}: {one}"
        elif one.failure is None:
            yield from _check_found(rank, one, ledger.acceptable(), reference)
        else:
            yield from _check_nothing_there(rank, one.failure, ledger)
    places = {
        (one.tier, one.iteration, one.failure is None)
        for one in results.values()
        if isinstance(one, Recovered)
    }
    if len(places) > 1:
        yield f"the ranks do not agree: {results}"


def _check_found(
    rank: int, one: Recovered, expected: set[Found], reference: Reference
) -> Iterator[str]:
    assert one.tier is not None
    found = Found(one.iteration, one.tier)
    if found not in expected:
        yield f"rank {rank}: expected one of {sorted(expected)}, found {one}"
    elif one.digest != reference[rank][one.iteration]:
        yield f"rank {rank}: another state than that of step {one.iteration}: {one}"


def _check_nothing_there(rank: int, failure: Failure, ledger: Ledger) -> Iterator[str]:
    whole = ledger.newest_whole()
    if whole is not None:
        yield f"rank {rank}: expected {whole}, found {failure}"
    kinds = _NOTHING_THERE & set(failure.kinds)
    if not failure.is_ours or not kinds:
        yield f"rank {rank}: there is nothing to load, and the error is {failure}"
    elif "CheckpointNotFoundError" in kinds and ledger.global_:
        yield f"rank {rank}: there are finished checkpoints, and they are not mentioned: {failure}"
