"""The judge of the campaigns notices what must not happen; the campaigns show what it lets pass."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

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
from tests.faults.oracle import CopyKey, Found, Ledger, Place, SaveKey, Status, Tier
from tests.faults.rank import Recovered, SaveOrder, SaveResult, Trained
from tests.faults.schedule import During, Event, Store, Strike, build_schedule
from tests.faults.world import Answer, Gone, Stopped
from tests.support.entries import Failure

EMPTY = Ledger(num_ranks=4, num_kept=2)
REFERENCE = [[f"{rank} {step}" for step in range(10)] for rank in range(4)]
LEDGER = (
    EMPTY.with_global("g3", 3, Status.WHOLE)
    .with_global("g5", 5, Status.WHOLE)
    .with_global("g7", 7, Status.BROKEN)
)
BROKEN = EMPTY.with_global("g7", 7, Status.BROKEN)
GLOBAL_SAVE = SaveOrder(Tier.GLOBAL, 0, is_async=True, directory="g7")
LIMIT_S = 2.0


def failure(text: str, *kinds: str, **changes: Any) -> Failure:
    found = Failure(
        (*kinds, "CheckpointError"),
        is_ours=True,
        is_megatrons=True,
        text=text,
        global_rank=2,
        key=None,
        path=None,
        seconds=0.5,
    )
    return replace(found, **changes)


OURS = failure(f"rank 2: {INJECTED}", "StorageError")
LOST = failure("lost contact", "PeerLostError")
NOTHING = failure("none", "CheckpointNotFoundError")
UNUSABLE = failure("none of them", "NoUsableCheckpointError")
LATE = failure("s3://a did not answer", "StoreUnreachableError")


def event(strike: Strike, during: During = During.SAVE) -> Event:
    found = next(one for one in build_schedule(0) if one.strike is strike)
    return replace(found, during=during, victim=2, store=Store.DISK)


def everyone(value: Any, **odd: Any) -> dict[int, Answer]:
    """The same on all ranks, or of each; but ``r1=other`` on rank 1."""
    answers = {rank: Answer(value(rank) if callable(value) else value, 0.1) for rank in range(4)}
    return answers | {int(name[1:]): Answer(other, 0.1) for name, other in odd.items()}


def at_step(iteration: int, tier: Tier = Tier.GLOBAL) -> Any:
    return lambda rank: Recovered(tier, iteration, REFERENCE[rank][iteration], None, False)  # noqa: FBT003


def refused(found: Failure) -> Recovered:
    return Recovered(None, -1, "", found, has_struck=False)


def saved(one: Failure | None) -> Trained:
    return Trained({}, (SaveResult(GLOBAL_SAVE, 8, one),), None, has_struck=True)


def attempted(one: Failure | None) -> Any:
    return (one,)


def recovery(answers: dict[int, Answer], ledger: Ledger = LEDGER) -> Iterable[str]:
    return check_recovery(answers, ledger, REFERENCE)


def disturbed(strike: Strike, answers: dict[int, Answer]) -> Iterable[str]:
    during = event(strike, During.LOAD)
    return check_disturbed_recovery(during, answers, LEDGER, REFERENCE, LIMIT_S)


def training(strike: Strike | None, answers: dict[int, Answer]) -> Iterable[str]:
    return check_training(event(strike) if strike else None, answers, LIMIT_S)


VERIFIED = {"g3": 0, "g5": 0, "g7": 1}
WRONG: dict[str, Iterable[str]] = {
    "older": recovery(everyone(at_step(5), r1=at_step(3)(1))),
    "broken": recovery(everyone(at_step(5), r1=at_step(7)(1))),
    "other bits": recovery(everyone(at_step(5), r1=replace(at_step(5)(1), digest="other"))),
    "another tier": recovery(everyone(at_step(5), r1=at_step(5, Tier.LOCAL)(1))),
    "refused on one": recovery(everyone(at_step(5), r1=refused(NOTHING))),
    "died": recovery(everyone(at_step(5), r1=Gone(-11))),
    "silent": recovery(everyone(at_step(5), r1=Stopped())),
    "nothing, after damage": recovery(everyone(refused(NOTHING)), BROKEN),
    "unusable, though whole": recovery(everyone(refused(UNUSABLE))),
    "no error of ours": recovery(everyone(refused(replace(NOTHING, is_ours=False))), EMPTY),
    "a load fails on one": disturbed(Strike.FAIL, everyone(at_step(3), r3=refused(OURS))),
    "another cause": disturbed(Strike.FAIL, everyone(refused(LOST))),
    "broken, disturbed": disturbed(Strike.FAIL, everyone(at_step(7))),
    "another dies": disturbed(Strike.KILL, everyone(refused(LOST), r1=Gone(-9))),
    "a pause": disturbed(Strike.PAUSE, everyone(refused(LOST))),
    "a save fails on one": training(Strike.FAIL, everyone(saved(None), r0=saved(OURS))),
    "a save fails by itself": training(None, everyone(saved(OURS))),
    "no cause": training(Strike.FAIL, everyone(saved(replace(OURS, text="rank 2: oh")))),
    "another culprit": training(Strike.FAIL, everyone(saved(replace(OURS, global_rank=1)))),
    "late": training(Strike.FAIL, everyone(saved(replace(OURS, seconds=60.0)))),
    "not ours": training(Strike.FAIL, everyone(saved(replace(OURS, is_ours=False)))),
    "a death at a failure": training(Strike.FAIL, everyone(saved(LOST), r2=Gone(-9))),
    "a second death": training(Strike.KILL, everyone(saved(LOST), r2=Gone(-9), r0=Gone(1))),
    "a late store with time": training(Strike.FAIL, everyone(saved(LATE))),
    "an attempt fails by itself": check_attempt(everyone(attempted(OURS)), None),
    "late, all": check_attempt(everyone(attempted(failure("", "PeerTimeoutError"))), 2),
    "some alone": check_attempt(everyone(attempted(OURS), r1=attempted(None)), 2),
    "of another": check_attempt(everyone(attempted(replace(OURS, global_rank=1))), 2),
    "a foreign error": check_attempt(everyone(attempted(replace(OURS, is_ours=False))), 2),
    "dead": check_attempt(everyone(attempted(None), r1=Gone(1)), 2),
    "verify: false alarm": check_verified(LEDGER, VERIFIED | {"g5": 1}),
    "verify: blind": check_verified(LEDGER, VERIFIED | {"g7": 0}),
    "pruned too much": check_pruned({"g3": 3, "g5": 5, "g7": 7}, ["g3", "g7"], 2),
    "a step": check_steps(
        everyone(lambda r: Trained({4: REFERENCE[r and 1][4]}, (), None, has_struck=False)),
        REFERENCE,
    ),
}


def test_what_is_wrong_is_noticed() -> None:
    assert [name for name, wrong in WRONG.items() if not list(wrong)] == []


# The ledger


def copies_of(iteration: int, name: str = "a") -> set[CopyKey]:
    """With cliques of ranks 0 and 1, 2 and 3."""
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2), (2, 3), (3, 2), (3, 3)]
    return {CopyKey(SaveKey(iteration, name), owner, holder) for owner, holder in pairs}


def test_a_part_is_lost_with_its_last_good_copy() -> None:
    ledger, local = EMPTY.with_copies(copies_of(5)), Found(5, Tier.LOCAL)
    assert ledger.without_node(0).without_node(2).newest_whole() == local
    assert ledger.without_node(0).without_node(1).newest_whole() is None
    one, other = (key for key in sorted(copies_of(5)) if key.owner == 3)
    for place in (Place.HEADER, Place.TENSOR):
        damaged = ledger.damaged_copy(one, place)
        assert damaged.newest_whole() == local
        assert damaged.damaged_copy(other, place).newest_whole() is None
        assert damaged.damaged_copy(other, place).acceptable() == set()
    unsure = ledger.with_global("g3", 3, Status.WHOLE)
    for key in copies_of(5):
        unsure = unsure.damaged_copy(key, Place.PADDING)
    assert unsure.newest_whole() == Found(3, Tier.GLOBAL)
    assert unsure.acceptable() == {Found(3, Tier.GLOBAL), local}
