"""The rendezvous client over an agent: four ranks, an agent that speaks six calls over a socket."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.errors import (
    MissingDependencyError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.inprocess.rendezvous import FaultMode
from dist_ckpt_strategies.inprocess.train_utils import HPAgentK8sAPIFactory, wait_rank
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper, HPWrapper
from tests.support.agent import Agent, AgentSocketClient
from tests.support.pages import ROOT, python_blocks
from tests.support.ports import HOST, free_port
from tests.support.ranks import run_processes
from tests.support.restarts import join_group

SIZE = 4
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an agent says of a place is set as variables."""
    monkeypatch.setattr(os, "environ", dict(os.environ))


@pytest.fixture
def agent() -> Iterator[Agent]:
    found = Agent(SIZE)
    yield found
    found.close()


@pytest.mark.parametrize("mode", ["exception", "death", "hang", "unhealthy"])
def test_every_documented_mode_restarts_the_block(mode: str) -> None:
    agent = Agent(1)
    modes: list[Any] = []

    @HPWrapper(hp_api_factory=HPAgentK8sAPIFactory(AgentSocketClient(agent.port, 0)))
    def block(call: HPCallWrapper) -> int:
        modes.append(call.last_fault and call.last_fault.mode)
        if call.num_attempts == 1:
            restart_round = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            agent.answer(0, "report_fault", (0, restart_round, mode, "ECC"))
            time.sleep(LIMIT_S)
        return call.num_attempts

    try:
        assert block() == 2
    finally:
        agent.close()
    assert modes == [None, FaultMode(mode)] == [None, mode]


def test_waits_have_an_end_and_an_agent_that_is_gone_is_a_lost_peer(agent: Agent) -> None:
    rank = HPAgentK8sAPIFactory(AgentSocketClient(agent.port, 0))()
    with pytest.raises(PeerTimeoutError, match="barrier"):
        rank.barrier(0.05)
    assert rank.wait_fault(1, 0.01) is None
    agent.close()

    with pytest.raises(PeerLostError, match="agent is gone"):
        rank.report(0, 1, FaultMode.EXCEPTION, "boom")


def test_a_client_without_the_calls_is_refused_by_name() -> None:
    class Half:
        def init(self) -> None:
            """Does nothing."""

    with pytest.raises(StrategyError, match=r"Half.*lacks wait_rank_info, barrier"):
        HPAgentK8sAPIFactory(Half())()


def test_without_a_client_the_agents_package_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hyperpod_elastic_agent", None)

    with pytest.raises(MissingDependencyError, match="hyperpod-elastic-agent"):
        HPAgentK8sAPIFactory()()


def test_a_place_that_makes_no_sense_is_refused(agent: Agent) -> None:
    class Odd(AgentSocketClient):
        def wait_rank_info(self, timeout_s: float | None) -> dict[str, str]:
            return {**self.ask("wait_rank_info", timeout_s), "RANK": "first"}

    me = HPAgentK8sAPIFactory(Odd(agent.port, 0))()

    with pytest.raises(PeerError, match="RANK='first'"):
        me.wait_rank(LIMIT_S)


def test_the_script_of_the_page_runs_with_a_client() -> None:
    (script,) = python_blocks(ROOT / "docs" / "recovery_agent.md")
    agent = Agent(1)
    try:
        exec(script, {"client": AgentSocketClient(agent.port, 0)})  # noqa: S102 - our own page
    finally:
        agent.close()

    assert [agent.calls.count(name) for name in ("init", "past_barrier")] == [1, 1]
    assert os.environ["RANK"] == "0"


NUM_FAULTS = 4


def train(rank: int, port: int) -> Any:
    """Body of a rank that knows nothing but its agent; one after the other raises."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    factory = HPAgentK8sAPIFactory(AgentSocketClient(port, rank))
    wait_rank(hp_api_factory=factory)

    @HPWrapper(hp_api_factory=factory, abort_timeout=60, max_idle_attempts=None)
    def block(call: HPCallWrapper) -> Any:
        assert os.environ["JOB"] == "7"
        join_group()
        data = torch.ones(200_000)
        dist.all_reduce(data)
        if call.num_attempts <= NUM_FAULTS:
            if dist.get_rank() == call.num_attempts % SIZE:
                time.sleep(0.05)
                raise ValueError("on purpose")
            while True:
                dist.all_reduce(data)
        if call.num_attempts == NUM_FAULTS + 1 and rank == 0:
            time.sleep(0.3)
            raise ValueError("when the others have returned")
        return call.num_attempts, float(data[0]), dist.get_world_size()

    return block()


@pytest.mark.multiprocess
def test_a_block_is_run_again_under_an_agent() -> None:
    agent = Agent(SIZE, (HOST, free_port()))
    try:
        found = run_processes(SIZE, train, agent.port, makes_group=False, timeout_s=150)
    finally:
        agent.close()

    assert found == [(NUM_FAULTS + 2, float(SIZE), SIZE)] * SIZE, found
    assert agent.calls.count("init") == SIZE
