"""Which parts a rank may remove once a save is complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from dist_ckpt_strategies.spec.part import PartId, SaveId


def build_retention(
    complete: Collection[SaveId], newest: SaveId, num_kept: int
) -> frozenset[SaveId]:
    """The saves to keep: the newest, and before it as many as there is to be.

    A save of a later iteration belongs to a run that went back since; it is not kept, lest it be
    taken for the newest.

    Args:
        complete: the saves whose parts are all there.
        newest: the save that has just been made.
        num_kept: how many to keep, 1 or more.
    """
    earlier = sorted(
        (save for save in complete if save < newest and save.iteration < newest.iteration),
        reverse=True,
    )
    one_each: dict[int, SaveId] = {}
    for save in earlier:
        one_each.setdefault(save.iteration, save)
    return frozenset([newest, *list(one_each.values())[: num_kept - 1]])


def outdated(parts: Iterable[PartId], kept: Collection[SaveId]) -> list[PartId]:
    """The parts of saves that are not kept, sorted."""
    return sorted(part for part in parts if part.save not in kept)
