"""Process groups that are made for this package, by all ranks of the world together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dist_ckpt_strategies.comm.collective import run_and_gather
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    is_distributed,
    require_member,
)
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import PeerLostError, PeerTimeoutError, StrategyError


def new_gloo_groups(
    group: ProcessGroup | None, num_groups: int, *, timeout_s: float
) -> tuple[ProcessGroup, ...]:
    """Gloo groups of the same ranks as ``group``, for as many streams side by side.

    Collective over the world: every rank calls this, with the group that it is in, and torch makes
    the groups of all ranks.

    Raises:
        StrategyError: some rank is not in the group that it has given.
    """
    world = open_communicator(None, timeout_s=timeout_s, purpose="making of gloo groups")
    answers = run_and_gather(world, lambda: ranks_to_wire(_member_ranks(group)))
    mine = _member_ranks(group)
    found: list[ProcessGroup] = []
    for ranks in sorted({ranks_from_wire(answer) for answer in answers}):
        limit = timedelta(seconds=timeout_s)
        made = [_new_group(ranks, limit, "gloo") for _ in range(num_groups)]
        if list(ranks) == mine:
            found = made
    return tuple(found)


def new_group_of(
    groups: Sequence[Sequence[int]], *, backend: str, timeout_s: float
) -> ProcessGroup | None:
    """Make a process group for each list of global ranks; the one that this rank is in.

    Collective over the world, with equal arguments. None without torch.distributed.
    """
    if not is_distributed():
        return None
    mine: ProcessGroup | None = None
    for ranks in groups:
        made = _new_group(ranks, timedelta(seconds=timeout_s), backend)
        if dist.get_rank() in ranks:
            mine = made
    return mine


def _new_group(ranks: Sequence[int], limit: timedelta, backend: str) -> Any:
    """A process group. Collective over the world.

    Raises:
        PeerTimeoutError, PeerLostError: a rank has not come to make it, or broke off.
    """
    began = time.monotonic()
    try:
        return dist.new_group(list(ranks), limit, backend=backend)
    except RuntimeError as error:
        what = f"making of a {backend} group of {len(ranks)} ranks: {error}"
        if time.monotonic() - began >= limit.total_seconds():
            raise PeerTimeoutError(None, f"a peer did not arrive in time: {what}") from error
        if isinstance(error, dist.DistError) or "onnect" in str(error):
            raise PeerLostError(None, f"lost contact with a peer: {what}") from error
        raise StrategyError(what) from error


def _member_ranks(group: ProcessGroup | None) -> list[int]:
    require_member(group)
    return sorted(dist.get_process_group_ranks(group))


def ranks_to_wire(ranks: Sequence[int]) -> list[int]:
    """Ascending ranks as numbers: four where they are evenly spaced, however many they are.

    The groups of a parallel layout are, and so is the world, which every rank would have to list
    to every other.
    """
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = range(ranks[0], ranks[-1] + 1, step)
    return [0, step, even.stop, even.start] if list(even) == list(ranks) else [1, *ranks]


def ranks_from_wire(wire: Sequence[int]) -> tuple[int, ...]:
    """The ranks that ``ranks_to_wire`` was given."""
    is_listed, *numbers = wire
    if is_listed:
        return tuple(numbers)
    step, stop, start = numbers
    return tuple(range(start, stop, step))
