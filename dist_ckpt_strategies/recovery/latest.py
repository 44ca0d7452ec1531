"""The newest checkpoint that can be loaded, local or global, one after the other."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    StorageError,
    StorageTimeoutError,
    text_of,
)
from dist_ckpt_strategies.formats.course import TRACKER_NAME, Course, read_course
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.issues import Problem
from dist_ckpt_strategies.formats.locations import (
    Location,
    holds_packs,
    located,
    read_marker,
)
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.formats.scan import scan
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    Directory,
    file_errors,
)
from dist_ckpt_strategies.storage.io_pool import ALL, Deadline, run_within

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(\d+)\D*\Z")
_NONE = -1

_OF_A_SAVE = (PARTIAL_PREFIX, REMOVED_PREFIX)
"""What is in a checkpoint whose save has not ended: no checkpoints of their own."""

_OF_A_ROOT = (".dist-ckpt-", TRACKER_NAME)
"""Begins the names of files that roots have beside checkpoints."""

_NO_ANSWER = (PeerTimeoutError, PeerLostError, StorageTimeoutError)
"""After these no other checkpoint is tried: what was given up may still write to the tensors."""


class Tier(StrEnum):
    """Where a checkpoint is: in memory of ranks, on disks of nodes, on storage that all see."""

    MEMORY = "memory"
    LOCAL = "local"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checkpoint that was tried and could not be used.

    Attributes:
        tier: where it is.
        iteration: iteration of the training; for the local tier the newest that was tried, or -1 if
            each save lacks a shard, which the reason names.
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
        what = (
            "checkpoints"
            if self.iteration == _NONE
            else f"checkpoint of iteration {self.iteration}"
        )
        return f"{self.tier} {what} ({self.name}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, and which checkpoints were refused before.

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
    attempts: tuple[Attempt, ...]


_Found = tuple[int, str, bool, bool]
"""Iteration and address of a global checkpoint, whether it has a marker, good or not, and whether
it is of the training's present course; one without a marker is taken to be."""


def load_latest(
    local_manager: LocalCheckpointManager | None,
    global_dirs: Sequence[str | Path],
    load_global: Callable[[Any], Any] | None = None,
    *,
    load_local: Callable[[Any], Any] | None = None,
    at_most: int | None = None,
    pattern: str | None = None,
) -> Loaded:
    """Load the newest usable checkpoint; fall back to older ones if it is damaged.

    Collective over the ranks of the manager, or over the world. At the same iteration, a local
    checkpoint is preferred to a global one, and one of another training than the manager's is
    refused. The time limit of the manager, or of the options, applies to the search and to each
    checkpoint that is tried.

    If a directory says that the training went back (``latest_checkpointed_iteration.txt`` names an
    older checkpoint than the newest), the present course counts: what was left is not loaded
    without ``at_most``.

    Args:
        local_manager: manager of local checkpoints; None: there are none.
        global_dirs: global checkpoints, or directories that contain them, or URLs of either; every
            rank sees them. The iteration is the number at the end of the checkpoint's name:
            ``iter_0000100``.
        load_global: function that loads one, on every rank:
            ``lambda path: dist_ckpt_strategies.load(sharded_state_dict, path)``. Its argument is a
            Path, or a URL. Without it, the newest global checkpoint whose files all exist with the
            right sizes is named and not loaded.
        load_local: function that turns the result of the local manager's ``load`` into the state,
            on every rank: ``lambda found: found.load_into(sharded_state_dict)``.
        at_most: skip newer iterations; also all local ones, if the newest of them is newer. A
            checkpoint of just this iteration is tried first, whichever course it is of; others that
            were left come last.
        pattern: regular expression for whole names of global checkpoints. With it, the places
            contain checkpoints, and are none themselves.

    Raises:
        CheckpointNotFoundError: there is no checkpoint, at most unfinished saves.
        StorageError: there are checkpoints, but none can be used, or all are newer than
            ``at_most``; the text has the reason for each. A new start would lose what they hold.
        StorageError: the places cannot be listed.
        StorageTimeoutError: storage did not answer on some rank. No other checkpoint is tried,
            because a read that was given up may still write to the tensors.
        StrategyError: a place is not a valid address.
        PeerTimeoutError, PeerLostError: another rank does not respond.
    """
    timeout_s = local_manager.timeout_s if local_manager else options_from_environment().timeout_s
    purpose = "search for the latest checkpoint"
    if local_manager is not None:
        comm = local_manager.communicator(purpose)
    else:
        comm = open_communicator(None, timeout_s=timeout_s, purpose=purpose)
    attempts: list[Attempt] = []
    find = partial(_seen_by, comm.rank, global_dirs, pattern, timeout_s)
    everything: list[_Found] = run_and_gather(comm, find)[0]
    found, refused = _candidates(everything, at_most, comm.rank)
    if at_most is not None and local_manager is not None:
        newest, root = local_manager.find_latest(), str(local_manager.root_local_ckpt_dir)
        if newest > at_most:
            refused.append(Attempt(Tier.LOCAL, newest, root, f"newer than {at_most}"))
            local_manager = None
    for candidate in [*found, None]:  # at last, local ones of any iteration
        at_least = candidate[0] if candidate else 0
        loaded = _from_local(local_manager, at_least, load_local, attempts)
        if loaded is None and candidate is not None:
            loaded = _from_global(comm, timeout_s, candidate, load_global, attempts)
        if loaded is not None:
            return loaded
    attempts += refused
    local_dirs = [local_manager.root_local_ckpt_dir] if local_manager else []
    where = ", ".join(map(str, [*local_dirs, *global_dirs]))
    why = "".join(f"; {attempt}" for attempt in attempts)
    if all(attempt.is_unfinished for attempt in attempts):
        raise CheckpointNotFoundError(f"no checkpoint to load in {where}{why}")
    raise StorageError(f"no checkpoint in {where} can be loaded{why}")


