"""The judge lets nothing pass that must not happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.faults.injection import INJECTED
from tests.faults.judge import (
    check_attempt,
    check_disturbed_recovery,
    check_pruned,
    check_recovery,
    check_steps,
    check_training,
    check_verified,
)
from tests.faults.oracle import Ledger, Standing, Tier
from tests.faults.rank import Recovered, SaveOrder, SaveResult, Trained
from tests.faults.schedule import During, Event, Store, Strike, build_schedule
from tests.faults.world import Answer, Gone, Stopped
from tests.support.entries import Failure

REFERENCE = [[f"{rank} {step}" for step in range(10)] for rank in range(4)]
LEDGER = (
    Ledger(4, 2)
    .with_global("g3", 3, Standing.WHOLE)
    .with_global("g5", 5, Standing.WHOLE)
    .with_global("g7", 7, Standing.BROKEN)
)
ORDER = SaveOrder(Tier.GLOBAL, 1, is_async=True, directory="g8")
LIMIT_S = 2.0


def event(strike: Strike, during: During = During.SAVE) -> Event:
    found = next(one for one in build_schedule(0) if one.strike is strike)
    return replace(found, during=during, victim=2, store=Store.DISK)


def failure(text: str, *kinds: str) -> Failure:
    return Failure(
        (*kinds, "CheckpointError"),
        is_ours=True,
        is_megatrons=True,
        text=text,
        global_rank=2,
        key=None,
        path=None,
        seconds=0.5,
    )


def recovered(rank: int, iteration: int, **changes: Any) -> Recovered:
    digest = REFERENCE[rank][iteration]
    found = Recovered(Tier.GLOBAL, iteration, digest, None, has_struck=False)
    return replace(found, **changes)


def refused(found: Failure) -> Recovered:
    return Recovered(None, -1, "", found, has_struck=False)


def everyone(value: Any) -> dict[int, Answer]:
    return {rank: Answer(value(rank) if callable(value) else value, 0.1) for rank in range(4)}


def trained(*failures: Failure | None) -> dict[int, Answer]:
    """How a save ended on each rank."""
    return {
        rank: Answer(Trained({}, (SaveResult(ORDER, 8, one),), None, has_struck=True), 0.1)
        for rank, one in enumerate(failures)
    }


def test_the_newest_whole_state_on_every_rank_is_right() -> None:
    assert list(check_recovery(everyone(lambda r: recovered(r, 5)), LEDGER, REFERENCE)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        recovered(1, 3),
        recovered(1, 7),
        recovered(1, 5, digest="something else"),
        recovered(1, 5, tier=Tier.LOCAL),
        refused(failure("nothing", "CheckpointNotFoundError")),
        Gone(-11),
        Stopped(),
    ],
    ids=["older", "broken", "other bits", "not there", "refused", "died", "silent"],
)
def test_one_rank_that_comes_to_something_else_is_noticed(wrong: Any) -> None:
    answers = everyone(lambda r: recovered(r, 5)) | {1: Answer(wrong, 0.1)}

    assert list(check_recovery(answers, LEDGER, REFERENCE))


def test_the_beginning_is_right_only_where_nothing_was_ever_finished() -> None:
    nothing = everyone(refused(failure("none", "CheckpointNotFoundError")))
    unusable = everyone(refused(failure("none of them", "NoUsableCheckpointError")))
    broken = Ledger(4, 2).with_global("g7", 7, Standing.BROKEN)

    assert list(check_recovery(nothing, Ledger(4, 2), REFERENCE)) == []
    assert list(check_recovery(unusable, broken, REFERENCE)) == []
    assert list(check_recovery(nothing, broken, REFERENCE))
    assert list(check_recovery(unusable, LEDGER, REFERENCE))
    other = everyone(refused(replace(failure("oh", "RuntimeError"), is_ours=False)))
    assert list(check_recovery(other, Ledger(4, 2), REFERENCE))


def test_a_disturbed_load_may_bring_an_older_state_or_fail_everywhere_and_say_why() -> None:
    fails, kills = event(Strike.FAIL, During.LOAD), event(Strike.KILL, During.LOAD)
    injected = refused(failure(f"rank 2: {INJECTED}", "StorageError"))
    lost = refused(failure("lost contact", "PeerLostError"))
    older = everyone(lambda r: recovered(r, 3))

    def wrong(what: Event, answers: dict[int, Answer]) -> list[str]:
        return list(check_disturbed_recovery(what, answers, LEDGER, REFERENCE, LIMIT_S))

    assert wrong(fails, older) == []
    assert wrong(fails, everyone(injected)) == []
    assert wrong(kills, everyone(lost) | {2: Answer(Gone(-9), 0.1)}) == []
    assert wrong(fails, older | {3: Answer(injected, 0.1)})
    assert wrong(fails, everyone(lost))
    assert wrong(fails, everyone(lambda r: recovered(r, 7)))
    assert wrong(kills, everyone(lost) | {1: Answer(Gone(-9), 0.1)})
    assert wrong(event(Strike.PAUSE, During.LOAD), everyone(lost))


def test_a_save_fails_on_all_ranks_or_on_none() -> None:
    injected = failure(f"rank 2: {INJECTED}", "StorageError")
    struck = event(Strike.FAIL)

    assert list(check_training(struck, trained(*[None] * 4), LIMIT_S)) == []
    assert list(check_training(struck, trained(*[injected] * 4), LIMIT_S)) == []
    assert list(check_training(struck, trained(injected, None, None, None), LIMIT_S))
    assert list(check_training(None, trained(*[injected] * 4), LIMIT_S))


@pytest.mark.parametrize(
    "changes",
    [
        {"text": "rank 2: something"},
        {"global_rank": 1},
        {"seconds": 60.0},
        {"is_ours": False},
    ],
)
def test_an_error_that_is_late_or_does_not_say_why_is_noticed(changes: dict[str, Any]) -> None:
    odd = replace(failure(f"rank 2: {INJECTED}", "StorageError"), **changes)

    assert list(check_training(event(Strike.FAIL), trained(*[odd] * 4), LIMIT_S))


def test_a_rank_is_lost_only_where_it_was_to_be() -> None:
    lost = failure("lost contact", "PeerLostError")
    answers = trained(*[lost] * 4) | {2: Answer(Gone(-9), 0.1)}

    assert list(check_training(event(Strike.KILL), answers, LIMIT_S)) == []
    assert list(check_training(event(Strike.FAIL), answers, LIMIT_S))
    assert list(check_training(event(Strike.KILL), answers | {0: Answer(Gone(1), 0.1)}, LIMIT_S))


def test_a_state_that_is_not_that_of_the_undisturbed_run_is_noticed() -> None:
    good = everyone(lambda r: Trained({4: REFERENCE[r][4]}, (), None, has_struck=False))
    bad = good | {3: Answer(Trained({4: "other"}, (), None, has_struck=False), 0.1)}

    assert list(check_steps(good, REFERENCE)) == []
    assert "rank 3" in next(check_steps(bad, REFERENCE))


def test_a_store_is_late_only_where_it_has_little_time() -> None:
    late = trained(*[failure("s3://a did not answer", "StoreUnreachableError")] * 4)

    lost = late | {2: Answer(Gone(-9), 0.1)}
    assert list(check_training(event(Strike.KILL), lost, LIMIT_S)) == []
    assert list(check_training(event(Strike.FAIL), late, LIMIT_S))


def attempted(*failures: Failure | None, seconds: float = 0.1) -> dict[int, Answer]:
    return {rank: Answer((one, seconds), seconds) for rank, one in enumerate(failures)}


def test_an_operation_fails_soon_on_all_ranks_or_on_none_and_names_the_culprit() -> None:
    ours = failure("rank 2: injected", "StorageError")
    others = replace(ours, global_rank=1), replace(ours, is_ours=False)

    assert list(check_attempt(attempted(*[ours] * 4), 2)) == []
    assert list(check_attempt(attempted(*[None] * 4), 2)) == []
    assert list(check_attempt(attempted(*[None] * 4), None)) == []
    assert list(check_attempt(attempted(*[ours] * 4), None))
    assert list(check_attempt(attempted(*[ours] * 4, seconds=4.0), 2))
    assert list(check_attempt(attempted(ours, None, ours, ours), 2))
    for wrong in others:
        assert list(check_attempt(attempted(ours, wrong, ours, ours), 2))
    assert list(check_attempt(attempted(*[None] * 4) | {1: Answer(Gone(1), 0.1)}, 2))


def test_verify_has_to_tell_whole_from_damaged() -> None:
    ledger = LEDGER.with_global("g9", 9, Standing.UNSURE)
    right = {"g3": 0, "g5": 0, "g7": 1, "g9": 1}

    assert list(check_verified(ledger, right)) == []
    assert list(check_verified(ledger, right | {"g9": 0})) == []
    assert list(check_verified(ledger, right | {"g5": 1}))
    assert list(check_verified(ledger, right | {"g7": 0}))


def test_prune_has_to_keep_the_newest() -> None:
    before = {"g3": 3, "g5": 5, "g7": 7}

    assert list(check_pruned(before, ["g5", "g7"], 2)) == []
    assert list(check_pruned(before, ["g3", "g7"], 2)) == ["g5 was pruned"]
