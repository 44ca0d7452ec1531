"""Process groups that are made for this package: each rank makes only the ones that it is in."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dist_ckpt_strategies.comm.collective import run_and_gather
from dist_ckpt_strategies.comm.process_group import ProcessGroup, group_ranks, is_distributed
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.errors import PeerLostError, PeerTimeoutError, StrategyError


def new_gloo_groups(
    group: ProcessGroup | None, num_groups: int, *, timeout_s: float
) -> tuple[ProcessGroup, ...]:
    """Gloo groups of the same ranks as ``group``, for as many streams side by side.

    Collective over the world: every rank calls this, with the group that it is in.

    Raises:
        StrategyError: some rank is not in the group that it has given.
    """
    world = open_communicator(None, timeout_s=timeout_s, purpose="making of gloo groups")
    # The ranks of a group are sent by its first one: all by all would be too much.
    answers = run_and_gather(world, lambda: _sent(group_ranks(group)))
    groups = [answer for answer in answers if isinstance(answer, list)]
    firsts = [answer[0] if isinstance(answer, list) else answer for answer in answers]
    divided = sorted((rank, ranks[0]) for ranks in groups for rank in ranks)
    if divided != list(enumerate(firsts)):
        raise StrategyError(
            f"the process groups that the ranks have given overlap, or differ: {groups}; every "
            "rank has to give the group that it is in, and be in one only"
        )
    made = (new_group_of(groups, backend="gloo", timeout_s=timeout_s) for _ in range(num_groups))
    return tuple(one for one in made if one is not None)


def _sent(ranks: Sequence[int]) -> list[int] | int:
    return list(ranks) if ranks[0] == dist.get_rank() else ranks[0]


def new_group_of(
    groups: Sequence[Sequence[int]], *, backend: str, timeout_s: float
) -> ProcessGroup | None:
    """Make one process group for each list of global ranks; the one that this rank is in.

    Collective over the world, with equal arguments; every rank is in one list. None without
    torch.distributed.

    Torch's ``new_group`` would be called once for each list by every rank, one after the other. Its
    ``use_local_synchronization`` names a group by how many others a rank has, which differs; its
    ``split_group`` is for NCCL alone. So each rank makes its own group only, under a name that
    counts the calls, which is the same on all ranks, and that has the place in the list.

    Raises:
        PeerTimeoutError, PeerLostError: a rank has not come to make it, or broke off.
    """
    if not is_distributed():
        return None
    me = dist.get_rank()
    number, mine = next((n, sorted(ranks)) for n, ranks in enumerate(groups) if me in ranks)
    limit = timedelta(seconds=timeout_s)
    began = time.monotonic()
    c10d: Any = distributed_c10d
    name = f"{c10d._process_group_name(mine, False)}.{number}"  # noqa: FBT003, SLF001 - see above
    store, place = c10d._get_default_store(), mine.index(me)  # noqa: SLF001
    try:
        made, _ = c10d._new_process_group_helper(  # noqa: SLF001
            len(mine), place, mine, dist.Backend(backend), store, name, timeout=limit
        )
    except RuntimeError as error:
        what = f"making of a {backend} group of {len(mine)} ranks: {error}"
        if time.monotonic() - began >= limit.total_seconds():
            raise PeerTimeoutError(None, f"a peer did not arrive in time: {what}") from error
        if isinstance(error, dist.DistError) or "onnect" in str(error):
            raise PeerLostError(None, f"lost contact with a peer: {what}") from error
        raise StrategyError(what) from error
    c10d._world.pg_group_ranks[made] = {rank: n for n, rank in enumerate(mine)}  # noqa: SLF001
    group: ProcessGroup = made
    return group
