"""Remove old checkpoints, and what killed saves have left. Rank-local; imports no torch.

``build_prune_plan`` decides, and is pure; the rest finds checkpoints and removes them.
"""

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf, isnan, nan
from pathlib import Path

from dist_ckpt_strategies.config import StoreOptions
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    IncompatibleVersionError,
    PlanError,
    StorageError,
)
from dist_ckpt_strategies.formats.commit import OLD_MARKER_NAME, remove_contents
from dist_ckpt_strategies.formats.course import KeepBest, metrics_name, read_course, read_metrics
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.issues import NO_ANSWER, Problem
from dist_ckpt_strategies.formats.locations import (
    Location,
    holds_packs,
    located,
    place_of,
    require_something,
)
from dist_ckpt_strategies.formats.scan import scan
from dist_ckpt_strategies.formats.zarr2 import is_elsewhere
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
    file_errors,
    reason,
    require_directory,
    sync_path,
)
from dist_ckpt_strategies.storage.folders import folders_below
from dist_ckpt_strategies.tools.prune_packs import (
    look_at_packs,
    remove_lock,
    remove_packs,
    remove_stale,
    written_s,
)

_NUMBER = re.compile(r"(\d+)\D*\Z")
_OF_A_TRAINING = re.compile(r"iter_\d{7,}")


class Status(StrEnum):
    """The status of a directory; the values are in the command's JSON.

    A complete one has its marker and all files, by names and sizes. A damaged one has a marker and
    lacks files. Of an unreadable one nothing is known.
    """

    COMPLETE = "complete"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"
    OTHER = "other"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """A directory below the one that holds all checkpoints, and whether it is removed.

    Attributes:
        name: of the directory.
        iteration: the last number in its name; None where there is none.
        status: what it is.
        age_s: since the newest change in it, in seconds.
        nbytes: of its files; None where that is not known.
        is_named: whether ``latest_checkpointed_iteration.txt`` names it.
        link: the name of a symbolic link to it beside it; empty if there is none.
        is_left: whether the training has gone back from it: it counts as older than all that is of
            the present course.
        rank: its place among those with the metric of ``keep_best``, the best has 0; or None.
        is_removed: whether it is removed.
        why: the reason, in words; of what is not decided yet, why it cannot be read.
        stays: names in a removed one that are no part of the checkpoint and stay, with the
            directory.
        files: packs of killed saves beside a checkpoint; if there are any, they alone are removed.
    """

    name: str
    iteration: int | None
    status: Status
    age_s: float = field(compare=False)
    nbytes: int | None = None
    is_named: bool = False
    link: str = ""
    is_left: bool = False
    rank: int | None = None
    is_removed: bool = False
    why: str = ""
    stays: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PruneReport:
    """The decisions of a prune, carried out or not.

    Attributes:
        root: the directory that holds the checkpoints, or its place in an object store.
        removed: in the order of removal.
        kept: the other directories, and why they stay.
        is_dry: whether nothing was removed.
    """

    root: Location
    removed: tuple[PruneDecision, ...]
    kept: tuple[PruneDecision, ...]
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
    keep_best: KeepBest | None = None,
    unfinished: bool = False,
    older_than_s: float = 3600.0,
    dry_run: bool = False,
    store: StoreOptions | None = None,
    pattern: str | None = None,
) -> PruneReport:
    """Remove old checkpoints, and files of killed saves, below a directory or URL.

    Rank-local: one rank calls it, after a save. Always kept are the newest complete checkpoint,
    what the run's tracker file names or a link below ``root`` leads to, and everything that has no
    iteration in its name, or is neither a checkpoint of ("safetensors", 1) or ("zarr", 1) nor left
    by a killed save of these. Of packs goes what their index names, and the index first; of
    ("zarr", 1) the marker first. Names and sizes of all files are checked: a damaged checkpoint
    does not count, and is kept until enough complete ones are newer. A directory that cannot be
    read is kept and does not count; the report has the reason.

    Args:
        root: holds the checkpoints, each in a directory; its iteration is the last number in its
            name. ``s3://bucket/path`` or ``gs://bucket/path`` too.
        keep_last: number of newest complete ones to keep; without any ``keep_`` all are kept.
        keep_every: keep iterations that are a multiple of it.
        keep_best: ``("loss", "min", 3)``: also keep the best, by the metrics with which a
            TieredCheckpointManager saved them. NaN and missing ones are no best; of equal ones the
            newest is. Beside another ``keep_`` the default is the rule of the manager that saved
            last.
        unfinished: also remove files of killed saves and conversions.
        older_than_s: keep unfinished ones that changed less than this many seconds ago: the save
            may still be running. In an object store the time is that of the save's start, so it
            must exceed the duration of any save.
        dry_run: change nothing; report what would be removed.
        store: how an object store is reached; None: from the environment.
        pattern: regular expression for whole names; whatever else is below ``root`` is left out.

    Raises:
        PlanError: a count is less than 1, or ``root`` is a checkpoint itself.
        CheckpointNotFoundError: ``root`` does not exist, or nothing is below that URL.
        StrategyError: it is no address.
        StorageError: ``root`` cannot be read, or something cannot be removed; what went before is
            gone.
    """
    location, best = located(root, store, what="root"), None
    if keep_best is not None:
        require_keep_best(keep_best)
    below = _find(location, pattern)
    if keep_best is None and not (keep_last is None and keep_every is None):
        keep_best = read_course(place_of(location)).keep_best
    if keep_best is not None:
        metric, mode, best = require_keep_best(keep_best)
        below = _ranked(location, below, metric, mode)
    plan = build_prune_plan(
        below, keep_last, keep_every, best=best, unfinished=unfinished, older_than_s=older_than_s
    )
    return _carry_out(location, plan, older_than_s, dry_run=dry_run)


