"""The tiers, and the global checkpoints at or below a directory or URL that may be loaded."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.course import TRACKER_NAME
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.locations import Location
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
)

NO_STEP = -1
"""The iteration of local checkpoints of which none is complete."""

_NUMBER = re.compile(r"(\d+)\D*\Z")

_OF_A_SAVE = (PARTIAL_PREFIX, REMOVED_PREFIX)
"""Begin names of directories in an unfinished save; these are no checkpoints."""

_OF_A_ROOT = (".dist-ckpt-", TRACKER_NAME)
"""Begins the names of files that roots have beside checkpoints."""


class Tier(StrEnum):
    """The place of a checkpoint: memory of the ranks, disks of the nodes, or shared storage."""

    MEMORY = "memory"
    LOCAL = "local"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint on disks that may be loaded.

    Attributes:
        tier: where it is.
        iteration: iteration of the training, or NO_STEP.
        name: its directory or URL; for the local tier the root of all.
        is_finished: whether it has a marker, good or not; for the local tier, all shards.
        is_ours: whether it is of the training's present course; an unfinished one is taken to be.
    """

    tier: Tier
    iteration: int
    name: str
    is_finished: bool = True
    is_ours: bool = True


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checkpoint that was tried and could not be used.

    Attributes:
        tier: where it is.
        iteration: iteration of the training; -1 if all files of all local saves are lost.
        name: its directory or URL.
        reason: why it was refused.
        is_unfinished: whether its save never ended.
    """

    tier: Tier
    iteration: int
    name: str
    reason: str
    is_unfinished: bool = False

    def __str__(self) -> str:
        """One line for a log."""
        subject = f"checkpoint of iteration {self.iteration}"
        if self.iteration == NO_STEP:
            subject = "checkpoints"
        return f"{self.tier} {subject} ({self.name}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that was loaded, and those that were refused before.

    Attributes:
        tier: where it was.
        iteration: iteration of the training.
        name: what this rank's local shard file begins with, or directory or URL.
        state: result of the local manager's ``load``, of ``load_local`` or of ``load_global``; None
            without these functions, and if the state was filled from memory.
        attempts: checkpoints that could not be used, in the order in which they were tried.
    """

    tier: Tier
    iteration: int
    name: str
    state: Any
    attempts: tuple[Attempt, ...] = ()


def checkpoints_at(place: Location, pattern: str | None) -> dict[str, bool]:
    """The place itself if it is a checkpoint or meant as one, else those right below it.

    Each with whether it is finished.
    """
    return _in_directory(place, pattern) if isinstance(place, Path) else _in_bucket(place, pattern)


def _in_directory(directory: Path, pattern: str | None) -> dict[str, bool]:
    with file_errors(None, directory):
        if not directory.exists():
            return {}
        if pattern is None and (not directory.is_dir() or _is_finished(directory)):
            return {str(directory): directory.is_dir()}
        below = list(directory.iterdir())
        checkpoints = [path for path in below if _is_numbered(path.name, pattern) and path.is_dir()]
        if not checkpoints and _is_meant(directory.name, (path.name for path in below), pattern):
            checkpoints = [directory]
        return {str(path): _is_finished(path) for path in checkpoints}


def _is_finished(directory: Path) -> bool:
    return any((directory / name).exists() for name in (MARKER_NAME, PACKS_INDEX))


def _in_bucket(place: Bucket, pattern: str | None) -> dict[str, bool]:
    url = str(place)
    names = list(place.names(""))
    if pattern is None and MARKER_NAME in names:
        return {url: True}
    tops = {top for top, slash, _ in (name.partition("/") for name in names) if slash}
    numbered = sorted(top for top in tops if _is_numbered(top, pattern))
    if not numbered and _is_meant(url.rpartition("/")[2], names, pattern):
        return {url: False}
    return {f"{url}/{top}": f"{top}/{MARKER_NAME}" in names for top in numbered}


def _is_meant(name: str, content: Iterable[str], pattern: str | None) -> bool:
    """Whether a place is meant as a checkpoint: more is there than the files that roots have."""
    has_files = any(not file.startswith(_OF_A_ROOT) for file in content)
    return pattern is None and has_files and _NUMBER.search(name) is not None


def _is_numbered(name: str, pattern: str | None) -> bool:
    if pattern is not None and re.fullmatch(pattern, name) is None:
        return False
    return _NUMBER.search(name) is not None and not name.startswith(_OF_A_SAVE)


def iteration_of(name: str) -> int:
    """The number at the end of a checkpoint's name; a PlanError if there is none."""
    number = _NUMBER.search(name.rpartition("/")[2])
    if number is None:
        raise PlanError(
            f"{name}: expected a name that ends with the iteration, such as iter_0000100"
        )
    return int(number[1])
