"""The newest checkpoint that can be loaded, local or global, one after the other."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_group import open_communicator
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
)
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.storage.files import MARKER_NAME
from dist_ckpt_strategies.storage.publication import read_marker

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"(\d+)\D*$")
_NONE = -1


class Tier(StrEnum):
    """Where a checkpoint is."""

    LOCAL = "local"
    GLOBAL = "global"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A checkpoint that was tried and could not be used.

    Attributes:
        tier: where it is.
        iteration: of the training; for the local tier the newest that was tried.
        name: its directory.
        reason: why it was refused.
    """

    tier: Tier
    iteration: int
    name: str
    reason: str

    def __str__(self) -> str:
        """One line for a log."""
        return f"{self.tier} checkpoint of iteration {self.iteration} ({self.name}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded, and what had to be passed over for it.

    Attributes:
        tier: where it was.
        iteration: of the training.
        name: the id of this rank's part, or the directory.
        state: what the local manager's ``load`` gave, or ``load_global``.
        attempts: newer checkpoints that could not be used, in the order in which they were tried.
    """

    tier: Tier
    iteration: int
    name: str
    state: Any
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    iteration: int
    path: str


def load_latest(
    local_manager: LocalCheckpointManager | None,
    global_dirs: Sequence[str | Path],
    load_global: Callable[[Path], Any],
) -> Loaded:
    """Load the newest checkpoint that is whole, and fall back one by one where one is not.

    Collective over the ranks of the manager, or over the world. Of a local and a global
    checkpoint of one iteration the local one is taken.

    Args:
        local_manager: the local checkpoints; None where there are none.
        global_dirs: global checkpoints, or directories that hold them; every rank sees them. The
            iteration is the number that the checkpoint's name ends with: ``iter_0000100``.
        load_global: loads one, on every rank:
            ``lambda path: dist_ckpt_strategies.load(sharded_state_dict, path)``.

    Raises:
        CheckpointNotFoundError: there is none, or none can be used; says what was tried and why it
            was refused.
        PeerTimeoutError, PeerLostError: a rank does not take part any more.
    """
    comm = _communicator(local_manager)
    attempts: list[Attempt] = []
    for bound, candidate in _stages(_found(comm, global_dirs)):
        loaded = _from_local(local_manager, bound, attempts)
        if loaded is None and candidate is not None:
            loaded = _from_global(comm, candidate, load_global, attempts)
        if loaded is not None:
            return loaded
    local_dirs = [local_manager.root_local_ckpt_dir] if local_manager else []
    where = ", ".join(map(str, [*local_dirs, *global_dirs]))
    why = "".join(f"; {attempt}" for attempt in attempts)
    raise CheckpointNotFoundError(f"no checkpoint to load in {where}{why}")


def _communicator(manager: LocalCheckpointManager | None) -> Communicator:
    purpose = "search for the latest checkpoint"
    if manager is not None:
        return manager.communicator(purpose)
    limit_s = options_from_environment().timeout_s
    return open_communicator(None, timeout_s=limit_s, purpose=purpose)


def _stages(found: Sequence[_Global]) -> Iterator[tuple[int, _Global | None]]:
    """Each global checkpoint, with the iteration that a local one has to have to come first."""
    for candidate in found:
        yield candidate.iteration, candidate
    yield 0, None


def _from_local(
    manager: LocalCheckpointManager | None, at_least: int, attempts: list[Attempt]
) -> Loaded | None:
    """The newest local checkpoint, unless it is older than ``at_least``. Collective."""
    if manager is None:
        return None
    newest = manager.find_latest()
    if newest == _NONE or newest < at_least:
        return None
    try:
        state, part_id = manager.load(at_least=at_least)
    except (PeerTimeoutError, PeerLostError):
        raise
    except CheckpointError as error:
        root = str(manager.root_local_ckpt_dir)
        _note(attempts, Attempt(Tier.LOCAL, newest, root, str(error)))
        return None
    iteration = int(part_id.split("_")[1])
    return Loaded(Tier.LOCAL, iteration, part_id, state, tuple(attempts))


def _from_global(
    comm: Communicator,
    candidate: _Global,
    load_global: Callable[[Path], Any],
    attempts: list[Attempt],
) -> Loaded | None:
    """A global checkpoint, if it is whole. Collective."""

    def load() -> Any:
        read_marker(Path(candidate.path))
        try:
            return load_global(Path(candidate.path))
        except CheckpointError:
            raise
        except Exception as error:  # another rank sees one of ours, and both have to go on alike
            text = f"{candidate.path}: load_global raised {type(error).__name__}: {error}"
            raise CheckpointError(text, path=candidate.path) from error

    try:
        state = agree(comm, load)
    except (PeerTimeoutError, PeerLostError):
        raise
    except CheckpointError as error:
        _note(attempts, Attempt(Tier.GLOBAL, candidate.iteration, candidate.path, str(error)))
        return None
    return Loaded(Tier.GLOBAL, candidate.iteration, candidate.path, state, tuple(attempts))


def _note(attempts: list[Attempt], attempt: Attempt) -> None:
    attempts.append(attempt)
    logger.warning("%s", attempt)


def _found(comm: Communicator, global_dirs: Sequence[str | Path]) -> list[_Global]:
    """All global checkpoints as the first rank sees them, the newest first. Collective."""

    def look() -> list[Any]:
        if comm.rank:
            return []
        paths = {path for name in global_dirs for path in _checkpoints(Path(name).absolute())}
        return [[_iteration_of(path), str(path)] for path in sorted(paths)]

    found = agree_and_gather(comm, look)[0]
    return [_Global(*one) for one in sorted(found, reverse=True)]


def _checkpoints(directory: Path) -> list[Path]:
    """The directory itself if it is a checkpoint or meant as one, else those right below it."""
    if (directory / MARKER_NAME).exists() or not directory.is_dir():
        return [directory] if directory.exists() else []
    below = [path for path in directory.iterdir() if path.is_dir() and _NUMBER.search(path.name)]
    return below or ([directory] if _NUMBER.search(directory.name) else [])


def _iteration_of(path: Path) -> int:
    found = _NUMBER.search(path.name)
    if found is None:
        raise PlanError(
            f"{path}: expected a name that ends with the iteration, such as iter_0000100"
        )
    return int(found[1])
