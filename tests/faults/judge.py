"""Whether what the ranks came to is what had to come: nothing else may ever happen.

Every function returns what is wrong, in words; nothing, if nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.faults.injection import INJECTED
from tests.faults.oracle import CopyKey, Found, Ledger, SaveKey, Status, Tier
from tests.faults.rank import Recovered, SaveOrder, SaveResult, Trained
from tests.faults.schedule import HANGS, NUM_RANKS, Event, Strike
from tests.faults.world import Answer, Gone, Stopped
from tests.support.entries import Failure

Reference = Sequence[Sequence[str]]
"""By rank and step, the digest of the state of a run that nothing disturbs."""

LOSSES = HANGS | {Strike.KILL}
"""A rank falls silent: what the others were told by it before may differ."""

_SLACK_S = 20.0
_LOST = {"PeerLostError", "PeerTimeoutError"}
_LATE_STORE = {"StoreUnreachableError"}
"""A request may not take longer than peers wait, which is short where one falls silent."""

_NOTHING_THERE = {"CheckpointNotFoundError", "NoUsableCheckpointError"}
_CAUSES: Mapping[Strike, tuple[str, ...]] = {
    Strike.FAIL: (INJECTED,),
    Strike.LIMIT: ("file too large",),
    Strike.FULL: ("no space left", "bytes on the file system", "file too large"),
    Strike.LOSE_NODE: ("/node",),
    Strike.RESTART: ("s3://",),
    Strike.EMPTIED: ("s3://",),
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
        may_end = event is not None and event.strike in LOSSES
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
    if event is None or event.strike is Strike.PAUSE:
        yield f"nothing struck, and the {what.order.tier} save of {what.iteration}: {failures}"
        return
    if event.strike not in LOSSES and len(failures) < len(results):
        yield f"the {what.order.tier} save of {what.iteration} failed on some ranks: {results}"
    for rank, failure in failures.items():
        yield from (f"rank {rank}: {why}" for why in _unexplained(event, rank, failure, timeout_s))


def _unexplained(event: Event, rank: int, failure: Failure, timeout_s: float) -> Iterator[str]:
    """What an error lacks: it has to be one of ours, in time, and to name the cause."""
    if not failure.is_ours:
        yield f"no error of the package: {failure}"
    is_asleep = event.strike is Strike.WAKE and rank == event.victim  # and its clock goes on
    if failure.seconds > 2 * timeout_s + _SLACK_S and not is_asleep:
        yield f"an error after {failure.seconds:.1f} s, the limit is {timeout_s:g} s: {failure}"
    if event.strike in LOSSES:
        if not (_LOST | _LATE_STORE) & set(failure.kinds):
            yield f"rank {event.victim} was lost, and the error is {failure}"
        return
    causes = _CAUSES.get(event.strike, ())
    if not any(cause in failure.text.lower() for cause in map(str.lower, causes)):
        yield f"expected an error that names {' or '.join(causes)}, found {failure}"
    if event.strike in {Strike.FAIL, Strike.LIMIT} and failure.global_rank != event.victim:
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
    if event.strike not in LOSSES and 0 < len(failures) < len(results):
        yield f"a load failed on some ranks alone: {failures}"
    is_something = ledger.newest_whole() is not None
    if event.strike is Strike.PAUSE and failures and is_something:
        yield f"a pause that is short, and a load: {failures}"
    for rank, failure in failures.items():
        if results[rank].is_loaded and event.strike in LOSSES:
            continue  # the ranks met once more, without the package
        if is_something or not _NOTHING_THERE & set(failure.kinds):
            yield from (
                f"rank {rank}: {why}" for why in _unexplained(event, rank, failure, timeout_s)
            )


def _check_losses(event: Event | None, answers: Mapping[int, Answer]) -> Iterator[str]:
    """Nobody is lost but the rank that was hit; and what has come is an answer."""
    for rank, answer in answers.items():
        is_lost = isinstance(answer.value, (Gone, Stopped))
        is_meant = event is not None and event.strike in LOSSES and rank == event.victim
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


def check_attempt(answers: Mapping[int, Answer], culprit: int | None) -> Iterator[str]:
    """An operation in which a call failed on the culprit: all ranks raise that, or none.

    No rank learns of it by waiting until its limit.

    Without a culprit nothing failed, and nothing may be raised.
    """
    found = {rank: answer.value for rank, answer in answers.items()}
    for rank, value in found.items():
        if isinstance(value, (Failure, Gone, Stopped)):
            yield f"rank {rank}: {value}"
            return
    failures = {rank: failure for rank, (failure,) in found.items() if failure is not None}
    if failures and culprit is None:
        yield f"nothing failed, and {failures}"
        return
    if 0 < len(failures) < len(found):
        yield f"some ranks raise alone: {failures}"
    for rank, failure in failures.items():
        if not failure.is_ours or failure.global_rank != culprit:
            yield f"rank {rank}: expected an error of ours of rank {culprit}, found {failure}"
        if "PeerTimeoutError" in failure.kinds:
            yield f"rank {rank} learns of it late: {failure}"


def check_verified(ledger: Ledger, issues: Mapping[str, int]) -> Iterator[str]:
    """What ``dist-ckpt verify`` says of each finished global checkpoint: its number of issues."""
    for name, (_, status) in ledger.global_.items():
        if status is Status.WHOLE and issues[name]:
            yield f"{name} is whole, and verify finds {issues[name]} issues"
        if status is Status.BROKEN and not issues[name]:
            yield f"{name} is damaged, and verify finds nothing"


def check_pruned(before: Mapping[str, int], after: Iterable[str], num_kept: int) -> Iterator[str]:
    """What ``prune`` has left of finished checkpoints, by name and iteration: the newest stay."""
    newest = sorted(before, key=before.__getitem__)[-num_kept:]
    yield from (f"{name} was pruned" for name in set(newest) - set(after))


Saves = Mapping[SaveOrder, Mapping[int, SaveResult]]


def observed_global(
    before: Ledger, saves: Saves, finished: Mapping[str, int], *, may_differ: bool
) -> tuple[Ledger, list[str]]:
    """The ledger after the global saves of a training.

    Args:
        before: what was known before them.
        saves: how they ended, by rank.
        finished: the checkpoints that have a marker, and their iterations.
        may_differ: whether a rank was lost, so that the others may have been told otherwise.
    """
    begun = {order.directory: results for order, results in saves.items() if order.directory}
    known = {*before.global_, *begun}
    wrong = [
        *(
            f"{name}: it was finished, and is gone"
            for name in set(before.global_) - {*finished, *begun}
        ),
        *(f"{name}: nobody has saved that" for name in set(finished) - known if not may_differ),
    ]
    after = before.without_global(begun)
    # A rank that was lost may have taken the answer about a save with it.
    for name in begun if not may_differ else [*begun, *(set(finished) - known)]:
        has_succeeded = all(one.failure is None for one in begun.get(name, {}).values())
        if name in finished:
            status = _status_of(before, name, has_succeeded=has_succeeded)
            after = after.with_global(name, finished[name], status)
        is_odd = has_succeeded and name not in finished
        is_odd |= not has_succeeded and name in finished and name not in before.global_
        if is_odd and not may_differ:
            wrong.append(f"{name}: success is {has_succeeded}, a marker is {name in finished}")
    return after, wrong


def _status_of(before: Ledger, name: str, *, has_succeeded: bool) -> Status:
    """Of a checkpoint that is there; a failed save leaves what it would replace, or replaces it."""
    old = Status.WHOLE if has_succeeded else before.global_.get(name, (0, Status.WHOLE))[1]
    return Status.UNSURE if old is Status.BROKEN else old


def observed_copies(
    before: Ledger,
    saves: Saves,
    seen: Iterable[CopyKey],
    jump: int,
    *,
    may_differ: bool,
    lost_node: int | None = None,
) -> tuple[Ledger, list[str]]:
    """The ledger after the local saves of a training.

    Args:
        before: what was known before them.
        saves: how they ended, by rank.
        seen: the copies that are there.
        jump: as the cliques were made.
        may_differ: whether a rank was lost, so that the others may have been told otherwise.
        lost_node: whose directory vanished meanwhile; what is there again was written since.
    """
    copies = set(seen)
    after = before.with_copies(copies)
    new = {key.save for key in copies} - {key.save for key in before.copies}
    local = [results for order, results in saves.items() if order.tier is Tier.LOCAL]
    wrong = [] if len(new) <= 1 else [f"one local save was begun, and there are {sorted(new)}"]
    for results in local:
        if all(one.failure is None for one in results.values()) and not may_differ:
            iteration = next(iter(results.values())).iteration
            expected = {copy for save in new for copy in _copies(save, jump)}
            expected = {copy for copy in expected if copy.holder != lost_node}
            if {save.iteration for save in new} != {iteration} or not expected <= copies:
                wrong.append(
                    f"the local save of {iteration} succeeded, and there is {sorted(copies)}"
                )
    missing = _missing(before, after, new)
    if lost_node is not None:  # what it held may have been what kept the rest from being removed
        missing &= _missing(before.without_node(lost_node), after, new)
    if missing:
        wrong.append(f"copies are gone that had to be kept: {sorted(missing)}")
    return after, wrong


def _missing(before: Ledger, after: Ledger, new: set[SaveKey]) -> set[CopyKey]:
    """Copies that had to stay and have not."""
    complete = [save for save in new if after.is_listed(save)]
    kept = set(before.copies)
    if complete:
        known = before.with_copies([*before.copies, *(k for k in after.copies if k.save in new)])
        kept = known.kept_copies(max(complete))
    return kept - set(after.copies)


def _copies(save: SaveKey, jump: int) -> set[CopyKey]:
    """Each shard with its owner, and with the rank ``jump`` away that keeps the other one."""
    found = set()
    for owner in range(NUM_RANKS):
        is_first = owner // jump % 2 == 0
        found |= {
            CopyKey(save, owner, owner),
            CopyKey(save, owner, owner + jump if is_first else owner - jump),
        }
    return found
