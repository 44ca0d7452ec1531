"""The newest checkpoint that can be loaded, local or global, or that of one step."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.config import options_from_environment
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    PeerLostError,
    PeerTimeoutError,
    StorageError,
    StorageTimeoutError,
)
from dist_ckpt_strategies.local.manager import LocalCheckpointManager
from dist_ckpt_strategies.manager.candidates import NO_STEP, Attempt, Candidate, Loaded, Tier
from dist_ckpt_strategies.manager.root import Root
from dist_ckpt_strategies.manager.tiers import DiskTier, GlobalTier, LocalTier, Read

__all__ = ["Attempt", "Loaded", "Tier", "load_latest"]

logger = logging.getLogger(__name__)

_NO_ANSWER = (PeerTimeoutError, PeerLostError, StorageTimeoutError)
"""After these no other checkpoint is tried: what was given up may still write to the tensors."""

Reads = Mapping[Tier, Read | None]
_Choice = tuple[Candidate, DiskTier]


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
        at_most: skip newer iterations. A checkpoint of just this iteration is tried first,
            whichever course it is of; others that were left come last.
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
    purpose, tiers = "search for the latest checkpoint", list[DiskTier]()
    if local_manager is not None:
        timeout_s, comm = local_manager.timeout_s, local_manager.communicator(purpose)
        tiers.append(LocalTier(local_manager))
    else:
        timeout_s = options_from_environment().timeout_s
        comm = open_communicator(None, timeout_s=timeout_s, purpose=purpose)
    tiers += [GlobalTier(Root(place, timeout_s), pattern) for place in global_dirs]
    reads = {Tier.LOCAL: load_local, Tier.GLOBAL: load_global}
    return load_newest(comm, tiers, reads, at_most)


def load_newest(
    comm: Communicator, tiers: Sequence[DiskTier], reads: Reads, at_most: int | None
) -> Loaded:
    """The newest usable checkpoint of the tiers; see ``load_latest``. Collective."""
    chosen, refused = in_order(_choices(comm, tiers), at_most, is_logged=comm.rank == 0)
    loaded, attempts = _first_usable(comm, chosen, reads)
    if loaded is not None:
        return loaded
    attempts += refused
    where, why = _names(tiers), "".join(f"; {attempt}" for attempt in attempts)
    if all(attempt.is_unfinished for attempt in attempts):
        raise CheckpointNotFoundError(f"no checkpoint to load in {where}{why}")
    raise StorageError(f"no checkpoint in {where} can be loaded{why}")


def load_step(comm: Communicator, tiers: Sequence[DiskTier], reads: Reads, step: int) -> Loaded:
    """The checkpoint of just this step, local before global, of whichever course. Collective.

    Raises:
        CheckpointNotFoundError: there is none; the text lists the steps that there are.
        StorageError: it is damaged; the text has the reason, and the other steps.
    """
    choices = _choices(comm, tiers)
    finished = [candidate for candidate, _ in choices if candidate.is_finished]
    chosen = [one for one in choices if one[0].iteration == step and one[0] in finished]
    loaded, attempts = _first_usable(comm, chosen, reads)
    if loaded is not None:
        return loaded
    steps = {
        tier: sorted({one.iteration for one in finished if one.tier is tier} - {NO_STEP})
        for tier in (Tier.LOCAL, Tier.GLOBAL)
    }
    there = "; ".join(f"{tier} {', '.join(map(str, s))}" for tier, s in steps.items() if s)
    where = f"in {_names(tiers)}; steps that are there: {there or 'none'}"
    if not attempts:
        raise CheckpointNotFoundError(f"no checkpoint of step {step} {where}")
    why = "".join(f"; {attempt}" for attempt in attempts)
    raise StorageError(f"the checkpoint of step {step} cannot be loaded{why}; {where}")


def in_order(
    choices: Sequence[_Choice], at_most: int | None, *, is_logged: bool = False
) -> tuple[list[_Choice], list[Attempt]]:
    """The candidates in the order of trial, and finished ones that are refused, with reasons.

    With ``at_most`` the one that it names comes first, then the present course, then what was left.
    """
    may: list[_Choice] = []
    refused: list[Attempt] = []
    for candidate, tier in choices:
        if at_most is not None and candidate.iteration > at_most:
            why = f"newer than {at_most}"
        elif at_most is None and not candidate.is_ours:
            why = "of a course that the training has left; load_latest(at_most=...) goes back there"
        else:
            may.append((candidate, tier))
            continue
        if candidate.is_finished:
            refused.append(Attempt(candidate.tier, candidate.iteration, candidate.name, why))
    may.sort(key=lambda one: _order(one[0], at_most), reverse=True)  # stable
    left = [attempt.name for attempt in refused]
    if at_most is not None:
        left = [candidate.name for candidate, _ in may[:1] if not candidate.is_ours]
    if is_logged and left:
        logger.warning("%s: of a course that the training has left", ", ".join(left))
    return may, refused


def _order(one: Candidate, at_most: int | None) -> tuple[bool, bool, int, bool]:
    return one.iteration == at_most, one.is_ours, one.iteration, one.tier is Tier.LOCAL


def _choices(comm: Communicator, tiers: Sequence[DiskTier]) -> list[_Choice]:
    """All candidates, each once, with their tiers. Collective."""
    return list({candidate: tier for tier in tiers for candidate in tier.newest(comm)}.items())


def _first_usable(
    comm: Communicator, choices: Sequence[_Choice], reads: Reads
) -> tuple[Loaded | None, list[Attempt]]:
    """The first that can be loaded, and those that could not. Collective."""
    attempts: list[Attempt] = []
    for candidate, tier in choices:
        try:
            loaded = tier.load(comm, candidate, reads[candidate.tier])
        except _NO_ANSWER:
            raise
        except CheckpointError as error:
            if candidate.iteration == NO_STEP and isinstance(error, CheckpointNotFoundError):
                continue  # there never was a local checkpoint
            place = candidate.tier, candidate.iteration, candidate.name, str(error)
            was_there = candidate.is_finished or (
                candidate.tier is Tier.LOCAL and not isinstance(error, CheckpointNotFoundError)
            )
            attempts.append(Attempt(*place, is_unfinished=not was_there))
            logger.warning("%s", attempts[-1])
        else:
            return replace(loaded, attempts=tuple(attempts)), attempts
    return None, attempts


def _names(tiers: Sequence[DiskTier]) -> str:
    return ", ".join(map(str, tiers))
