"""The judge of the campaigns notices what must not happen; the campaigns show what it lets pass."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

from tests.faults.injection import INJECTED
from tests.faults.judge import (
    check_attempt,
    check_disturbed_recovery,
    check_pruned,
    check_recovery,
    check_training,
    check_verified,
)
from tests.faults.oracle import CopyKey, Found, Ledger, Place, SaveKey, Status, Tier
from tests.faults.rank import Recovered, SaveResult, Trained
from tests.faults.schedule import During, Event, Save, Strike, build_event
from tests.support.entries import Failure
from tests.support.ranks import RankDiedError

EMPTY = Ledger(num_kept=2)
REFERENCE = [[f"{rank} {step}" for step in range(10)] for rank in range(4)]
BROKEN = EMPTY.with_global("g7", 7, Status.BROKEN)
LEDGER = BROKEN.with_global("g3", 3, Status.WHOLE).with_global("g5", 5, Status.WHOLE)
OURS = Failure(
    ("StorageError", "CheckpointError"),
    is_ours=True,
    is_megatrons=True,
    text=f"rank 2: {INJECTED}",
    global_rank=2,
    key=None,
    path=None,
    seconds=0.5,
)
FOREIGN = replace(OURS, is_ours=False)
LOST = replace(OURS, kinds=("PeerLostError",), text="lost contact")
NOTHING = replace(OURS, kinds=("CheckpointNotFoundError",), text="none")
UNUSABLE = replace(OURS, kinds=("StorageError",), text="no checkpoint in a can be loaded")
LATE = replace(OURS, kinds=("StorageTimeoutError",), text="s3://a: the object store did not")


def event(strike: Strike, during: During) -> Event:
    found = next(one for n in count() if (one := build_event(0, n)).strike is strike)
    return replace(found, during=during, victim=2)


def at(iteration: int, tier: Tier = Tier.GLOBAL, step: int | None = None) -> list[Recovered]:
    """All ranks come to the state of a step; by default to the right one."""
    digests = [steps[iteration if step is None else step] for steps in REFERENCE]
    return [Recovered(Found(iteration, tier), digest, has_struck=False) for digest in digests]


def refused(found: Failure) -> list[Recovered]:
    return [Recovered(found, "", has_struck=False)] * 4


def none_left(rank: int) -> Failure:
    text = f"no checkpoint in a, b can be loaded; a: rank {rank}: {INJECTED}"
    return replace(UNUSABLE, text=text, global_rank=None)


def saved(found: Failure | None) -> list[Trained]:
    result = SaveResult(Save(Tier.GLOBAL, 0, is_async=True), 8, "g7", found)
    return [Trained({}, (result,), None, has_struck=True)] * 4


def answers(of_all: list[Any], other: Any = None) -> dict[int, Any]:
    """What all ranks come to; rank 1 comes to something else, its own of a list of all."""
    odd = other[1] if isinstance(other, list) else other
    return dict(enumerate(of_all)) | ({} if other is None else {1: odd})


def recovery(of_all: list[Any], other: Any = None, ledger: Ledger = LEDGER) -> Iterable[str]:
    return check_recovery(answers(of_all, other), ledger, REFERENCE)


def disturbed(strike: Strike, of_all: list[Any], other: Any = None) -> Iterable[str]:
    what = event(strike, During.LOAD)
    return check_disturbed_recovery(what, answers(of_all, other), LEDGER, REFERENCE, 2.0)


def training(strike: Strike | None, of_all: list[Any], other: Any = None) -> Iterable[str]:
    what = event(strike, During.SAVE) if strike else None
    return check_training(what, answers(of_all, other), REFERENCE, 2.0)


WRONG: dict[str, Iterable[str]] = {
    "older": recovery(at(5), at(3)),
    "broken": recovery(at(5), at(7)),
    "other bits": recovery(at(5), at(5, step=4)),
    "another tier": recovery(at(5), at(5, Tier.LOCAL)),
    "refused on one": recovery(at(5), refused(NOTHING)),
    "died": recovery(at(5), RankDiedError(-11)),
    "nothing, after damage": recovery(refused(NOTHING), ledger=BROKEN),
    "unusable, though whole": recovery(refused(UNUSABLE)),
    "no error of ours": recovery(refused(replace(NOTHING, is_ours=False)), ledger=EMPTY),
    "a load fails on one": disturbed(Strike.FAIL, at(3), refused(OURS)),
    "another cause": disturbed(Strike.FAIL, refused(LOST)),
    "unusable by another": disturbed(Strike.FAIL, refused(none_left(1))),
    "broken, disturbed": disturbed(Strike.FAIL, at(7)),
    "another dies": disturbed(Strike.KILL, refused(LOST), RankDiedError(-9)),
    "a pause": disturbed(Strike.PAUSE, refused(LOST)),
    "a save fails on one": training(Strike.FAIL, saved(None), saved(OURS)),
    "a save fails by itself": training(None, saved(OURS)),
    "no cause": training(Strike.FAIL, saved(replace(OURS, text="rank 2: oh"))),
    "another culprit": training(Strike.FAIL, saved(replace(OURS, global_rank=1))),
    "late": training(Strike.FAIL, saved(replace(OURS, seconds=60.0))),
    "not ours": training(Strike.FAIL, saved(FOREIGN)),
    "a death at a failure": training(Strike.FAIL, saved(OURS), RankDiedError(-9)),
    "a second death": training(Strike.KILL, saved(LOST), RankDiedError(1)),
    "a late store with time": training(Strike.FAIL, saved(LATE)),
    "a step": training(None, [Trained({4: "1 5"}, (), None, has_struck=False)] * 4),
    "an attempt fails by itself": check_attempt(answers([OURS] * 4), None),
    "late, all": check_attempt(answers([replace(OURS, kinds=("PeerTimeoutError",))] * 4), 2),
    "some alone": check_attempt(answers([None] * 4, OURS), 2),
    "of another": check_attempt(answers([replace(OURS, global_rank=1)] * 4), 2),
    "a foreign error": check_attempt(answers([FOREIGN] * 4), 2),
    "dead": check_attempt(answers([OURS] * 4, RankDiedError(1)), 2),
    "verify: false alarm": check_verified(LEDGER, {"g3": 0, "g5": 1, "g7": 1}),
    "verify: blind": check_verified(LEDGER, {"g3": 0, "g5": 0, "g7": 0}),
    "pruned too much": check_pruned({"g3": 3, "g5": 5, "g7": 7}, ["g3", "g7"], 2),
}


def test_the_judge_notices_every_wrong_result() -> None:
    assert [name for name, wrong in WRONG.items() if not list(wrong)] == []


def test_a_load_that_fails_leaves_no_other_checkpoint() -> None:
    assert list(disturbed(Strike.FAIL, refused(none_left(2)))) == []


def test_a_part_is_lost_with_its_last_good_copy() -> None:
    save, local = SaveKey(5, "a"), Found(5, Tier.LOCAL)
    copies = {CopyKey(save, owner, owner ^ other) for owner in range(4) for other in (0, 1)}
    ledger = EMPTY.with_global("g3", 3, Status.WHOLE).with_copies(copies)
    assert ledger.without_node(0).without_node(2).newest_whole() == local
    assert ledger.without_node(0).without_node(1).acceptable() == {Found(3, Tier.GLOBAL)}
    one, other = (key for key in sorted(copies) if key.owner == 3)
    for place in (Place.HEADER, Place.TENSOR):
        damaged = ledger.damaged_copy(one, place)
        assert damaged.newest_whole() == local
        assert damaged.damaged_copy(other, place).newest_whole() == Found(3, Tier.GLOBAL)