def _candidates(
    found: Sequence[_Found], at_most: int | None, rank: int
) -> tuple[list[_Found], list[Attempt]]:
    """What may be loaded, in the order of trial, and complete ones that may not, with the reasons.

    With ``at_most`` the one that it names comes first, then the present course, then what was left.
    """
    limit, why = at_most, f"newer than {at_most}"
    if limit is None:
        limit = max((one[0] for one in found), default=0)
        why = "of a course that the training has left; load_latest(at_most=...) goes back there"
    may = [one for one in found if one[0] <= limit and (at_most is not None or one[3])]
    may.sort(key=lambda one: (one[0] == at_most, one[3]), reverse=True)  # stable
    not_these = [one for one in found if one[2] and one not in may]
    left = [one[1] for one in (not_these if at_most is None else may[:1]) if not one[3]]
    if rank == 0 and left:
        logger.warning("%s: of a course that the training has left", ", ".join(left))
    return may, [Attempt(Tier.GLOBAL, number, name, why) for number, name, *_ in not_these]


def _seen_by(
    rank: int, global_dirs: Sequence[str | Path], pattern: str | None, timeout_s: float
) -> list[_Found]:
    """All global checkpoints, the newest first, as the first rank sees them; else nothing."""
    if rank:
        return []
    name, deadline = ", ".join(map(str, global_dirs)), Deadline.after(ALL * timeout_s)
    return run_within(deadline, name, partial(global_checkpoints, global_dirs, pattern))


def _from_local(
    manager: LocalCheckpointManager | None,
    at_least: int,
    load_local: Callable[[Any], Any] | None,
    attempts: list[Attempt],
) -> Loaded | None:
    """The newest local checkpoint, unless it is older than ``at_least``. Collective."""
    if manager is None:
        return None
    newest = manager.find_latest()
    if newest != _NONE and newest < at_least:
        return None
    root = str(manager.root_local_ckpt_dir)
    try:
        state, (iteration, rank, _) = manager.load(at_least=at_least)
        if load_local is not None:
            state = load_local(state)
    except _NO_ANSWER:
        raise
    except CheckpointNotFoundError:
        return None
    except CheckpointError as error:
        _note(attempts, Attempt(Tier.LOCAL, newest, root, str(error)))
        return None
    known = {one.iteration for one in attempts if one.tier is Tier.LOCAL}
    if iteration < newest and newest not in known:
        reason = f"a shard of it is damaged in every copy; iteration {iteration} is used instead"
        _note(attempts, Attempt(Tier.LOCAL, newest, root, reason))
    name = f"iter_{iteration:07d}_{rank}_local"
    return Loaded(Tier.LOCAL, iteration, name, state, tuple(attempts))


