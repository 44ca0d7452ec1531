"""Calls of a training script around its wrapped block: wait_rank(), HPAgentK8sAPIFactory."""

import multiprocessing
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from dist_ckpt_strategies.comm.job_store import host_store
from dist_ckpt_strategies.config import update_environment
from dist_ckpt_strategies.errors import (
    MissingDependencyError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.inprocess.launch import claim_store_address
from dist_ckpt_strategies.inprocess.rendezvous import (
    Fault,
    FaultMode,
    RankInfo,
    RendezvousClient,
    environment_of,
    place_of,
)
from dist_ckpt_strategies.inprocess.store_rendezvous import rendezvous_from_environment

__all__ = ["HPAgentK8sAPIFactory", "wait_rank"]

_CALLS = ("init", "wait_rank_info", "barrier", "past_barrier", "report_fault", "wait_fault")


def wait_rank(*, hp_api_factory: Callable[[], RendezvousClient] | None = None) -> None:
    """Set RANK, WORLD_SIZE and the other variables of this process's place; a spare waits for it.

    Call it after the imports and before anything distributed. In processes that the script starts
    with multiprocessing it does nothing.

    Args:
        hp_api_factory: the one of HPWrapper, if an agent assigns the place; None: the launcher
            does.

    Raises:
        StrategyError: there is no rendezvous; see rendezvous_from_environment.
        PeerLostError: the launcher's store is gone.
    """
    if multiprocessing.current_process().name != "MainProcess":
        return
    client = (hp_api_factory or rendezvous_from_environment)()
    try:
        update_environment(environment_of(client.wait_rank()))
    finally:
        client.close()


class HPAgentK8sAPIFactory:
    """Creates rendezvous clients over the agent of a cluster, as ``hp_api_factory`` of HPWrapper.

    Args:
        client: client of the agent, any object with the six calls of docs/design/recovery.md; None:
            that of the package hyperpod-elastic-agent.
    """

    def __init__(self, client: Any = None) -> None:
        self._client = client
        self._has_begun = False

    def __call__(self) -> RendezvousClient:
        """A rendezvous client over that of the agent.

        Raises:
            MissingDependencyError: no client was given, and the agent's package is not installed.
            StrategyError: the client lacks some of the six calls.
            PeerLostError: the agent does not answer.
        """
        if self._client is None:
            try:
                ipc = import_module("hyperpod_elastic_agent.ipc")
            except ImportError as error:
                raise MissingDependencyError(
                    "HPAgentK8sAPIFactory without a client needs the agent's package: install "
                    "hyperpod-elastic-agent, or give it a client (docs/design/recovery.md)"
                ) from error
            self._client = ipc.InProcessRestartSocketClient()
        missing = [name for name in _CALLS if not callable(getattr(self._client, name, None))]
        if missing:
            raise StrategyError(
                f"{type(self._client).__name__}: expected the calls of docs/design/recovery.md, it "
                f"lacks {', '.join(missing)}; give HPAgentK8sAPIFactory a client that translates"
            )
        found = AgentRendezvous(self._client)
        if not self._has_begun:
            found.call("init")
        self._has_begun = True
        return found


class AgentRendezvous:
    """A RendezvousClient over a client of HPAgentK8sAPIFactory's; sets the agent's variables."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._place: RankInfo | None = None
        self._joined_ahead: int | None = None
        self._hosted: Any = None

    def wait_rank(self, timeout_s: float | None = None) -> RankInfo:
        """See RendezvousClient."""
        if self._place is None:
            found = self.call("wait_rank_info", timeout_s)
            try:
                self._place = place_of(found)
            except ValueError as error:
                raise PeerError(None, f"the agent: wait_rank_info: {error}") from error
            update_environment(environment_of(self._place))
        return self._place

    def barrier(self, timeout_s: float) -> int:
        """See RendezvousClient."""
        deadline = time.monotonic() + timeout_s
        place = self.wait_rank(timeout_s)
        # Rank 0 hosts the store of the process groups, unless the agent does. If it were hosted
        # by init_process_group and rank 0 failed before that, the others would try to connect for
        # half a minute, which nothing interrupts.
        address = claim_store_address()
        if address is not None and place.global_rank == 0 and self._hosted is None:
            self._hosted = host_store(*address)
        while True:
            restart_round = self._next_round(max(0.0, deadline - time.monotonic()))
            if self.wait_fault(restart_round, 0.0) is None:
                self.call("past_barrier", restart_round)
                return restart_round

    def wait_fault(self, restart_round: int, timeout_s: float) -> Fault | None:
        """See RendezvousClient."""
        try:
            found = self.call("wait_fault", restart_round, timeout_s)
        except PeerTimeoutError:
            return None
        if found is None:
            return None
        try:
            rank = found.get("rank")
            mode, why = FaultMode(found["mode"]), str(found.get("why", ""))
            return Fault(None if rank is None else int(rank), restart_round, mode, why)
        except (KeyError, ValueError, TypeError) as error:
            raise PeerError(None, f"the agent: wait_fault: no fault of ours: {found!r}") from error

    def report(self, global_rank: int, restart_round: int, mode: FaultMode, why: str) -> None:
        """See RendezvousClient."""
        self.call("report_fault", global_rank, restart_round, mode.value, why)

    def finish(self, restart_round: int, timeout_s: float) -> bool:
        """See RendezvousClient.

        Over an agent this is the next barrier: a rank that has failed comes to it to run again, a
        rank that has returned to learn whether any failed. So False comes when all are there, and
        the ``barrier`` after it returns the round that they have joined.
        """
        ahead = self._next_round(timeout_s)
        if self.wait_fault(restart_round, 0.0) is None:
            return True
        self._joined_ahead = ahead
        return False

    def close(self) -> None:
        """See RendezvousClient. Nothing: the client stays open."""

    def call(self, name: str, *args: Any) -> Any:
        """Call the client; its errors become this package's."""
        try:
            return getattr(self._client, name)(*args)
        except TimeoutError as error:
            raise PeerTimeoutError(None, f"the agent: {name}: {error}") from error
        except (ConnectionError, EOFError) as error:
            raise PeerLostError(None, f"the agent is gone: {name}: {error}") from error

    def _next_round(self, timeout_s: float) -> int:
        ahead, self._joined_ahead = self._joined_ahead, None
        return int(self.call("barrier", timeout_s)) if ahead is None else ahead
