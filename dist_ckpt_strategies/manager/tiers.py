"""The two kinds of disks that checkpoints are on, behind one interface."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from dist_ckpt_strategies.comm.base import (
    Communicator,
    run_and_gather,
    run_collectively,
    run_on_first_rank,
)
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.core.report import SaveMetrics
from dist_ckpt_strategies.errors import CheckpointError, IncompleteCheckpointError, text_of
from dist_ckpt_strategies.formats.issues import Problem
from dist_ckpt_strategies.formats.locations import Location, holds_packs, located, read_marker
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.formats.scan import scan
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.local.mcore_state_dict import MCoreTensorAwareStateDict, ShardDistribution
from dist_ckpt_strategies.manager.candidates import NO_STEP, Candidate, Loaded, Tier
from dist_ckpt_strategies.manager.root import Root
from dist_ckpt_strategies.megatron.shards import StateDict
from dist_ckpt_strategies.sharded.async_request import LocalSaveRequest
from dist_ckpt_strategies.strategies.save import save_async

State = StateDict | Callable[[], StateDict]
"""A sharded state dict, or a function that returns it."""

Read = Callable[[Any], Any]
"""Makes a state of what a tier holds, on every rank: of the local manager's, or of a path."""


@dataclass(frozen=True, slots=True)
class RunningSave:
    """A save that has begun and not ended.

    Attributes:
        comm: all ranks.
        event: its step and tier, and the times that are known.
        request: ends it.
        commit: makes it visible, once all ranks have written. Collective.
        metrics: the caller's, by which it may be kept.
    """

    comm: Communicator
    event: SaveMetrics
    request: LocalSaveRequest
    commit: Callable[[], None]
    metrics: dict[str, float]

    def __str__(self) -> str:
        """Its name in messages."""
        return f"the {self.event.tier} save of step {self.event.step}"


class LocalTier:
    """Checkpoints on the nodes' own disks, by the manager of these.

    All ranks call each method together; so it is with GlobalTier, which has the same ones.
    """

    def __init__(self, manager: LocalCheckpointManager) -> None:
        self._manager = manager
        self._distribution: ShardDistribution | None = None

    def __str__(self) -> str:
        """The nodes' directory."""
        return str(self._manager.root_local_ckpt_dir)

    def begin(self, step: int, state: StateDict, **_: Any) -> LocalSaveRequest:
        """Begin to save a state in the background; the request ends the save."""
        shards, self._distribution = MCoreTensorAwareStateDict.from_state_dict(
            state, cached_metadata=self._distribution
        )
        return cast("LocalSaveRequest", self._manager.save(shards, step, is_async=True))

    def newest(self, _: Communicator, /) -> list[Candidate]:
        """The candidates for a load, the newest first.

        With those that lack shards, if they are newer than all complete ones: ``load`` tells which.
        """
        steps = self._manager.iterations() or {NO_STEP: True}  # its ``load`` tells if all are lost
        newest = max((step for step, is_complete in steps.items() if is_complete), default=NO_STEP)
        return [
            Candidate(Tier.LOCAL, step, str(self), is_complete)
            for step, is_complete in steps.items()
            if is_complete or step > newest
        ]

    def load(self, comm: Communicator, candidate: Candidate, read: Read | None) -> Loaded:
        """Load just this candidate; a CheckpointError says why that is not possible."""
        step, manager = candidate.iteration, self._manager
        if step == NO_STEP:
            state, (iteration, *_) = manager.load()
        else:
            state, (iteration, *_) = manager.load(at_least=step, at_most=step)
        if read is not None:
            state = read(state)
        return Loaded(Tier.LOCAL, iteration, f"iter_{iteration:07d}_{comm.rank}_local", state)


class GlobalTier:
    """Checkpoints on storage that all ranks see, at or below a root.

    Args:
        root: where they are.
        pattern: regular expression for whole names; with it, the root is no checkpoint itself.
        arguments: of ``save_async``, for all saves.
    """

    def __init__(self, root: Root, pattern: str | None = None, **arguments: Any) -> None:
        self._root, self._pattern, self._arguments = root, pattern, arguments

    def __str__(self) -> str:
        """Path or URL."""
        return str(self._root)

    def begin(self, step: int, state: StateDict, **arguments: Any) -> LocalSaveRequest:
        """See LocalTier. Further arguments are those of ``save_async``."""
        all_arguments = self._arguments | arguments
        return save_async(state, self._root.directory(step), overwrite=True, **all_arguments)

    def newest(self, comm: Communicator) -> list[Candidate]:
        """See LocalTier. Of the present course and others, as the first rank sees them."""
        rows = run_and_gather(comm, lambda: [] if comm.rank else self._rows())[0]
        return [Candidate(Tier.GLOBAL, *row) for row in rows]

    def load(self, comm: Communicator, candidate: Candidate, read: Read | None) -> Loaded:
        """See LocalTier. Without ``read``, only names and sizes of its files are compared."""
        path, root = candidate.name, self._root

        def look() -> Location:
            place = located(path, options_from_environment())
            root.within(partial(read_marker, place))
            return place

        # First: a rank that cannot see it must not miss the collectives of the others' load.
        place = run_collectively(comm, look)
        if read is None:
            run_on_first_rank(comm, lambda: root.within(partial(_require_whole, place)))
            return Loaded(Tier.GLOBAL, candidate.iteration, path, None)
        address = place if isinstance(place, Path) else path
        state = run_collectively(comm, partial(_read, read, address))
        return Loaded(Tier.GLOBAL, candidate.iteration, path, state)

    def _rows(self) -> list[list[Any]]:
        candidates = self._root.within(partial(self._root.candidates, self._pattern))
        return [[c.iteration, c.name, c.is_finished, c.is_ours] for c in candidates]


DiskTier = LocalTier | GlobalTier
"""Checkpoints on disks of one kind."""


def _read(read: Read, place: str | Path) -> Any:
    """The state; any error as one of this package, which all ranks take alike."""
    try:
        return read(place)
    except CheckpointError:
        raise
    except Exception as error:
        text = f"{place}: load_global raised {type(error).__name__}: {text_of(error)}"
        raise CheckpointError(text, path=str(place)) from error


def _require_whole(place: Location) -> None:
    """Raise unless all files are there, as far as names and sizes tell. Rank-local."""
    if holds_packs(place):
        PackCheckpoint(place, options_from_environment()).require_files()
        return
    scanned = scan(place)
    if scanned.is_foreign:
        return  # another backend's: that it has a marker is all there is to tell
    issues = [issue for issue in scanned.issues if issue.problem is not Problem.UNEXPECTED_FILE]
    if issues:
        more = f", and {len(issues) - 1} issues more" if issues[1:] else ""
        raise IncompleteCheckpointError(f"{place}: {issues[0]}{more}", path=str(place))
