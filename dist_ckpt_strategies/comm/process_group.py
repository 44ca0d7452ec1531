"""Groups of torch.distributed: what they are, and how they are made."""

import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.base import Communicator, run_and_gather
from dist_ckpt_strategies.device import current_gpu
from dist_ckpt_strategies.errors import (
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
    text_of,
)

_OURS = __name__.rpartition(".")[0]

_SHORT_NBYTES = 32 << 10
"""Nodes receive this once for each of their ranks, while a ring brings it to a node once."""

ProcessGroup = dist.ProcessGroup
"""A group of ranks, as torch.distributed makes them."""

is_distributed: Callable[[], bool] = dist.is_initialized
"""Whether torch.distributed is initialised; this process is alone where it is not."""


def global_rank() -> int:
    """This process among all; 0 where it is alone."""
    return dist.get_rank() if is_distributed() else 0


def group_ranks(group: ProcessGroup | None) -> tuple[int, ...]:
    """The global ranks of a group; of the world if there is none, or of this process alone."""
    if not is_distributed():
        return (0,)
    require_member(group)
    return tuple(sorted(dist.get_process_group_ranks(group)))


def is_default_group(group: ProcessGroup | None) -> bool:
    """Whether this is torch's default group, with several ranks."""
    if not is_distributed() or dist.get_world_size(group) == 1:
        return False
    return group is None or group is dist.group.WORLD


def is_alive(group: Any) -> bool:
    """Whether a process group has not been destroyed, alone or with the world."""
    return group in dist.distributed_c10d._world.pg_map  # noqa: SLF001 - no public way


def require_member(group: object) -> None:
    """Raise a StrategyError unless this rank is in the group, and the group is there.

    Torch gives ranks outside a number in its place.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group == outside:
        raise StrategyError(
            f"rank {dist.get_rank()} is not in the process group that it passed; pass on every "
            "rank a group that contains it"
        )
    if group is not None and not is_alive(group):
        raise StrategyError(
            "the process group has been destroyed; after torch.distributed was initialized again, "
            "make a new group, and a new strategy with it"
        )


def message_device(group: ProcessGroup | None) -> torch.device:
    """The device of messages over the group: the host, unless it has NCCL alone."""
    return torch.device("cpu") if "gloo" in dist.get_backend(group) else payload_device(group)


def payload_device(group: ProcessGroup | None) -> torch.device:
    """The device whose tensors the group's backend sends without a copy: the GPU with NCCL."""
    if is_distributed() and "nccl" in dist.get_backend(group):
        return current_gpu()
    return torch.device("cpu")


def uses_nccl(group: ProcessGroup) -> bool:
    """Whether NCCL carries what tensors on a GPU hold; False for a group that is not there yet."""
    configs = dist.distributed_c10d._world.pg_backend_config  # noqa: SLF001 - torch's own raises
    return "nccl" in str(configs.get(group))


def is_of_communication(error: BaseException | None) -> bool:
    """Whether an error of torch's means that ranks lost contact, or waited too long.

    Gloo's are plain RuntimeErrors.
    """
    if isinstance(error, dist.DistError | ConnectionError | PeerLostError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in text_of(error)


def is_from_peer(error: BaseException | None) -> bool:
    """Whether torch's communication raised an error in a collective of this package.

    Not so what a signal handler raises meanwhile, as torch's does when a DataLoader's worker dies,
    nor an error of the device.
    """
    if not isinstance(error, RuntimeError) or is_of_communication(error):
        return isinstance(error, RuntimeError)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_by = str(frame.f_globals.get("__name__"))
    return type(error) is RuntimeError and raised_by.startswith(("torch.distributed", _OURS))


def begin_gather_rows(
    mine: torch.Tensor, group: ProcessGroup | None, *, meets_others: bool = False
) -> tuple[torch.Tensor, Any]:
    """Begin to gather one-dimensional tensors of one size, as rows by rank; these, and the work.

    Collective. Gloo passes those of an all-gather around a ring, one hop after the other; what is
    short goes in an all-to-all, where every rank sends to each at once. With ``meets_others`` it is
    an all-gather all the same: a rank that is in another package's, which most often sends 8 bytes
    first, is found out.
    """
    size = dist.get_world_size(group)
    found = mine.new_empty((size, mine.numel()))
    is_short = mine.numel() * mine.element_size() <= _SHORT_NBYTES
    if mine.device.type == "cpu" and is_short and not meets_others:
        copies = mine.expand(size, -1).contiguous()
        return found, dist.all_to_all_single(found, copies, group=group, async_op=True)
    return found, dist.all_gather([*found.unbind()], mine, group=group, async_op=True)


def new_gloo_groups(
    world: Communicator, group: ProcessGroup | None, num_groups: int, *, timeout_s: float
) -> tuple[ProcessGroup, ...]:
    """Gloo groups of the same ranks as ``group``, for as many streams side by side.

    Collective over the world: every rank calls this, with the group that it is in; else all raise a
    StrategyError.
    """

    def describe() -> list[int] | int:
        """The first rank of a group sends its ranks: all by all would be too much."""
        ranks = group_ranks(group)
        return list(ranks) if ranks[0] == dist.get_rank() else ranks[0]

    answers = run_and_gather(world, describe)
    groups = [answer for answer in answers if isinstance(answer, list)]
    firsts = [answer[0] if isinstance(answer, list) else answer for answer in answers]
    divided = sorted((rank, ranks[0]) for ranks in groups for rank in ranks)
    if divided != list(enumerate(firsts)):
        raise StrategyError(
            f"the process groups that the ranks passed overlap or differ: {groups}; pass on every "
            "rank the one group that contains it"
        )
    made = (new_group_of(groups, backend="gloo", timeout_s=timeout_s) for _ in range(num_groups))
    return tuple(one for one in made if one is not None)


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

    Raises a PeerTimeoutError if a rank has not come to make it, a PeerLostError if one broke off.
    """
    if not is_distributed():
        return None
    me = dist.get_rank()
    number, mine = next((n, sorted(ranks)) for n, ranks in enumerate(groups) if me in ranks)
    limit = timedelta(seconds=timeout_s)
    began = time.monotonic()
    c10d: Any = dist.distributed_c10d
    name = f"{c10d._process_group_name(mine, False)}.{number}"  # noqa: FBT003, SLF001 - see above
    store, place = c10d._get_default_store(), mine.index(me)  # noqa: SLF001
    try:
        made, _ = c10d._new_process_group_helper(  # noqa: SLF001
            len(mine), place, mine, dist.Backend(backend), store, name, timeout=limit
        )
    except RuntimeError as error:
        if not is_from_peer(error):
            raise
        what = f"making of a {backend} group of {len(mine)} ranks: {error}"
        if time.monotonic() - began >= limit.total_seconds():
            raise PeerTimeoutError(None, f"a peer did not come in time: {what}") from error
        if isinstance(error, dist.DistError) or "onnect" in str(error):
            raise PeerLostError(None, f"lost contact with a peer: {what}") from error
        raise StrategyError(what) from error
    c10d._world.pg_group_ranks[made] = {rank: n for n, rank in enumerate(mine)}  # noqa: SLF001
    group: ProcessGroup = made
    return group