def _carry_out(
    location: Location, plan: Iterable[PruneDecision], older_than_s: float, *, dry_run: bool
) -> PruneReport:
    removed, kept = [], []
    for decision in plan:
        if not decision.is_removed:
            kept.append(decision)
        elif dry_run:
            removed.append(decision)
        elif decision.files:
            if gone := remove_stale(place_of(location / decision.name), older_than_s):
                removed.append(replace(decision, files=gone))
        else:
            now, *_ = _look_at(location, decision.name, time.time())
            may_run = now.status is Status.UNFINISHED and now.age_s < older_than_s
            if now.status is decision.status and not may_run:  # no save has begun there since
                stays = _remove(location, decision.name, older_than_s)
                removed.append(replace(decision, stays=stays))
                if decision.name == f"iter_{decision.iteration:07d}" and not stays:
                    place_of(location).delete([metrics_name(decision.iteration or 0)])
    return PruneReport(location, tuple(removed), tuple(kept), dry_run)


def build_prune_plan(
    candidates: Iterable[PruneDecision],
    last: int | None = None,
    every: int | None = None,
    *,
    best: int | None = None,
    unfinished: bool = False,
    older_than_s: float = 3600.0,
) -> tuple[PruneDecision, ...]:
    """Decide about each directory, as the arguments of ``prune`` say; in the order of removal.

    The newest complete one is always kept. A damaged one does not count, and stays unless enough
    complete ones are newer. Newer is what has the larger iteration; what the training has gone back
    from, see ``load_latest``, is older than its present course. What the run's tracker file or a
    link names stays, too. Unfinished ones are removed first, then the oldest.
    """
    for name, count in (("keep_last", last), ("keep_every", every), ("keep_best", best)):
        if count is not None and count < 1:
            raise PlanError(f"{name} is {count}, expected 1 or more")
    if not older_than_s >= 0:
        raise PlanError(f"older_than is {older_than_s} s, expected 0 or more")
    ordered = sorted(candidates, key=_order)
    numbered = [one for one in ordered if one.iteration is not None]
    complete = [one for one in numbered if one.status is Status.COMPLETE]
    is_all_kept, num_kept = last is None and every is None and best is None, last or 0
    decisions = []
    for one in sorted(ordered, key=lambda one: one.status is not Status.UNFINISHED):
        is_killed, is_complete = one.status is Status.UNFINISHED, one.status is Status.COMPLETE
        is_damaged = one.status is Status.DAMAGED
        num_newer = sum(_order(other) > _order(one) for other in complete)
        is_multiple = bool(every and one.iteration is not None and one.iteration % every == 0)
        may_run = f"unfinished, and may still be written: changed {one.age_s:.0f} s ago"
        damaged = "damaged, and not counted; `dist-ckpt verify` lists the damage"
        reasons = (
            (one.iteration is None, "its name has no iteration"),
            (one.status is Status.OTHER, "not known to be a checkpoint of this package"),
            (one.status is Status.UNREADABLE, f"cannot be read: {one.why}"),
            (is_killed and not unfinished, "unfinished; kept without --unfinished"),
            (is_killed and one.age_s < older_than_s, may_run),
            (is_damaged and (is_all_kept or num_newer < (last or 1)), damaged),
            (is_complete and is_all_kept, "complete; kept without --keep-last or --keep-every"),
            (is_complete and num_newer == 0, "the newest"),
            (is_complete and num_newer < num_kept, f"one of the last {last}"),
            (not is_killed and is_multiple, f"a multiple of {every}"),
            (one.rank is not None and one.rank < (best or 0), f"one of the {best} best"),
            (not is_killed and one.is_named, "the run's tracker file names it"),
            (not is_killed and one.link != "", f"the link {one.link} leads to it"),
        )
        why = next((why for applies, why in reasons if applies), "")
        removal = f"{one.status}{': its save was killed' if is_killed else ', and not to be kept'}"
        if one.files:
            removal = "packs that no index names, of killed saves; the checkpoint stays"
        decisions.append(replace(one, is_removed=not why, why=why or removal))
    return tuple(decisions)


