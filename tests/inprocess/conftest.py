"""The agents of a test, and a job's store."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode
from dist_ckpt_strategies.inprocess.store_rendezvous import RestartState
from tests.inprocess.agents import Agents
from tests.support.ports import HOST


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path)
    yield found
    for agent in found.started:
        with agent:  # closes its pipes
            agent.kill()
    found.require_ended()


@pytest.fixture
def store_port() -> Iterator[int]:
    """Of a store; on leaving, threads that still wait there are let go."""
    host = host_store()
    yield host.port
    state = RestartState(JobStore(HOST, host.port))
    state.end(Fault(None, state.current(), FaultMode.DEATH, "the test is over"))
    time.sleep(0.05)
