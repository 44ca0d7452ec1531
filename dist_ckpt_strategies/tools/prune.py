"""Remove old checkpoints, and what killed saves have left. Rank-local; imports no torch."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from dist_ckpt_strategies.config import StoreOptions, store_options_from_environment
from dist_ckpt_strategies.errors import CheckpointError, PlanError, StorageError
from dist_ckpt_strategies.formats.commit import (
    OLD_MARKER_NAME,
    complete_commit,
    invalidate,
    remove_contents,
)
from dist_ckpt_strategies.formats.issues import lacks_files
from dist_ckpt_strategies.formats.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    SAVE_NAME,
    SCHEMA,
    parse_index,
)
from dist_ckpt_strategies.formats.marker import CheckpointMarker
from dist_ckpt_strategies.formats.scan import scan
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    MARKER_NAME,
    MAX_JSON_NBYTES,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
    folders_below,
    is_elsewhere,
    read_file,
    reason,
    remove_empty,
    require_directory,
)
from dist_ckpt_strategies.storage.urls import StoreUrl, parsed_address
from dist_ckpt_strategies.tools.plan_prune import (
    FoundCheckpoint,
    PruneDecision,
    RetentionPolicy,
    Status,
    build_prune_plan,
    complete_ones,
)

if TYPE_CHECKING:  # TensorStore takes a while to import, and directories go without
    from dist_ckpt_strategies.storage.bucket import Bucket
    from dist_ckpt_strategies.tools.prune_bucket import CheckpointBucket

    Location = Path | Bucket
    CheckpointRoot: TypeAlias = "CheckpointDirectory | CheckpointBucket"

HOUR_S = 3600.0

TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""Where Megatron-LM notes which iteration is to be resumed."""

