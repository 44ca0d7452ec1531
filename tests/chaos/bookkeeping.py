"""What saves have left, and what they must have left: the ledger after them, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.chaos.oracle import CopyKey, Ledger, SaveKey, Standing, Tier
from tests.chaos.orders import SaveOrder, SaveResult
from tests.chaos.schedule import NUM_RANKS

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
            standing = _standing_of(before, name, has_succeeded=has_succeeded)
            after = after.with_global(name, finished[name], standing)
        is_odd = has_succeeded and name not in finished
        is_odd |= not has_succeeded and name in finished and name not in before.global_
        if is_odd and not may_differ:
            wrong.append(f"{name}: success is {has_succeeded}, a marker is {name in finished}")
    return after, wrong


def _standing_of(before: Ledger, name: str, *, has_succeeded: bool) -> Standing:
    """Of a checkpoint that is there; a failed save leaves what it would replace, or replaces it."""
    old = Standing.WHOLE if has_succeeded else before.global_.get(name, (0, Standing.WHOLE))[1]
    return Standing.UNSURE if old is Standing.BROKEN else old


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
    """Each part with its owner, and with the rank ``jump`` away that keeps the other one."""
    found = set()
    for owner in range(NUM_RANKS):
        is_first = owner // jump % 2 == 0
        found |= {
            CopyKey(save, owner, owner),
            CopyKey(save, owner, owner + jump if is_first else owner - jump),
        }
    return found