def _from_global(
    comm: Communicator,
    timeout_s: float,
    candidate: _Found,
    load_global: Callable[[Any], Any] | None,
    attempts: list[Attempt],
) -> Loaded | None:
    """A global checkpoint, if it is whole. Collective."""
    iteration, path, has_marker, _ = candidate

    def look() -> Location:
        place = located(path, options_from_environment())
        run_within(Deadline.after(ALL * timeout_s), path, lambda: read_marker(place))
        return place

    def load() -> Any:
        if load_global is None:
            check = partial(_require_whole, place)
            return None if comm.rank else run_within(Deadline.after(ALL * timeout_s), place, check)
        try:
            return load_global(place if isinstance(place, Path) else path)
        except CheckpointError:
            raise
        except Exception as error:  # another rank sees one of ours, and both have to go on alike
            text = f"{path}: load_global raised {type(error).__name__}: {text_of(error)}"
            raise CheckpointError(text, path=path) from error

    try:
        # First: who cannot see it must not miss the collectives of the load that the others begin.
        place = run_collectively(comm, look)
        state = run_collectively(comm, load)
    except _NO_ANSWER:
        raise
    except CheckpointError as error:
        _note(attempts, Attempt(Tier.GLOBAL, iteration, path, str(error), not has_marker))
        return None
    return Loaded(Tier.GLOBAL, iteration, path, state, tuple(attempts))


def _require_whole(place: Location) -> None:
    """Raise unless all files are there, as far as names and sizes tell. Rank-local."""
    if holds_packs(place):
        PackCheckpoint(place, options_from_environment()).require_files()
        return
    found = scan(place)
    if found.is_foreign:
        return  # another backend's: that it has a marker is all there is to tell
    issues = [one for one in found.issues if one.problem is not Problem.UNEXPECTED_FILE]
    if issues:
        more = f", and {len(issues) - 1} issues more" if issues[1:] else ""
        raise IncompleteCheckpointError(f"{place}: {issues[0]}{more}", path=str(place))


def _note(attempts: list[Attempt], attempt: Attempt) -> None:
    if attempt in attempts:
        return  # local checkpoints are looked at again before each global one
    attempts.append(attempt)
    logger.warning("%s", attempt)


def global_checkpoints(
    global_dirs: Sequence[str | Path], pattern: str | None = None
) -> list[_Found]:
    """The checkpoints at or below places, the newest first; see ``load_latest``. Rank-local."""
    found: dict[str, _Found] = {}
    for address in global_dirs:
        place = located(address, options_from_environment())
        if isinstance(place, Path):
            below = _in_directory(place, pattern)
        else:
            below = _in_store(place, pattern)
        store = Directory(place) if isinstance(place, Path) else place
        course = Course() if str(place) in below else read_course(store)
        for name, has_marker in below.items():
            number = _iteration_of(name)
            found[name] = (number, name, has_marker, not has_marker or course.has(number))
    return sorted(found.values(), reverse=True)


def _in_directory(directory: Path, pattern: str | None) -> dict[str, bool]:
    """The place itself if it is a checkpoint or meant as one, else those right below it."""
    with file_errors(None, directory):
        if not directory.exists():
            return {}
        if pattern is None and (not directory.is_dir() or _has_marker(directory)):
            return {str(directory): directory.is_dir()}
        below = list(directory.iterdir())
        found = [path for path in below if _is_numbered(path.name, pattern) and path.is_dir()]
        if not found and _is_meant(directory.name, (path.name for path in below), pattern):
            found = [directory]
        return {str(path): _has_marker(path) for path in found}


def _has_marker(directory: Path) -> bool:
    return any((directory / name).exists() for name in (MARKER_NAME, PACKS_INDEX))


def _in_store(place: Bucket, pattern: str | None) -> dict[str, bool]:
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
    has_files = any(not one.startswith(_OF_A_ROOT) for one in content)
    return pattern is None and has_files and _NUMBER.search(name) is not None


def _is_numbered(name: str, pattern: str | None) -> bool:
    if pattern is not None and re.fullmatch(pattern, name) is None:
        return False
    return _NUMBER.search(name) is not None and not name.startswith(_OF_A_SAVE)


def _iteration_of(name: str) -> int:
    found = _NUMBER.search(name.rpartition("/")[2])
    if found is None:
        raise PlanError(
            f"{name}: expected a name that ends with the iteration, such as iter_0000100"
        )
    return int(found[1])
