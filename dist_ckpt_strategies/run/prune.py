"""Remove old checkpoints, and what killed saves have left. Rank-local; loads no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dist_ckpt_strategies.config import StoreOptions, store_options_from_environment
from dist_ckpt_strategies.plan.prune import (
    Keeping,
    Standing,
    Verdict,
    build_prune_plan,
    relied_on,
)
from dist_ckpt_strategies.spec.store_url import StoreUrl
from dist_ckpt_strategies.storage.addresses import parsed_address
from dist_ckpt_strategies.storage.lifecycle.pruning import (
    DirectoryShelf,
    Shelf,
)

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.storage.buckets.bucket import Bucket

    Location = Path | Bucket

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Removal:
    """A checkpoint that goes, or what a killed save left.

    Attributes:
        name: of its directory.
        nbytes: of its files; None in an object store, of what has no manifest.
        why: it goes, in words.
        stays: names in it that are no part of the checkpoint and stay, with the directory.
    """

    name: str
    nbytes: int | None
    why: str
    stays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What went, or would go.

    Attributes:
        root: the directory that holds the checkpoints, or its place in an object store.
        removed: in the order of removal.
        kept: the other directories, and why they stay.
        is_dry: whether nothing was removed.
    """

    root: Location
    removed: tuple[Removal, ...]
    kept: tuple[Verdict, ...]
    is_dry: bool

    @property
    def nbytes(self) -> int:
        """Bytes that were freed, or would be, as far as they are known."""
        return sum(removal.nbytes or 0 for removal in self.removed)


def prune(  # noqa: PLR0913 - one parameter for each option
    root: str | Path,
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    unfinished: bool = False,
    older_than_s: float = HOUR_S,
    dry_run: bool = False,
    store: StoreOptions | None = None,
) -> PruneReport:
    """Remove checkpoints that are not to be kept from a directory that holds many, or from a URL.

    Rank-local: one rank calls it, after a save. The newest complete checkpoint stays in any case,
    and so does everything that is neither a checkpoint of ("zarr", 1) or ("zarr", 2) nor what a
    killed save of these has left. What goes counts as unfinished from the first moment on.
    Where anything complete goes, names and sizes of all files of the ``keep_last`` newest are
    looked at first: one that lacks some stays, and does not count.

    Args:
        root: holds the checkpoints, each in a directory whose name ends in its iteration;
            ``s3://bucket/path`` or ``gs://bucket/path`` too.
        keep_last: how many of the newest complete ones stay; all of them without this and
            ``keep_every``.
        keep_every: those whose iteration is a multiple of it stay.
        unfinished: remove what killed saves have left too.
        older_than_s: but not where something changed less than so many seconds ago: the save may
            still be running. An object store only tells when the save began: there it has to be
            longer than any save takes.
        dry_run: remove nothing; only say what would go.
        store: how an object store is reached; None: as the environment says.

    Raises:
        PlanError: a count is less than 1.
        CheckpointNotFoundError: ``root`` does not exist, or nothing is below that URL.
        StrategyError: it is no address.
        StorageError: something cannot be read or removed; what went before is gone.
    """
    place = parsed_address(root, what="root")
    shelf, location = _opened(place, store)
    keeping = Keeping(keep_last, keep_every, unfinished, older_than_s)
    verdicts = _planned(shelf, keeping)
    removed = [
        _removal(shelf, verdict, is_dry=dry_run)
        for verdict in verdicts
        if verdict.goes and (dry_run or _still_goes(shelf, verdict, keeping))
    ]
    kept = tuple(verdict for verdict in verdicts if not verdict.goes)
    return PruneReport(location, tuple(removed), kept, dry_run)


def _opened(place: Path | StoreUrl, store: StoreOptions | None) -> tuple[Shelf, Location]:
    if isinstance(place, Path):
        return DirectoryShelf(place), place
    from dist_ckpt_strategies.storage.buckets.bucket import Bucket  # noqa: PLC0415
    from dist_ckpt_strategies.storage.buckets.pruning import BucketShelf  # noqa: PLC0415

    bucket = Bucket(place, store or store_options_from_environment())
    return BucketShelf(bucket), bucket


def _planned(shelf: Shelf, keeping: Keeping) -> tuple[Verdict, ...]:
    """The plan. Those that older ones go for lack no file: they alone are looked into."""
    found, whole = shelf.find(time.time()), set[str]()
    while True:
        verdicts = build_prune_plan(found, keeping)
        if not any(one.goes and one.found.standing is Standing.COMPLETE for one in verdicts):
            return verdicts
        names = {one.name for one in relied_on(found, keeping)} - whole
        damaged = {name for name in names if not shelf.is_whole(name)}
        if not damaged:
            return verdicts
        whole |= names - damaged
        found = [
            replace(one, standing=Standing.DAMAGED) if one.name in damaged else one for one in found
        ]


def _still_goes(shelf: Shelf, verdict: Verdict, keeping: Keeping) -> bool:
    """Whether nobody has begun to save there since."""
    found = shelf.look_at(verdict.found.name, time.time())
    if found.standing is not verdict.found.standing:
        return False
    return found.standing is Standing.COMPLETE or found.age_s >= keeping.older_than_s


def _removal(shelf: Shelf, verdict: Verdict, *, is_dry: bool) -> Removal:
    name = verdict.found.name
    nbytes = shelf.nbytes(name)
    stays = () if is_dry else shelf.remove(name)
    return Removal(name, nbytes, verdict.why, stays)