_NUMBER = re.compile(r"(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Removal:
    """A checkpoint that is removed, or what a killed save left.

    Attributes:
        name: of its directory.
        nbytes: of its files; None in an object store, of what has no manifest.
        why: it is removed, in words.
        stays: names in it that are no part of the checkpoint and stay, with the directory.
    """

    name: str
    nbytes: int | None
    why: str
    stays: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was removed, or would be.

    Attributes:
        root: the directory that holds the checkpoints, or its place in an object store.
        removed: in the order of removal.
        kept: the other directories, and why they stay.
        is_dry: whether nothing was removed.
    """

    root: Location
    removed: tuple[Removal, ...]
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
    unfinished: bool = False,
    older_than_s: float = HOUR_S,
    dry_run: bool = False,
    store: StoreOptions | None = None,
) -> PruneReport:
    """Remove checkpoints that are not to be kept from a directory that holds many, or from a URL.

    Rank-local: one rank calls it, after a save. The newest complete checkpoint stays in any case,
    and so does everything that is not known to be a checkpoint of ("zarr", 1) or ("zarr", 2), or
    what a killed save of these has left. What is removed counts as unfinished from the first moment
    on. Where anything complete would go, names and sizes of all files of the ``keep_last`` newest
    are looked at first: one that lacks some stays, and does not count. A directory that cannot be
    read stays and does not count either; the report says why.

    Args:
        root: holds the checkpoints, each in a directory whose name ends in its iteration;
            ``s3://bucket/path`` or ``gs://bucket/path`` too.
        keep_last: how many of the newest complete ones stay; all of them without this and
            ``keep_every``.
        keep_every: those whose iteration is a multiple of it stay.
        unfinished: remove what killed saves and conversions have left too.
        older_than_s: but not where something changed less than so many seconds ago: the save may
            still be running. An object store only tells when the save began: there it has to be
            longer than any save takes.
        dry_run: remove nothing; only say what would be removed.
        store: how an object store is reached; None: as the environment says.

    Raises:
        PlanError: a count is less than 1, or ``root`` is a checkpoint itself.
        CheckpointNotFoundError: ``root`` does not exist, or nothing is below that URL.
        StrategyError: it is no address.
        StorageError: ``root`` cannot be read, or something cannot be removed; what went before is
            gone.
    """
    checkpoints, location = _opened(parsed_address(root, what="root"), store)
    policy = RetentionPolicy(keep_last, keep_every, unfinished, older_than_s)
    removed, kept = [], []
    for decision in _decisions(checkpoints, policy):
        name = decision.found.name
        if not decision.is_removed:
            kept.append(decision)
        elif dry_run or _is_unchanged(checkpoints, decision, policy):
            try:
                nbytes = checkpoints.nbytes(name)
            except StorageError as error:
                kept += build_prune_plan([_unreadable(decision.found, error)], policy)
                continue
            stays = () if dry_run else checkpoints.remove(name)
            removed.append(Removal(name, nbytes, decision.why, stays))
    return PruneReport(location, tuple(removed), tuple(kept), dry_run)


def _opened(place: Path | StoreUrl, store: StoreOptions | None) -> tuple[CheckpointRoot, Location]:
    if isinstance(place, Path):
        return CheckpointDirectory(place), place
    from dist_ckpt_strategies.storage.bucket import Bucket  # noqa: PLC0415
    from dist_ckpt_strategies.tools.prune_bucket import CheckpointBucket  # noqa: PLC0415

    bucket = Bucket(place, store or store_options_from_environment())
    return CheckpointBucket(bucket), bucket


def _decisions(checkpoints: CheckpointRoot, policy: RetentionPolicy) -> tuple[PruneDecision, ...]:
    """The plan. Where complete ones would be removed, the newest are looked into before."""
    found = checkpoints.find(time.time())
    plan = build_prune_plan(found, policy)
    if not any(one.is_removed and one.found.status is Status.COMPLETE for one in plan):
        return plan
    known = {one.name: one for one in found}
    num_whole = 0
    for one in reversed(complete_ones(found)):
        known[one.name] = _looked_into(checkpoints, one)
        num_whole += known[one.name].status is Status.COMPLETE
        if num_whole == (policy.last or 1):
            break
    return build_prune_plan(known.values(), policy)


def _looked_into(checkpoints: CheckpointRoot, one: FoundCheckpoint) -> FoundCheckpoint:
    """A complete checkpoint, with another status where it is damaged or cannot be read."""
    try:
        is_whole = checkpoints.lacks_nothing(one.name)
    except StorageError as error:
        return _unreadable(one, error)
    return one if is_whole else replace(one, status=Status.DAMAGED)


def _unreadable(one: FoundCheckpoint, error: StorageError) -> FoundCheckpoint:
    return replace(one, status=Status.UNREADABLE, failure=error.message)


def _is_unchanged(
    checkpoints: CheckpointRoot,
    decision: PruneDecision,
    policy: RetentionPolicy,
) -> bool:
    """Whether no save has begun there since."""
    found = checkpoints.look_at(decision.found.name, time.time())
    if found.status is not decision.found.status:
        return False
    return found.status is Status.COMPLETE or found.age_s >= policy.older_than_s


def iteration_of(name: str) -> int | None:
    """The number that a name ends in; None where it ends in none."""
    number = _NUMBER.search(name)
    return int(number[1]) if number else None


def is_a_checkpoint(root: object) -> PlanError:
    """The error for a checkpoint in place of the directory that holds it."""
    return PlanError(f"{root} is a checkpoint itself; name the directory that holds it")


class CheckpointDirectory:
    """A directory that holds checkpoints, each under a name of its own; links are passed over."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find(self, now_s: float) -> Sequence[FoundCheckpoint]:
        """What each of them is, and whatever else is there.

        Raises:
            PlanError: it is a checkpoint itself.
            CheckpointNotFoundError, StorageError: it does not exist, or cannot be read.
        """
        require_directory(self.root)
        with file_errors(None, self.root), os.scandir(self.root) as scan:
            names = sorted(entry.name for entry in scan if entry.is_dir(follow_symlinks=False))
            if _is_complete(self.root) or _began_format2(self.root):
                raise is_a_checkpoint(self.root)
        tracked = self._tracked()
        return [
            replace(one, is_named=tracked is not None and one.iteration == tracked)
            for one in (self.look_at(name, now_s) for name in names)
        ]

    def look_at(self, name: str, now_s: float) -> FoundCheckpoint:
        """What one of them is."""
        directory, iteration = self.root / name, iteration_of(name)
        try:
            status = _status(directory)
        except (OSError, StorageError) as error:
            failure = reason(error) if isinstance(error, OSError) else error.message
            return FoundCheckpoint(name, iteration, Status.UNREADABLE, 0.0, failure=failure)
        if status is Status.OTHER:
            return FoundCheckpoint(name, iteration, status, 0.0)
        age_s = max(0.0, now_s - _changed_s(directory, status))
        return FoundCheckpoint(name, iteration, status, age_s)

    def lacks_nothing(self, name: str) -> bool:
        """Whether a complete one has all its files, as far as names and sizes tell.

        Raises:
            StorageError: something in it cannot be read.
        """
        directory = self.root / name
        if not lacks_files(scan(directory).issues):
            return True
        self.nbytes(name)  # raises where something only seems to be missing
        return False

    def nbytes(self, name: str) -> int | None:
        """Bytes of the files of one of them; None where that cannot be told. Raises as above."""
        total = 0
        for folder in folders_below(self.root / name, [""]):
            if folder.failure:
                path = folder.key or "."
                raise StorageError(f"{path}: {folder.failure}", path=path)
            total += folder.nbytes
        return total

    def remove(self, name: str) -> tuple[str, ...]:
        """Remove one of them, its marker first; names of what is no part of it, and stays."""
        directory = self.root / name
        invalidate(directory)
        with file_errors(None, directory):
            (directory / COMMON_NAME).unlink(missing_ok=True)
        remove_contents(directory)
        with file_errors(None, directory):
            _remove_empty_folders(directory)
            remove_empty(directory, self.root)
            return tuple(sorted(os.listdir(directory))) if directory.exists() else ()  # noqa: PTH208

    def _tracked(self) -> int | None:
        try:
            return int(read_file(self.root / TRACKER_NAME, MAX_JSON_NBYTES))
        except (OSError, ValueError):
            return None


def _remove_empty_folders(directory: Path) -> None:
    """Remove the empty directories below one; links and other checkpoints are not looked into."""
    with os.scandir(directory) as scan:
        inner = [Path(entry.path) for entry in scan if entry.is_dir(follow_symlinks=False)]
    for path in inner:
        if not is_elsewhere(path):
            _remove_empty_folders(path)
            if not any(path.iterdir()):
                path.rmdir()


def _status(directory: Path) -> Status:
    """What a directory is: by its marker, or by what a killed save of this package leaves.

    That is nothing at all where it was killed before it wrote into the directory made for it.
    """
    complete_commit(directory)
    if (directory / MARKER_NAME).exists():
        return Status.COMPLETE if _is_complete(directory) else Status.OTHER
    with os.scandir(directory) as scan:
        entries = list(scan)
    is_ours = any(map(_is_stale, entries)) or _began_format2(directory)
    is_new = not entries and iteration_of(directory.name) is not None
    return Status.UNFINISHED if is_ours or is_new else Status.OTHER


def _is_stale(entry: os.DirEntry[str]) -> bool:
    """Whether a killed save left this: a staging directory, removed files, a withdrawn marker."""
    if entry.name == OLD_MARKER_NAME:
        return True
    return entry.name.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) and entry.is_dir()


