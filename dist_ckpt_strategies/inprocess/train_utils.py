"""What a training script calls around its wrapped block: wait_rank(), HPAgentK8sAPIFactory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from importlib import import_module
from typing import cast

from dist_ckpt_strategies.config import update_environment
from dist_ckpt_strategies.errors import MissingDependencyError, StrategyError
from dist_ckpt_strategies.inprocess.agent import AgentClient, AgentCoordinator
from dist_ckpt_strategies.inprocess.coordinator import Coordinator, environment_of
from dist_ckpt_strategies.inprocess.launched import coordinator_from_environment

__all__ = ["HPAgentK8sAPIFactory", "wait_rank"]

_CALLS = ("init", "wait_rank_info", "barrier", "past_barrier", "report_fault", "wait_fault")


def wait_rank(*, hp_api_factory: Callable[[], Coordinator] | None = None) -> None:
    """Set RANK, WORLD_SIZE and the other variables of this process's place; a spare waits for it.

    Call it after the imports and before anything distributed. In processes that the script starts
    with multiprocessing it does nothing.

    Args:
        hp_api_factory: that HPWrapper is given too, where an agent says the place; None: the
            launcher does.

    Raises:
        StrategyError: nothing here coordinates the job; see coordinator_from_environment.
        PeerLostError: the launcher's store is gone.
    """
    if multiprocessing.current_process().name != "MainProcess":
        return
    coordinator = (hp_api_factory or coordinator_from_environment)()
    try:
        update_environment(environment_of(coordinator.wait_rank()))
    finally:
        coordinator.close()


class HPAgentK8sAPIFactory:
    """Makes coordinators over the agent of a cluster; what HPWrapper takes as ``hp_api_factory``.

    Args:
        client: of the agent, with the six calls of AgentClient; None: that of the package
            hyperpod-elastic-agent.
    """

    def __init__(self, client: AgentClient | None = None) -> None:
        self._client = client
        self._has_begun = False

    def __call__(self) -> Coordinator:
        """A coordinator over the client.

        Raises:
            MissingDependencyError: no client was given, and the agent's package is not installed.
            StrategyError: the client lacks some of the six calls.
            PeerLostError: the agent does not answer.
        """
        client = self._installed() if self._client is None else self._client
        missing = [name for name in _CALLS if not callable(getattr(client, name, None))]
        if missing:
            raise StrategyError(
                f"{type(client).__name__}: expected the calls of docs/recovery_agent.md, it lacks "
                f"{', '.join(missing)}; give HPAgentK8sAPIFactory a client that translates"
            )
        found = AgentCoordinator(client, begins=not self._has_begun)
        self._client, self._has_begun = client, True
        return found

    @staticmethod
    def _installed() -> AgentClient:
        try:
            ipc = import_module("hyperpod_elastic_agent.ipc")
        except ImportError as error:
            raise MissingDependencyError(
                "HPAgentK8sAPIFactory without a client needs the agent's package: install "
                "hyperpod-elastic-agent, or give it a client (docs/recovery_agent.md)"
            ) from error
        return cast("AgentClient", ipc.InProcessRestartSocketClient())
