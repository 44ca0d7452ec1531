"""A node that ends its job while the job's store is lost: it is told so, and leaves."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest

from dist_ckpt_strategies.comm.job_store import host_store
from dist_ckpt_strategies.errors import PeerLostError
from dist_ckpt_strategies.inprocess.job import FENCED, GAVE_UP, Ended, Nodes, Placed
from dist_ckpt_strategies.inprocess.places import Places
from tests.support.ranks import Processes

pytestmark = pytest.mark.multiprocess

HOST = "127.0.0.1"
LIMIT_S = 60.0
TTL_S = 4.0
SLACK_S = 20.0
"""For a busy machine."""


def host_a_store(_rank: int, pipe: Connection) -> None:
    host = host_store()
    pipe.send(host.port)
    time.sleep(300)


@pytest.fixture
def store() -> Iterator[tuple[int, int]]:
    """Process and port of a store."""
    processes = Processes()
    processes.start(0, host_a_store)
    yield processes.pid(0), processes.receive([0], LIMIT_S)[0]
    processes.end(0)


def next_of(kind: type, news: SimpleQueue[Any]) -> Any:
    """What comes next of that kind; notes are passed over."""
    return next(one for one in iter(lambda: news.get(timeout=LIMIT_S), None) if type(one) is kind)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_job_whose_store_is_lost_cannot_be_closed_and_its_workers_are_fenced(
    store: tuple[int, int], number: int
) -> None:
    pid, port = store
    news, told = SimpleQueue[Any](), list[str]()
    places = Places(
        Nodes(num_nodes=1, num_ranks=1, ttl_s=TTL_S, endpoint=(HOST, port)), news.put, print
    )
    places.start(told.append)
    next_of(Placed, news)

    os.kill(pid, number)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=f"{HOST}:{port} does not answer"):
        places.close(GAVE_UP, "workers have died too often")
    ended = next_of(Ended, news)
    places.leave([], 0.0, is_fenced=True, is_done=False)

    assert time.monotonic() - began < TTL_S + SLACK_S
    assert (ended.code, f"{HOST}:{port}" in ended.why) == (FENCED, True)
    assert told[-1] == "fence"
