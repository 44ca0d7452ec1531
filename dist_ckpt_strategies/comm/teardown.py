"""Ends all communication of this process, and takes its process groups down."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.group_disposal import DEFAULT_GROUP_DISPOSAL, GroupDisposal
from dist_ckpt_strategies.comm.interruptible_gloo import (
    DEFAULT_WAIT_CONTROL,
    InterruptibleGloo,
    WaitControl,
)
from dist_ckpt_strategies.comm.sockets import SocketCensus, SocketFilter, leave_none_alone

logger = logging.getLogger(__name__)

_PAUSE_S = 0.005
GRACE_S = 2.0
"""Longest time for sockets to close before waits are released all the same."""


@dataclass(frozen=True, slots=True)
class EndReport:
    """How communication ended.

    Attributes:
        num_connections: cut, each counted once per round.
        duration_s: until the waits were released.
        is_quiet: whether no connection was left by then.
    """

    num_connections: int
    duration_s: float
    is_quiet: bool


class Communication:
    """All that this process opens to talk to its peers during one attempt.

    Args:
        protected_inodes: the inodes of sockets that must be left alone, asked for each time.
        control: of the waits.
        disposal: of the groups.
    """

    def __init__(
        self,
        protected_inodes: Callable[[], frozenset[int]] = frozenset,
        control: WaitControl = DEFAULT_WAIT_CONTROL,
        disposal: GroupDisposal = DEFAULT_GROUP_DISPOSAL,
    ) -> None:
        self._protected_inodes = protected_inodes
        self._control = control
        self._disposal = disposal
        self._lock = threading.Lock()
        self._is_protected: SocketFilter = leave_none_alone
        self._ended = threading.Event()
        self._census = SocketCensus.take()
        control.renew()

    def begin(self) -> None:
        """Leave alone what is open by now, too: nothing of the attempt has been opened yet."""
        self._census = SocketCensus.take()

    @property
    def is_ended(self) -> bool:
        """Whether ``end`` has been called, and has come to its end."""
        return self._ended.is_set()

    def end(self, is_protected: SocketFilter = leave_none_alone) -> EndReport:
        """Cut all connections opened since this object was made; then let no one wait any more.

        In this order: while a connection is open, bytes may still arrive in a tensor whose owner
        has been released.
        """
        begun = time.monotonic()
        self._is_protected = is_protected
        abort_nccl_groups()
        num_cut = 0
        while num_open := self.cut():
            num_cut += num_open
            if time.monotonic() - begun > GRACE_S:
                logger.warning("%d connections are still open after %g s", num_open, GRACE_S)
                break
            time.sleep(_PAUSE_S)
        self._control.release()
        self._ended.set()
        return EndReport(num_cut, time.monotonic() - begun, num_open == 0)

    def cut(self) -> int:
        """Cut connections opened since; how many were open. More may come: call it again."""
        with self._lock:
            return self._census.shut_down_later_ones(self._is_protected, self._protected_inodes())

    def take_down(self) -> int:
        """Destroy all process groups of this process; how many there were.

        For the thread that made them, once it uses none of them any more.
        """
        self._control.release()
        groups = _known_groups()
        num_groups = len(groups)
        if dist.is_available():
            _destroy_all()
        for group in self._control.groups():
            inner, pending = group.take_down()
            if inner is not None:
                self._disposal.take(inner, pending)
            del inner
        others = [group for group in groups if not isinstance(group, InterruptibleGloo)]
        groups.clear()
        while others:
            drop_in_a_thread(others.pop())
        return num_groups


def abort_nccl_groups() -> int:
    """End what NCCL has under way, in every group that has it; how many there were."""
    aborted = 0
    for group in _known_groups():
        if "nccl" in dist.get_backend_config(group):
            group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - no public way
            aborted += 1
    return aborted


def drop_in_a_thread(group: Any) -> None:
    """Drop a reference to a group where its destructor may block: on a thread of its own."""
    held = [group]
    del group
    threading.Thread(target=held.clear, name="dist_ckpt-group-disposal-of-one", daemon=True).start()


def _destroy_all() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # Torch names groups by a count that it resets when it destroys the world. An initialisation
    # that was interrupted counts too, and leaves nothing to destroy: this rank's next world would
    # look for the others under a name that they do not have.
    dist.distributed_c10d._world.group_count = 0  # noqa: SLF001 - no public way


def _known_groups() -> list[Any]:
    if not dist.is_available():
        return []
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - no public way