def _is_complete(directory: Path) -> bool:
    """Whether the marker names a format of this package, and what belongs to that is there."""
    try:
        marker = CheckpointMarker.from_json(read_file(directory / MARKER_NAME, MAX_JSON_NBYTES))
        found = marker.sharded_backend, marker.sharded_backend_version
        if found == ("zarr", 2):
            path = directory / INDEX_NAME
            parse_index(read_file(path), str(path))
            return True
        return found == ("zarr", 1) and not (directory / MANIFEST_NAME).exists()
    except (FileNotFoundError, ValueError, TypeError, CheckpointError):
        return False


def _began_format2(directory: Path) -> bool:
    try:
        fields = json.loads(read_file(directory / SAVE_NAME, MAX_JSON_NBYTES))
        return bool(fields["schema"] == SCHEMA)
    except (FileNotFoundError, NotADirectoryError, ValueError, LookupError, TypeError):
        return False


def _changed_s(directory: Path, status: Status) -> float:
    """When something in it changed last; of a complete one when it became that."""
    if status is Status.COMPLETE:
        with suppress(OSError):
            return (directory / MARKER_NAME).stat().st_mtime
    return max(_times(directory), default=0.0)


def _times(directory: Path) -> Iterator[float]:
    for at, _, names in os.walk(directory):
        for path in (at, *(f"{at}/{name}" for name in names)):
            with suppress(OSError):  # it has gone meanwhile
                yield os.lstat(path).st_mtime
