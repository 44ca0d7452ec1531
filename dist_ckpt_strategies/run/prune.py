"""Remove old checkpoints, and what killed saves have left. Rank-local; loads no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from dist_ckpt_strategies.plan.prune import Keeping, Standing, Verdict, build_prune_plan
from dist_ckpt_strategies.storage.pruning import (
    checkpoint_nbytes,
    find_checkpoints,
    look_at,
    remove_checkpoint,
)

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Removal:
    """A directory that goes.

    Attributes:
        name: of the directory.
        nbytes: of its files.
        why: it goes, in words.
        stays: names in it that are no part of the checkpoint and stay, with the directory.
    """

    name: str
    nbytes: int
    why: str
    stays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What went, or would go.

    Attributes:
        root: the directory that holds the checkpoints.
        removed: in the order of removal.
        kept: the other directories, and why they stay.
        is_dry: whether nothing was removed.
    """

    root: Path
    removed: tuple[Removal, ...]
    kept: tuple[Verdict, ...]
    is_dry: bool

    @property
    def nbytes(self) -> int:
        """Bytes that were freed, or would be."""
        return sum(removal.nbytes for removal in self.removed)


def prune(
    root: str | Path,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    unfinished: bool = False,
    older_than_s: float = HOUR_S,
    dry_run: bool = False,
) -> PruneReport:
    """Remove checkpoints that are not to be kept from a directory that holds many.

    Rank-local: one rank calls it, after a save. The newest complete checkpoint stays in any case,
    and so does everything that is neither a checkpoint of ("zarr", 1) or ("zarr", 2) nor what a
    killed save of these has left. What goes counts as unfinished from the first moment on.

    Args:
        root: holds the checkpoints, each in a directory whose name ends in its iteration.
        keep_last: how many of the newest complete ones stay; all of them without this and
            ``keep_every``.
        keep_every: those whose iteration is a multiple of it stay.
        unfinished: remove what killed saves have left too.
        older_than_s: but not where something changed less than so many seconds ago: the save may
            still be running.
        dry_run: remove nothing; only say what would go.

    Raises:
        PlanError: a count is less than 1.
        CheckpointNotFoundError: ``root`` does not exist.
        StorageError: something cannot be read or removed; what went before is gone.
    """
    place = Path(root).absolute()
    keeping = Keeping(keep_last, keep_every, unfinished, older_than_s)
    verdicts = build_prune_plan(find_checkpoints(place, time.time()), keeping)
    removed = [
        _removal(place, verdict, is_dry=dry_run)
        for verdict in verdicts
        if verdict.goes and (dry_run or _still_goes(place, verdict, keeping))
    ]
    kept = tuple(verdict for verdict in verdicts if not verdict.goes)
    return PruneReport(place, tuple(removed), kept, dry_run)


def _still_goes(root: Path, verdict: Verdict, keeping: Keeping) -> bool:
    """Whether nobody has begun to save there since."""
    found = look_at(root, verdict.found.name, time.time())
    if found.standing is not verdict.found.standing:
        return False
    return found.standing is Standing.COMPLETE or found.age_s >= keeping.older_than_s


def _removal(root: Path, verdict: Verdict, *, is_dry: bool) -> Removal:
    name = verdict.found.name
    nbytes = checkpoint_nbytes(root / name)
    stays = () if is_dry else remove_checkpoint(root / name)
    return Removal(name, nbytes, verdict.why, stays)
