"""The rendezvous client over an agent: four ranks, and an agent with the calls of the page."""

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.job_store import JobStore
from dist_ckpt_strategies.errors import (
    MissingDependencyError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.inprocess.rendezvous import FaultMode, RankInfo, environment_of
from dist_ckpt_strategies.inprocess.store_rendezvous import StoreRendezvous
from dist_ckpt_strategies.inprocess.train_utils import HPAgentK8sAPIFactory, wait_rank
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper, HPWrapper
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


class Client:
    """The six calls of docs/design/recovery.md, over a job's store."""

    def __init__(self, store_port: int, rank: int = 0, size: int = 1, master_port: int = 0) -> None:
        variables = (("JOB", "7"), ("MASTER_ADDR", HOST), ("MASTER_PORT", str(master_port)))
        self._place = RankInfo(rank, rank, size, size, variables if master_port else variables[:1])
        self._port = store_port
        self._round = 0
        self.calls: list[str] = []

    def init(self) -> None:
        self.calls.append("init")
        self._state = StoreRendezvous(
            JobStore(HOST, self._port), f"worker{self._place.global_rank}", self._place
        )

    def wait_rank_info(self, timeout_s: float | None) -> dict[str, str]:
        return environment_of(self._place)

    def barrier(self, timeout_s: float) -> int:
        if self._round and self._state.finish(self._round, timeout_s):
            return self._round + 1
        self._round = self._state.barrier(timeout_s)
        return self._round

    def past_barrier(self, restart_round: int) -> None:
        assert restart_round == self._round
        self.calls.append("past_barrier")

    def report_fault(self, global_rank: int, restart_round: int, mode: str, why: str) -> None:
        self._state.report(global_rank, restart_round, FaultMode(mode), why)

    def wait_fault(self, restart_round: int, timeout_s: float) -> Mapping[str, Any] | None:
        fault = self._state.wait_fault(restart_round, timeout_s)
        if fault is None:
            return None
        return {"rank": fault.global_rank, "mode": str(fault.mode), "why": fault.why}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["exception", "death", "hang", "unhealthy"])
def test_every_documented_mode_restarts_the_block(mode: str, store_port: int) -> None:
    client = Client(store_port)
    modes: list[Any] = []

    @HPWrapper(hp_api_factory=HPAgentK8sAPIFactory(client))
    def block(call: HPCallWrapper) -> int:
        modes.append(call.last_fault and call.last_fault.mode)
        if call.num_attempts == 1:
            client.report_fault(0, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), mode, "ECC")
            time.sleep(LIMIT_S)
        return call.num_attempts

    assert block() == 2
    assert modes == [None, FaultMode(mode)] == [None, mode]


def test_waits_have_an_end_and_an_agent_that_is_gone_is_a_lost_peer(store_port: int) -> None:
    class Gone(Client):
        def report_fault(self, *_: Any) -> None:
            raise ConnectionResetError("closed")

    rank = HPAgentK8sAPIFactory(Gone(store_port, size=SIZE))()
    with pytest.raises(PeerTimeoutError, match="barrier"):
        rank.barrier(0.05)
    assert rank.wait_fault(1, 0.01) is None
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


def test_a_place_that_makes_no_sense_is_refused(store_port: int) -> None:
    class Odd(Client):
        def wait_rank_info(self, timeout_s: float | None) -> dict[str, str]:
            return {**super().wait_rank_info(timeout_s), "RANK": "first"}

    me = HPAgentK8sAPIFactory(Odd(store_port))()

    with pytest.raises(PeerError, match="RANK='first'"):
        me.wait_rank(LIMIT_S)


def test_the_script_of_the_page_runs_with_a_client(store_port: int) -> None:
    (script,) = python_blocks(ROOT / "docs" / "design" / "recovery.md")
    client = Client(store_port)

    exec(script, {"client": client})  # noqa: S102 - our own page

    assert client.calls == ["init", "past_barrier"]
    assert os.environ["RANK"] == "0"


NUM_FAULTS = 4


def train(rank: int, store_port: int, master_port: int) -> Any:
    """Body of a rank that knows nothing but its agent; one after the other raises."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[name]
    client = Client(store_port, rank, SIZE, master_port)
    factory = HPAgentK8sAPIFactory(client)
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

    return block(), client.calls.count("init")


@pytest.mark.multiprocess
def test_a_block_is_run_again_under_an_agent(store_port: int) -> None:
    ports = store_port, free_port()
    found = run_processes(SIZE, train, *ports, makes_group=False, timeout_s=300)

    assert found == [((NUM_FAULTS + 2, float(SIZE), SIZE), 1)] * SIZE, found
