"""Whether what the ranks came to is what had to come: nothing else may ever happen.

Every function returns what is wrong, in words; nothing, if nothing is. Answers of ranks are what
the methods of ``Rank`` return, or RankDiedError, or a Failure.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tests.faults.injection import INJECTED
from tests.faults.oracle import NUM_RANKS, CopyKey, Found, Ledger, SaveKey, Status, Tier
from tests.faults.rank import Recovered, SaveResult, Trained
from tests.faults.schedule import Event, Save, Strike
from tests.support.entries import Failure
from tests.support.ranks import RankDiedError

Reference = Sequence[Sequence[str]]
"""By rank and step, the digest of the state of a run that nothing disturbs."""

LOSSES = {Strike.KILL, Strike.WAKE}
"""A rank falls silent: what it sent to the others before may differ."""

_SLACK_S = 20.0
_LOST = {"PeerLostError", "PeerTimeoutError"}
_LATE_STORE = "the object store "
"""A request may not take longer than peers wait, which is short where one falls silent."""

_NOT_FOUND, _UNUSABLE = "CheckpointNotFoundError", " can be loaded"
_CAUSES = {
    Strike.FAIL: INJECTED,
    Strike.LOSE_NODE: "/node",
    Strike.OUTAGE: "s3://",
}


def check_training(
    event: Event | None, answers: Mapping[int, Any], reference: Reference, timeout_s: float
) -> Iterator[str]:
    """How training and its saves ended. ``event``: what struck meanwhile, if anything did."""
    yield from _check_losses(event, answers)
    for rank, answer in answers.items():
        if not isinstance(answer, Trained):
            continue
        for step, digest in answer.digests.items():
            if digest != reference[rank][step]:
                yield f"rank {rank}: another state at step {step} than undisturbed"
        if answer.failure and (event is None or event.strike not in LOSSES):
            yield f"rank {rank}: training ended with {answer.failure}"
    for results in saves_of(answers).values():
        yield from _check_save(event, results, timeout_s)


def saves_of(answers: Mapping[int, Any]) -> dict[Save, dict[int, SaveResult]]:
    """How each save ended, by rank, for those that answered."""
    found: dict[Save, dict[int, SaveResult]] = {}
    for rank, answer in answers.items():
        if isinstance(answer, Trained):
            for result in answer.saves:
                found.setdefault(result.save, {})[rank] = result
    return found


def _check_save(
    event: Event | None, results: Mapping[int, SaveResult], timeout_s: float
) -> Iterator[str]:
    failures = {rank: one.failure for rank, one in results.items() if one.failure is not None}
    if failures and event is None:
        yield f"nothing struck, and a save: {failures}"
    elif event is not None:
        yield from _check_alone(event, failures, len(results))
        yield from _check_failures(event, failures, timeout_s)


def _check_alone(event: Event, failures: Mapping[int, Failure], num_ranks: int) -> Iterator[str]:
    if event.strike not in LOSSES and 0 < len(failures) < num_ranks:
        yield f"some ranks fail alone: {failures}"


def _check_failures(
    event: Event, failures: Mapping[int, Failure], timeout_s: float
) -> Iterator[str]:
    """Each error is one of ours, in time, and names the cause."""
    for rank, failure in failures.items():
        if not failure.is_ours:
            yield f"rank {rank}: no error of the package: {failure}"
        is_asleep = event.strike is Strike.WAKE and rank == event.victim  # and its clock goes on
        if failure.seconds > 2 * timeout_s + _SLACK_S and not is_asleep:
            yield f"rank {rank}: an error after {failure.seconds:.1f} s, not {timeout_s:g} s"
        if event.strike in LOSSES:
            is_late = "StorageTimeoutError" in failure.kinds and _LATE_STORE in failure.text
            is_named = is_late or bool(_LOST & set(failure.kinds))
        else:
            cause = _CAUSES.get(event.strike)
            is_named = cause is not None and cause in failure.text.lower()
        if event.strike is Strike.FAIL and _UNUSABLE in failure.text:  # of several causes
            is_named &= f"rank {event.victim}: " in failure.text
        elif event.strike is Strike.FAIL:
            is_named &= failure.global_rank == event.victim
        if not is_named:
            yield f"rank {rank}: an error that does not name the cause: {failure}"


def check_disturbed_recovery(
    event: Event,
    answers: Mapping[int, Any],
    ledger: Ledger,
    reference: Reference,
    timeout_s: float,
) -> Iterator[str]:
    """A recovery in which something struck: the right state of some checkpoint, or an error."""
    yield from _check_losses(event, answers)
    results = {r: one for r, one in answers.items() if isinstance(one, Recovered)}
    failures: dict[int, Failure] = {}
    for rank, one in results.items():
        if not isinstance(one.found, Failure):
            yield from _check_found(rank, one, ledger.usable(), reference)
        elif one.is_loaded and event.strike in LOSSES:
            continue  # the ranks met once more, without the package
        else:
            failures[rank] = one.found
    yield from _check_alone(event, failures, len(results))
    if ledger.newest_whole() is None:
        failures = {r: f for r, f in failures.items() if not _has_nothing(f)}
    yield from _check_failures(event, failures, timeout_s)


def _check_losses(event: Event | None, answers: Mapping[int, Any]) -> Iterator[str]:
    """Only the rank that was hit is lost; what has come is an answer."""
    for rank, answer in answers.items():
        is_meant = event is not None and event.strike in LOSSES and rank == event.victim
        if not isinstance(answer, (Trained, Recovered)) and not (
            is_meant and isinstance(answer, RankDiedError)
        ):
            yield f"rank {rank}: {answer}"


def check_recovery(
    answers: Mapping[int, Any], ledger: Ledger, reference: Reference
) -> Iterator[str]:
    """A recovery that nothing disturbs: the newest state that is whole, on every rank."""
    ends: set[Found | None] = set()
    for rank, one in answers.items():
        if not isinstance(one, Recovered):
            yield f"rank {rank}: {one}"
        elif isinstance(one.found, Failure):
            ends.add(None)
            yield from _check_nothing_there(rank, one.found, ledger)
        else:
            ends.add(one.found)
            yield from _check_found(rank, one, ledger.acceptable(), reference)
    if len(ends) > 1:
        yield f"the ranks do not agree: {answers}"


def _check_found(
    rank: int, one: Recovered, expected: set[Found], reference: Reference
) -> Iterator[str]:
    assert isinstance(one.found, Found)
    if one.found not in expected:
        yield f"rank {rank}: expected one of {sorted(expected)}, found {one}"
    elif one.digest != reference[rank][one.found.iteration]:
        yield f"rank {rank}: another state than that of step {one.found.iteration}: {one}"


def _has_nothing(failure: Failure) -> bool:
    is_unusable = "StorageError" in failure.kinds and _UNUSABLE in failure.text
    return _NOT_FOUND in failure.kinds or is_unusable


def _check_nothing_there(rank: int, failure: Failure, ledger: Ledger) -> Iterator[str]:
    whole = ledger.newest_whole()
    if whole is not None:
        yield f"rank {rank}: expected {whole}, found {failure}"
    if not failure.is_ours or not _has_nothing(failure):
        yield f"rank {rank}: there is nothing to load, and the error is {failure}"
    elif _NOT_FOUND in failure.kinds and ledger.global_:
        yield f"rank {rank}: there are finished checkpoints, and they are not mentioned: {failure}"


def check_attempt(answers: Mapping[int, Any], culprit: int | None) -> Iterator[str]:
    """An operation in which a call failed on the culprit: all ranks raise that, or none.

    No rank learns of it by waiting until its limit. Without a culprit none may raise.
    """
    failures = {rank: one for rank, one in answers.items() if one is not None}
    if 0 < len(failures) < len(answers):
        yield f"some ranks raise alone: {failures}"
    for rank, failure in failures.items():
        is_right = isinstance(failure, Failure) and failure.is_ours
        if culprit is None or not is_right or failure.global_rank != culprit:
            yield f"rank {rank}: expected an error of ours of rank {culprit}, found {failure}"
        elif "PeerTimeoutError" in failure.kinds:
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


Saves = Mapping[Save, Mapping[int, SaveResult]]


def observed_global(
    before: Ledger, saves: Saves, finished: Mapping[str, int], *, may_differ: bool
) -> tuple[Ledger, list[str]]:
    """The ledger after the global saves of a training, by what has a marker then.

    ``may_differ``: a rank was lost, and the others may have heard otherwise.
    """
    succeeded = {
        next(iter(results.values())).directory: all(r.failure is None for r in results.values())
        for save, results in saves.items()
        if save.tier is Tier.GLOBAL
    }
    lost = set(before.global_) - {*finished, *succeeded}
    unknown = set(finished) - {*before.global_, *succeeded}
    wrong = [f"{name}: it was finished, and is gone" for name in lost]
    if may_differ:  # a rank that was lost may have taken the answer about a save with it
        succeeded |= dict.fromkeys(unknown, True)
    else:
        wrong += [f"{name}: no rank has saved that" for name in unknown]
    after = before.without_global(succeeded)
    for name, has_succeeded in succeeded.items():
        if name in finished:
            old = Status.WHOLE if has_succeeded else before.global_.get(name, (0, Status.WHOLE))[1]
            # A failed save leaves what it would replace, or replaces it.
            status = Status.UNSURE if old is Status.BROKEN else old
            after = after.with_global(name, finished[name], status)
        is_there = name in finished and name not in before.global_
        if not may_differ and (name not in finished if has_succeeded else is_there):
            wrong.append(f"{name}: success is {has_succeeded}, a marker is {name in finished}")
    return after, wrong


def observed_copies(
    before: Ledger,
    saves: Saves,
    seen: Iterable[CopyKey],
    jump: int,
    *,
    may_differ: bool,
    lost_node: int | None = None,
) -> tuple[Ledger, list[str]]:
    """The ledger after the local saves of a training, by the copies that are there then.

    ``lost_node``: whose directory vanished meanwhile; what is there again was written since.
    """
    after = before.with_copies(seen)
    new = {key.save for key in after.copies} - {key.save for key in before.copies}
    wrong = [] if len(new) <= 1 else [f"one local save was begun, and there are {sorted(new)}"]
    for save, results in saves.items():
        has_succeeded = all(one.failure is None for one in results.values())
        if save.tier is Tier.LOCAL and has_succeeded and not may_differ:
            iteration = next(iter(results.values())).iteration
            expected = {copy for key in new for copy in _copies(key, jump)}
            expected = {copy for copy in expected if copy.holder != lost_node}
            if {key.iteration for key in new} != {iteration} or not expected <= set(after.copies):
                wrong.append(f"the local save of {iteration} succeeded: {sorted(after.copies)}")
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
    """Each part with its owner, and with the rank ``jump`` away that keeps the other one."""
    holders = [(owner, owner ^ jump) for owner in range(NUM_RANKS)]
    return {CopyKey(save, owner, holder) for owner, both in enumerate(holders) for holder in both}
