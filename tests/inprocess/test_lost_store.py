"""Ranks without a common launcher: a coordinator's store that falls silent, or is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dist_ckpt_strategies.comm.job_store import JobStore
from dist_ckpt_strategies.errors import PeerLostError
from dist_ckpt_strategies.inprocess.coordinator import Coordinator, FaultMode, RankInfo
from dist_ckpt_strategies.inprocess.store_coordinator import StoreCoordinator
from dist_ckpt_strategies.inprocess.wrap import HPWrapper
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

SIZE = 2
SILENCE_S = 3.0
SLACK_S = 10.0
"""For a busy machine."""

_HOST_SCRIPT = """
import time
from dist_ckpt_strategies.comm.job_store import host_store
host = host_store()
print(host.port, flush=True)
time.sleep(300)
"""


@pytest.fixture
def store() -> Iterator[tuple[int, int]]:
    """Process and port of a store."""
    host = subprocess.Popen([sys.executable, "-c", _HOST_SCRIPT], stdout=subprocess.PIPE)
    assert host.stdout is not None
    yield host.pid, int(host.stdout.readline())
    host.kill()
    host.communicate()


def coordinator(rank: int, port: int) -> StoreCoordinator:
    store = JobStore("127.0.0.1", port, timeout_s=SILENCE_S)
    return StoreCoordinator(store, f"worker{rank}", RankInfo(rank, rank, SIZE, SIZE))


def waits_for_a_fault(me: Coordinator, epoch: int) -> None:
    me.wait_fault(epoch, 100.0)


def waits_for_the_others(me: Coordinator, epoch: int) -> None:
    me.finish(epoch, 100.0)


def reports(me: Coordinator, epoch: int) -> None:
    time.sleep(0.5)
    me.report(0, epoch, FaultMode.EXCEPTION, "x")


WAITS: list[Callable[[Coordinator, int], None]] = [
    waits_for_a_fault,
    waits_for_the_others,
    reports,
]


def loses_its_store(rank: int, store: tuple[int, int], number: int) -> Any:
    """For each way to ask: how long it took to raise, and what."""
    pid, port = store
    ranks = [coordinator(rank, port)]
    epoch = ranks[0].barrier(60.0)
    found: list[tuple[float, str]] = []

    def ask(how: Callable[[Coordinator, int], None]) -> None:
        begun = time.monotonic()
        try:
            how(ranks[0], epoch)
        except PeerLostError as error:
            found.append((time.monotonic() - begun, str(error)))

    # No rank may return from the block before all do.
    waits = WAITS if rank == 0 else WAITS[:1]
    threads = [threading.Thread(target=ask, args=(how,), daemon=True) for how in waits]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    if rank == 0:
        os.kill(pid, number)
    for thread in threads:
        thread.join(SILENCE_S + 2 * SLACK_S)
    assert len(found) == len(waits), found
    return port, found


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_silent_or_gone_is_named_within_the_limit(
    store: tuple[int, int], number: int
) -> None:
    for port, found in run_processes(SIZE, loses_its_store, store, number, makes_group=False):
        for seconds, text in found:
            assert seconds < SILENCE_S + SLACK_S
            assert f"127.0.0.1:{port}" in text


def sleeps_in_its_block(rank: int, store: tuple[int, int]) -> float:
    pid, port = store
    stopped: list[float] = []

    @HPWrapper(hp_api_factory=lambda: coordinator(rank, port), barrier_timeout_s=60)
    def block() -> None:
        time.sleep(0.5)  # until both are here
        stopped.append(time.monotonic())
        if rank == 0:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(100)

    with pytest.raises(PeerLostError, match=f"127.0.0.1:{port}"):
        block()
    return time.monotonic() - stopped[0]


def test_a_block_is_left_when_the_store_falls_silent(store: tuple[int, int]) -> None:
    for seconds in run_processes(SIZE, sleeps_in_its_block, store, makes_group=False):
        assert seconds < SILENCE_S + SLACK_S
