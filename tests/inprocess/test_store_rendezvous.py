"""Rounds over a store: no barrier opens too early, no fault is lost, no rank is held up."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.errors import PeerLostError, PeerTimeoutError
from dist_ckpt_strategies.inprocess.job import FENCED, GAVE_UP, Ended, Nodes, Placed
from dist_ckpt_strategies.inprocess.places import Places
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode, RankInfo
from dist_ckpt_strategies.inprocess.store_rendezvous import RestartState, StoreRendezvous
from dist_ckpt_strategies.inprocess.wrap import HPWrapper
from tests.support.entries import outcome
from tests.support.ports import HOST
from tests.support.processes import is_halted, until
from tests.support.ranks import Processes, run_processes
from tests.support.thread_ranks import run_ranks

LIMIT_S = 60.0


class StoppedError(Exception):
    """The rank does nothing any more, as if it had been killed."""


class StoppingStore:
    """Lets through a number of writes of one rank, and none after."""

    def __init__(self, store: JobStore, num_writes: int) -> None:
        self._inner = store
        self._left = num_writes

    def __getattr__(self, name: str) -> Any:
        if name in {"set", "compare_set", "add"}:
            if self._left <= 0:
                raise StoppedError
            self._left -= 1
        return getattr(self._inner, name)


def stopping(store: JobStore, num_writes: int) -> RestartState:
    found: Any = StoppingStore(store, num_writes)
    return RestartState(found)


def place(rank: int, size: int) -> RankInfo:
    return RankInfo(rank, rank, size, size)


def in_threads(*bodies: Callable[[], object]) -> list[Any]:
    """What each returned, or the Failure."""
    return run_ranks(len(bodies), lambda comm: outcome(bodies[comm.rank]))


Connect = Callable[[], JobStore]


@pytest.fixture
def connect(store_port: int) -> Connect:
    return lambda: JobStore(HOST, store_port, timeout_s=LIMIT_S)


def world(connect: Connect, size: int) -> list[StoreRendezvous]:
    return [StoreRendezvous(connect(), f"w{r}", place(r, size)) for r in range(size)]


def all_join(ranks: list[StoreRendezvous]) -> list[Any]:
    return in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))


def test_a_wait_for_a_key_is_not_ended_by_requests_about_it(connect: Connect) -> None:
    waiting, asking = connect(), connect()

    def ask() -> object:
        time.sleep(0.05)
        assert asking.compare_set("a", "1", "2") == "1"  # without such a key torch wakes all
        return asking.get("a")

    assert in_threads(lambda: waiting.wait("a", 0.5), ask) == [False, None]

    def write() -> str:
        time.sleep(0.05)
        return asking.compare_set("a", "", "3")

    assert in_threads(lambda: waiting.wait("a", LIMIT_S), write) == [True, "3"]


def test_waits_that_time_out_name_the_ranks_that_are_missing(connect: Connect) -> None:
    ranks = world(connect, 4)
    with pytest.raises(PeerTimeoutError, match="missing: 0, 1, 3"):
        ranks[2].barrier(0.05)
    assert all_join(ranks) == [1] * 4  # one of them for the second time
    for _ in range(4):
        with pytest.raises(PeerTimeoutError, match="missing: 1, 2, 3"):
            ranks[0].finish(1, 0.05)
    with pytest.raises(PeerTimeoutError, match="worker spare"):
        StoreRendezvous(connect(), "spare").wait_rank(0.02)


def test_a_few_of_the_missing_ranks_of_a_large_world_are_named(connect: Connect) -> None:
    with pytest.raises(PeerTimeoutError, match=r"missing: 1, 2, .*, 64 and 5 more"):
        StoreRendezvous(connect(), "w0", place(0, 70)).barrier(0.02)


@pytest.mark.parametrize("num_writes", [None, *range(2, 6)])
def test_a_fault_while_a_barrier_forms_moves_the_ranks_that_wait_however_much_of_it_is_written(
    connect: Connect, num_writes: int | None
) -> None:
    ranks = world(connect, 2)
    state = RestartState(connect())

    def break_off() -> int:
        until(lambda: state.without("reached", 1, range(2)) == [1])
        reporter = state if num_writes is None else stopping(connect(), num_writes)
        with suppress(StoppedError):
            reporter.end(Fault(1, 1, FaultMode.DEATH, "killed"))
        until(lambda: state.current() != 1)  # the ranks that wait do the rest
        return ranks[1].barrier(LIMIT_S)

    assert in_threads(lambda: ranks[0].barrier(LIMIT_S), break_off) == [2] * 2


@pytest.mark.parametrize("num_writes", [2, 3], ids=["the fault", "the fault and the barrier"])
def test_the_last_to_join_does_not_open_a_barrier_that_a_fault_has_broken(
    connect: Connect, num_writes: int
) -> None:
    ranks = world(connect, 2)
    RestartState(connect()).join(1, "dead", 1)
    with suppress(StoppedError):  # the round is still the current one
        stopping(connect(), num_writes).end(Fault(1, 1, FaultMode.DEATH, "killed"))

    assert all_join(ranks) == [2] * 2


def test_a_fault_after_all_have_finished_is_none(connect: Connect) -> None:
    ranks = world(connect, 2)
    all_join(ranks)
    in_threads(*(lambda c=c: c.finish(1, LIMIT_S) for c in ranks))

    ranks[0].report(0, 1, FaultMode.DEATH, "killed while it ended")

    assert ranks[1].wait_fault(1, 0.02) is None
    assert all_join(ranks) == [2] * 2


def test_a_spare_with_an_old_round_does_not_pass_its_open_barrier(connect: Connect) -> None:
    ranks = world(connect, 2)
    all_join(ranks)
    state = RestartState(connect())
    spare = StoreRendezvous(connect(), "spare", place(1, 2))

    def end_it() -> int:
        until(lambda: state.joined("spare") is not None)
        ranks[0].report(1, 1, FaultMode.DEATH, "killed")
        return ranks[0].barrier(LIMIT_S)

    # The spare reads round 1, whose barrier is open, before any process has ended it.
    assert in_threads(lambda: spare.barrier(LIMIT_S), end_it) == [2] * 2


def test_closing_ends_waits(connect: Connect) -> None:
    rank = StoreRendezvous(connect(), "w0", place(0, 1))
    rank.barrier(LIMIT_S)

    def close() -> None:
        time.sleep(0.05)
        rank.close()

    assert "PeerLostError" in in_threads(lambda: rank.wait_fault(1, LIMIT_S), close)[0].kinds


class Life:
    """One rank that fails, dies or finishes at random moments, until all finish together."""

    def __init__(self, connect: Connect, rank: int, size: int, seed: int) -> None:
        self._connect = connect
        self._agent = RestartState(connect())
        self._rank = rank
        self._size = size
        self._rng = random.Random(seed * 100 + rank)
        self._num_processes = 0
        self._begin_process()

    def run(self) -> int:
        while True:
            restart_round = self._me.barrier(LIMIT_S)
            assert self._agent.without("reached", restart_round, range(self._size)) == []
            time.sleep(self._rng.random() * 0.004)
            if self._ends(restart_round):
                return restart_round
            assert self._me.wait_fault(restart_round, LIMIT_S) is not None
            if self._rng.random() < 0.3:
                self._die(lambda state: state.join(state.current(), self._name, self._rank))

    def _ends(self, restart_round: int) -> bool:
        fate = self._rng.random() if restart_round < 16 else 1.0
        fault = Fault(self._rank, restart_round, FaultMode.EXCEPTION, "fails")
        if fate < 0.2:
            self._me.report(self._rank, restart_round, fault.mode, fault.why)
        elif fate < 0.5:
            self._die(lambda state: state.end(fault))
            self._me.report(self._rank, restart_round - 1, fault.mode, "late")
        else:
            return self._me.finish(restart_round, LIMIT_S)
        return False

    def _die(self, act: Callable[[RestartState], object]) -> None:
        """In the middle of something. The elastic agent reports it, and may die of that too."""
        with suppress(StoppedError):
            act(stopping(self._connect(), self._rng.randrange(8)))
        joined = self._agent.joined(self._name)
        if joined is not None:
            fault = Fault(self._rank, joined, FaultMode.DEATH, "killed")
            with suppress(StoppedError):  # from the second write on the others know
                stopping(self._connect(), self._rng.randrange(2, 8)).end(fault)
        self._begin_process()

    def _begin_process(self) -> None:
        self._name = f"{self._rank}.{self._num_processes}"
        self._num_processes += 1
        self._me = StoreRendezvous(self._connect(), self._name, place(self._rank, self._size))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_in_any_interleaving_ranks_run_only_with_all_others_in_the_same_round(
    connect: Connect, seed: int
) -> None:
    ends = in_threads(*(Life(connect, rank, 4, seed).run for rank in range(4)))

    assert len(set(ends)) == 1, ends
    assert isinstance(ends[0], int), ends


# A store that falls silent, or is gone

SIZE = 3
SILENCE_S, TTL_S = 3.0, 4.0
SLACK_S = 10.0
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


def client(rank: int, port: int) -> StoreRendezvous:
    store = JobStore(HOST, port, timeout_s=SILENCE_S)
    return StoreRendezvous(store, f"worker{rank}", place(rank, SIZE))


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

    with pytest.raises(PeerLostError, match=f"{HOST}:{port}"):
        block()
    return time.monotonic() - stopped[-1]


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_is_silent_or_gone_is_named_by_every_rank_within_the_limit(
    store: tuple[int, int], number: int
) -> None:
    for seconds in run_processes(SIZE, loses_its_store, store, number, makes_group=False):
        assert seconds < SILENCE_S + SLACK_S


def next_of(kind: type, news: SimpleQueue[Any]) -> Any:
    """The next news of that kind; notes are passed over."""
    return next(one for one in iter(lambda: news.get(timeout=LIMIT_S), None) if type(one) is kind)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_job_whose_store_is_lost_cannot_be_closed_and_its_workers_are_fenced(
    store: tuple[int, int], number: int
) -> None:
    pid, port = store
    news, told = SimpleQueue[Any](), list[str]()
    nodes = Nodes(num_nodes=1, num_ranks=1, ttl_s=TTL_S, endpoint=(HOST, port))
    places = Places(nodes, news.put, print)
    places.start(told.append)
    next_of(Placed, news)

    os.kill(pid, number)
    until(lambda: is_halted(pid))
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=f"{HOST}:{port} does not answer"):
        places.close(GAVE_UP, "workers have died too often")
    ended = next_of(Ended, news)
    places.leave([], 0.0, is_fenced=True, is_done=False)

    assert time.monotonic() - began < TTL_S + 2 * SLACK_S
    assert (ended.code, f"{HOST}:{port}" in ended.why) == (FENCED, True)
    assert told[-1] == "fence"