def require_keep_best(keep_best: object) -> KeepBest:
    """The rule as a tuple; a PlanError if it is none."""
    match keep_best:
        case (str(metric), ("min" | "max") as mode, int(count)) if count >= 1:
            return metric, mode, count
    raise PlanError(
        f"keep_best: expected a metric, 'min' or 'max', and a number such as ('loss', 'min', 3), "
        f"found {keep_best!r}"
    )


def _ranked(
    root: Location, decisions: Iterable[PruneDecision], metric: str, mode: str
) -> list[PruneDecision]:
    """The same, complete ones with their rank by a metric, the best first."""
    ordered, store = list(decisions), place_of(root)
    values: dict[int, float] = {}
    for number, one in enumerate(ordered):
        if one.status is Status.COMPLETE and one.iteration is not None:
            value = read_metrics(store, one.iteration).get(metric, nan)
            if not isnan(value):
                values[number] = value if mode == "min" else -value
    best = sorted(values, key=lambda number: (values[number], -(ordered[number].iteration or 0)))
    for rank, number in enumerate(best):
        ordered[number] = replace(ordered[number], rank=rank)
    return ordered


def _order(one: PruneDecision) -> tuple[bool, int, float, str]:
    return not one.is_left, one.iteration or 0, -one.age_s, one.name


def _find(root: Location, pattern: str | None) -> list[PruneDecision]:
    """The directories below a place whose names match; links are passed over."""
    store: Place = place_of(root)
    links: dict[str, str] = {}
    if isinstance(root, Path):
        require_directory(root)
        with file_errors(None, root), os.scandir(root) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
            names = [entry.name for entry in listed if entry.is_dir(follow_symlinks=False)]
            links = {os.path.realpath(one): one.name for one in listed if one.is_symlink()}
    else:
        objects = root.names()
        if not objects:
            require_something(root)
        parts = (name.partition("/") for name in objects)
        names = sorted({top for top, slash, _ in parts if top and slash})
    if pattern is not None:
        names = [name for name in names if re.fullmatch(pattern, name)]
    elif {MARKER_NAME, PACKS_INDEX}.intersection(store.names()):
        raise PlanError(f"{root} is a checkpoint itself; name the directory that holds it")
    course = read_course(store)
    now_s = time.time()  # one for all: equal times of change make equal ages
    decisions = [decision for name in names for decision in _look_at(root, name, now_s)]
    tracked_s = min((one.age_s for one in decisions if one.iteration == course.newest), default=inf)
    return [
        replace(
            one,
            is_named=one.iteration is not None and one.iteration == course.newest,
            link=links.get(os.path.realpath(str(root / one.name)), "") if links else "",
            # What no list names was left only if it is older than what was written last.
            is_left=one.iteration in course.left
            or not (course.has(one.iteration or 0) or one.age_s <= tracked_s),
        )
        for one in decisions
    ]


