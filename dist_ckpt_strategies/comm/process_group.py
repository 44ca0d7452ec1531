"""What torch.distributed says of this process and of the groups that it is in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt_strategies.errors import PeerLostError, StrategyError, text_of

ProcessGroup = dist.ProcessGroup
"""A group of ranks, as torch.distributed makes them."""


def is_distributed() -> bool:
    """Whether torch.distributed is initialised; this process is alone where it is not."""
    return dist.is_available() and dist.is_initialized()


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
    """Raise unless this rank is in the group; torch gives ranks outside a number in its place.

    Raises:
        StrategyError: it is not, or the group is gone.
    """
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group == outside:
        raise StrategyError(
            f"rank {dist.get_rank()} is not in the process group that it was given; every rank has "
            "to give the group that it is in"
        )
    if group is not None and not is_alive(group):
        raise StrategyError(
            "the process group that was given has been destroyed; a strategy that is to be used "
            "after torch.distributed was taken down and set up again needs a group made since"
        )


def message_device(group: ProcessGroup | None) -> torch.device:
    """Where messages have to be to travel over the group: the host, unless it has NCCL alone."""
    if "nccl" in dist.get_backend(group) and "gloo" not in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def payload_device(group: ProcessGroup | None) -> torch.device:
    """Where tensors are that the group's own backend sends without a detour: the GPU with NCCL."""
    if is_distributed() and "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def uses_nccl(group: ProcessGroup) -> bool:
    """Whether NCCL carries what tensors on a GPU hold; False for a group that is not there yet."""
    configs = dist.distributed_c10d._world.pg_backend_config  # noqa: SLF001 - torch's own raises
    return "nccl" in str(configs.get(group))


def abort_nccl(groups: Iterable[ProcessGroup]) -> None:
    """Abort the NCCL communicators of groups, all at once: one by one they wait for each other."""
    backends: list[Any] = [
        group._get_backend(torch.device("cuda"))  # noqa: SLF001 - no public way
        for group in groups
        if uses_nccl(group)
    ]
    together = [backend for backend in backends if hasattr(backend, "_group_start")][:1]
    for backend in together:
        backend._group_start()  # noqa: SLF001 - as torch's own abort of all groups does
    for backend in backends:
        backend.abort()
    for backend in together:
        backend._group_end()  # noqa: SLF001 - see above


def is_of_communication(error: BaseException | None) -> bool:
    """Whether an error of torch's means that ranks lost contact, or waited too long.

    Gloo's are plain RuntimeErrors.
    """
    if isinstance(error, dist.DistError | ConnectionError | PeerLostError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in text_of(error)
