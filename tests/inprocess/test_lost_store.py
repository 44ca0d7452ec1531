"""Ranks without a common launcher: a rendezvous store that falls silent, or is gone."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.errors import PeerLostError
from dist_ckpt_strategies.inprocess.rendezvous import RankInfo
from dist_ckpt_strategies.inprocess.store_rendezvous import StoreRendezvous
from dist_ckpt_strategies.inprocess.wrap import HPWrapper
from tests.support.ranks import forkserver, run_processes

pytestmark = pytest.mark.multiprocess

SIZE = 3
SILENCE_S = 3.0
SLACK_S = 10.0
"""For a busy machine."""


def host_a_store(pipe: Connection) -> None:
    host = host_store()
    pipe.send(host.port)
    time.sleep(300)


@pytest.fixture
def store() -> Iterator[tuple[int | None, int]]:
    """Process and port of a store."""
    ours, theirs = forkserver().Pipe()
    host = forkserver().Process(target=host_a_store, args=(theirs,), daemon=True)
    host.start()
    yield host.pid, ours.recv()
    host.kill()
    host.join()


def client(rank: int, port: int) -> StoreRendezvous:
    store = JobStore("127.0.0.1", port, timeout_s=SILENCE_S)
    return StoreRendezvous(store, f"worker{rank}", RankInfo(rank, rank, SIZE, SIZE))


def loses_its_store(rank: int, store: tuple[int, int], number: int) -> float:
    """Body of a rank: the first is in its block, one has returned, and one raises; seconds."""
    pid, port = store
    stopped: list[float] = []

    @HPWrapper(hp_api_factory=lambda: client(rank, port), barrier_timeout_s=60)
    def block() -> None:
        time.sleep(0.5)  # until all are here
        stopped.append(time.monotonic())
        if rank == 0:
            time.sleep(0.5)  # until the second waits for the others
            stopped.append(time.monotonic())
            os.kill(pid, number)
            time.sleep(100)
        if rank == 2:
            time.sleep(1.0)
            raise ValueError("on purpose")

    with pytest.raises(PeerLostError, match=f"127.0.0.1:{port}"):
        block()
    return time.monotonic() - stopped[-1]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_silent_or_gone_is_named_by_every_rank_within_the_limit(
    store: tuple[int, int], number: int
) -> None:
    for seconds in run_processes(SIZE, loses_its_store, store, number, makes_group=False):
        assert seconds < SILENCE_S + SLACK_S