def _look_at(root: Location, name: str, now_s: float) -> list[PruneDecision]:
    """The status of a directory; then, in a checkpoint, packs of killed saves beside it."""
    number = _NUMBER.search(name)
    if number is None:
        return [PruneDecision(name, None, Status.OTHER, 0.0)]
    iteration, place = int(number[1]), root / name
    status, nbytes, changed_s = Status.OTHER, None, 0.0
    try:
        store = place_of(place)
        packs = look_at_packs(store)
        stale_s = written_s(store, packs, packs.stale)
        if packs.is_committed:
            status = Status.COMPLETE if packs.is_complete else Status.DAMAGED
            nbytes, changed_s = sum(packs.named.values()) or None, packs.committed_s
        elif isinstance(place, Path):
            status, nbytes, changed_s = _directory_status(place, has_stale=bool(packs.stale))
        elif packs.stale:
            status, changed_s = Status.UNFINISHED, stale_s
    except NO_ANSWER:
        raise
    except (OSError, StorageError) as error:
        why = error.message if isinstance(error, StorageError) else reason(error)
        return [PruneDecision(name, iteration, Status.UNREADABLE, 0.0, why=why)]
    decisions = [PruneDecision(name, iteration, status, max(0.0, now_s - changed_s), nbytes)]
    if packs.stale and status is not Status.UNFINISHED:
        age_s, kind = max(0.0, now_s - stale_s), Status.UNFINISHED
        decisions.append(
            PruneDecision(name, iteration, kind, age_s, packs.stale_nbytes, files=packs.stale)
        )
    return decisions


def _directory_status(directory: Path, *, has_stale: bool) -> tuple[Status, int | None, float]:
    """The status of a directory without committed packs, its bytes, and the time of change."""
    marker = directory / MARKER_NAME
    if marker.exists():
        return *_scanned(directory), marker.stat().st_mtime
    folders = list(folders_below(directory, [""]))
    top = folders[0]
    is_killed = OLD_MARKER_NAME in top.files or any(
        name.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) for name in top.folders
    )
    # A save that was killed early, or has failed, leaves no files, and a prune its directories.
    has_files = any({*folder.files} - {LOCK_NAME} for folder in folders)
    is_empty = not has_files and _OF_A_TRAINING.fullmatch(directory.name)
    if not (has_stale or is_empty or is_killed):
        return Status.OTHER, None, 0.0
    changed_s = 0.0
    for folder in folders:
        if folder.failure:
            path = folder.key or "."
            raise StorageError(f"{path}: {folder.failure}", path=path)
        for name in ("", *folder.files):
            with suppress(OSError):  # it has gone meanwhile
                changed_s = max(changed_s, os.lstat(directory / folder.path_of(name)).st_mtime)
    return Status.UNFINISHED, sum(folder.nbytes for folder in folders), changed_s


def _scanned(directory: Path) -> tuple[Status, int | None]:
    """The status of a directory with a marker, and its bytes."""
    try:
        scanned = scan(directory)
    except (CheckpointNotFoundError, IncompatibleVersionError):
        return Status.OTHER, None
    problems = {issue.problem: issue for issue in scanned.issues}
    unreadable = problems.get(Problem.UNREADABLE)
    if unreadable is not None:
        raise StorageError(f"{unreadable.path}: {unreadable.found}", path=unreadable.path)
    if scanned.marker is None or Problem.UNKNOWN_BACKEND in problems:
        return Status.OTHER, scanned.nbytes
    is_damaged = bool(problems.keys() - {Problem.UNEXPECTED_FILE})
    return Status.DAMAGED if is_damaged else Status.COMPLETE, scanned.nbytes


def _remove(root: Location, name: str, older_than_s: float) -> tuple[str, ...]:
    """Remove a checkpoint, its index or marker first; names of what is no part of it, and stays."""
    place = root / name
    has_packs, store = holds_packs(place), place_of(place)
    if has_packs:  # after it the index, without either of which it is no damaged one
        store.delete([MARKER_NAME])
    if look_at_packs(store).listed:
        remove_packs(store, older_than_s)
    if isinstance(place, Path) and not has_packs:
        remove_contents(place)
    if not isinstance(place, Path):
        store.delete([COMMON_NAME])
        return tuple(sorted({left.partition("/")[0] for left in store.names()}))
    remove_lock(Directory(place))
    with file_errors(None, place):
        folders = []
        for at, names, _ in os.walk(place):  # which does not follow links
            names[:] = [inner for inner in names if not is_elsewhere(Path(at, inner))]
            folders.append(Path(at))
        for path in reversed(folders):
            if not any(path.iterdir()):
                path.rmdir()
        sync_path(place.parent)
        return tuple(sorted(os.listdir(place))) if place.exists() else ()  # noqa: PTH208
