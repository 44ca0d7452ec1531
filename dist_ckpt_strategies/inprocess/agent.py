"""A Coordinator over an agent that somebody else runs: six calls of a client, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from dist_ckpt_strategies.comm.key_values import TcpHost
from dist_ckpt_strategies.config import claim_meeting_place, update_environment
from dist_ckpt_strategies.errors import PeerError, PeerLostError, PeerTimeoutError
from dist_ckpt_strategies.inprocess.coordinator import (
    Epoch,
    Fault,
    FaultMode,
    RankInfo,
    environment_of,
)

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


class AgentClient(Protocol):
    """What this package asks of the client of an agent; docs/recovery_agent.md has the contract.

    Calls come from several threads, two of them at the same time: ``wait_fault`` beside any other.
    Each raises TimeoutError when its time is over, and ConnectionError where the agent is gone.
    """

    def init(self) -> None:
        """Say that this process has started; the first call."""
        ...

    def wait_rank_info(self, timeout_s: float | None) -> Mapping[str, str]:
        """The variables of this process's place, RANK and its kin among them."""
        ...

    def barrier(self, timeout_s: float) -> int:
        """Join the forming epoch; its number, once all ranks have joined."""
        ...

    def past_barrier(self, epoch: int) -> None:
        """Say that this rank has left the barrier, and runs."""
        ...

    def report_fault(self, global_rank: int, epoch: int, mode: str, why: str) -> None:
        """End an epoch for all; without effect on one that has ended."""
        ...

    def wait_fault(self, epoch: int, timeout_s: float) -> Mapping[str, Any] | None:
        """What ended the epoch: rank (or None), mode, why; None where nothing has in time."""
        ...


class AgentCoordinator:
    """A Coordinator over the client of an agent; sets the variables that the agent gives.

    Args:
        client: see AgentClient.
        begins: whether ``init`` is called: it is the first coordinator over this client.
    """

    def __init__(self, client: AgentClient, *, begins: bool = True) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._place: RankInfo | None = None
        self._joined_ahead: int | None = None
        self._is_closed = False
        self._hosted: TcpHost | None = None
        if begins:
            with _translated("init"):
                client.init()

    def wait_rank(self, timeout_s: float | None = None) -> RankInfo:
        """See Coordinator."""
        self._require_open()
        with self._lock:
            if self._place is None:
                with _translated("wait_rank_info"):
                    self._place = _place_of(self._client.wait_rank_info(timeout_s))
                update_environment(environment_of(self._place))
            return self._place

    def barrier(self, timeout_s: float) -> Epoch:
        """See Coordinator."""
        self._require_open()
        deadline = time.monotonic() + timeout_s
        self._host_meeting(self.wait_rank(timeout_s))
        while True:
            epoch = self._next_epoch(max(0.0, deadline - time.monotonic()))
            if self._fault_by_now(epoch) is None:
                with _translated("past_barrier"):
                    self._client.past_barrier(epoch)
                return Epoch(epoch)

    def wait_fault(self, epoch: int, timeout_s: float) -> Fault | None:
        """See Coordinator."""
        self._require_open()
        return self._fault(epoch, timeout_s)

    def report(self, global_rank: int, epoch: int, mode: FaultMode, why: str) -> None:
        """See Coordinator."""
        self._require_open()
        with _translated("report_fault"):
            self._client.report_fault(global_rank, epoch, mode.value, why)

    def finish(self, epoch: int, timeout_s: float) -> bool:
        """See Coordinator.

        Over an agent the ranks meet in the next barrier: who has failed comes to it to run again,
        who has returned to learn whether anybody failed. So False comes when all are there, and
        the ``barrier`` after it returns the epoch that they have joined.
        """
        self._require_open()
        ahead = self._next_epoch(timeout_s)
        if self._fault_by_now(epoch) is None:
            return True
        self._joined_ahead = ahead
        return False

    def close(self) -> None:
        """See Coordinator. The client belongs to whoever made it."""
        self._is_closed = True

    def _host_meeting(self, place: RankInfo) -> None:
        """Rank 0 hosts the store of the process groups, unless the agent does.

        Not in the block, as ``init_process_group`` would have it: where rank 0 fails before the
        store is there, the others try to connect for half a minute, and nothing interrupts that.
        """
        address = claim_meeting_place()
        if address is not None and place.global_rank == 0 and self._hosted is None:
            self._hosted = TcpHost(*address)

    def _next_epoch(self, timeout_s: float) -> int:
        ahead, self._joined_ahead = self._joined_ahead, None
        if ahead is not None:
            return ahead
        with _translated("barrier"):
            return int(self._client.barrier(timeout_s))

    def _fault_by_now(self, epoch: int) -> Fault | None:
        with _translated("wait_fault"):
            return self._fault(epoch, 0.0)

    def _fault(self, epoch: int, timeout_s: float) -> Fault | None:
        try:
            with _translated("wait_fault"):
                found = self._client.wait_fault(epoch, timeout_s)
        except PeerTimeoutError:
            return None
        return None if found is None else _fault_of(found, epoch)

    def _require_open(self) -> None:
        if self._is_closed:
            raise PeerLostError(None, "this coordinator has been closed")


@contextmanager
def _translated(call: str) -> Iterator[None]:
    """Errors of the client become this package's."""
    try:
        yield
    except TimeoutError as error:
        raise PeerTimeoutError(None, f"the agent: {call}: {error}") from error
    except (ConnectionError, EOFError) as error:
        raise PeerLostError(None, f"the agent is gone: {call}: {error}") from error


def _place_of(found: Mapping[str, str]) -> RankInfo:
    missing = [name for name in _PLACE if not str(found.get(name, "")).isdecimal()]
    if missing:
        raise PeerError(
            None,
            f"the agent: wait_rank_info: expected numbers as {', '.join(_PLACE)}, found "
            f"{', '.join(f'{name}={found.get(name)!r}' for name in missing)}",
        )
    rank, local_rank, size, local_size = (int(found[name]) for name in _PLACE)
    rest = tuple(sorted((str(k), str(v)) for k, v in found.items() if k not in _PLACE))
    return RankInfo(rank, local_rank, size, local_size, rest)


def _fault_of(found: Mapping[str, Any], epoch: int) -> Fault:
    try:
        rank = found.get("rank")
        rank = None if rank is None else int(rank)
        return Fault(rank, epoch, FaultMode(found["mode"]), str(found.get("why", "")))
    except (KeyError, ValueError, TypeError) as error:
        raise PeerError(None, f"the agent: wait_fault: no fault of ours: {found!r}") from error
