"""Epochs over a store: no barrier opens too early, no fault is lost, nobody is held up."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from dist_ckpt_strategies.comm.key_values import TcpHost, TcpKeyValues
from dist_ckpt_strategies.errors import PeerLostError, PeerTimeoutError
from dist_ckpt_strategies.inprocess.coordinator import (
    Epoch,
    Fault,
    FaultMode,
    RankInfo,
)
from dist_ckpt_strategies.inprocess.restart_state import BarrierState, RestartState
from dist_ckpt_strategies.inprocess.store_coordinator import StoreCoordinator

LIMIT_S = 60.0


class StoppedError(Exception):
    """The rank does nothing any more, as if it had been killed."""


class StoppingStore:
    """Lets through a number of writes of one rank, and none after."""

    def __init__(self, store: TcpKeyValues, num_writes: int) -> None:
        self._inner = store
        self._left = num_writes

    def __getattr__(self, name: str) -> Any:
        if name in {"write", "write_once", "replace", "add"}:
            if self._left <= 0:
                raise StoppedError
            self._left -= 1
        return getattr(self._inner, name)


def stopping(store: TcpKeyValues, num_writes: int) -> RestartState:
    found: Any = StoppingStore(store, num_writes)
    return RestartState(found)


def place(rank: int, size: int) -> RankInfo:
    return RankInfo(rank, rank, size, size)


def in_threads(*bodies: Callable[[], object]) -> list[object]:
    """What each returned, or the error that it raised."""
    results: list[object] = [None] * len(bodies)

    def call(index: int) -> None:
        try:
            results[index] = bodies[index]()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.fixture
def store() -> Iterator[TcpKeyValues]:
    """On leaving, whoever still waits for a round is let go."""
    host = TcpHost()
    client = TcpKeyValues(host.host, host.port, timeout_s=LIMIT_S)
    yield client
    state = RestartState(client)
    state.end(Fault(None, state.current(), FaultMode.DEATH, "the test is over"))
    time.sleep(0.05)


def world(store: TcpKeyValues, size: int) -> list[StoreCoordinator]:
    ranks = range(size)
    return [StoreCoordinator(store.another(), f"w{r}", place(r, size)) for r in ranks]


def test_over_a_real_store_a_fault_ends_an_epoch_and_the_next_one_is_finished(
    store: TcpKeyValues,
) -> None:
    ranks = world(store, 2)

    def life(rank: int) -> tuple[Epoch, Fault | None, Epoch, bool, Fault | None]:
        me = ranks[rank]
        first = me.barrier(LIMIT_S)
        if rank == 1:
            me.report(1, first.number, FaultMode.EXCEPTION, "boom")
        fault = me.wait_fault(first.number, LIMIT_S)
        second = me.barrier(LIMIT_S)
        is_done = me.finish(second.number, LIMIT_S)
        return first, fault, second, is_done, me.wait_fault(second.number, 0.01)

    expected = (Epoch(1), Fault(1, 1, FaultMode.EXCEPTION, "boom"), Epoch(2), True, None)
    assert in_threads(lambda: life(0), lambda: life(1)) == [expected] * 2


def test_a_store_reads_writes_counts_and_waits(store: TcpKeyValues) -> None:
    assert store.read("a") is None
    assert (store.write_once("a", "1"), store.write_once("a", "2")) == ("1", "1")
    assert (store.replace("a", "2", "3"), store.replace("a", "1", "3")) == ("1", "3")
    assert store.read("a") == "3"
    store.write("a", "4")
    assert store.read("a") == "4"
    assert (store.add("n"), store.add("n")) == (1, 2)
    assert store.has_all(["a", "n"])
    assert not store.has_all(["a", "b"])
    assert store.has_all([])
    assert store.wait("a", 1.0)
    assert not store.wait("b", 0.02)
    assert store.read("b") is None


def test_who_waits_for_a_key_is_not_woken_by_questions_about_it(store: TcpKeyValues) -> None:
    waiting = store.another()
    asking = store.another()

    def ask() -> object:
        time.sleep(0.05)
        assert asking.replace("a", "1", "2") == "1"  # there is none; torch's store wakes all then
        return asking.read("a")

    assert in_threads(lambda: waiting.wait("a", 0.5), ask) == [False, None]

    def write() -> str:
        time.sleep(0.05)
        return asking.write_once("a", "3")

    assert in_threads(lambda: waiting.wait("a", LIMIT_S), write) == [True, "3"]


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_whoever_is_missing_is_named_whatever_the_world(store: TcpKeyValues, size: int) -> None:
    state = RestartState(store)
    present = {rank for rank in range(size) if rank % 3}
    for rank in present:
        state.join(1, f"w{rank}", rank)

    assert state.missing(1, size) == tuple(rank for rank in range(size) if rank not in present)


def test_of_a_large_world_a_few_of_the_missing_are_named(store: TcpKeyValues) -> None:
    with pytest.raises(PeerTimeoutError, match=r"missing: 1, 2, .*, 64 and 935 more"):
        StoreCoordinator(store, "w0", place(0, 1000)).barrier(0.02)


def test_few_questions_are_asked_while_a_barrier_forms(
    store: TcpKeyValues, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world(store, 2)
    asked: list[str] = []
    read = TcpKeyValues.read

    def counted(self: TcpKeyValues, key: str) -> str | None:
        asked.append(key)
        return read(self, key)

    monkeypatch.setattr(TcpKeyValues, "read", counted)

    def join_late() -> Epoch:
        time.sleep(1.0)
        return ranks[1].barrier(LIMIT_S)

    started = time.monotonic()
    assert in_threads(lambda: ranks[0].barrier(LIMIT_S), join_late) == [Epoch(1)] * 2
    assert time.monotonic() - started < LIMIT_S / 2
    assert len(asked) < 50  # every 10 ms would be 100


@pytest.mark.parametrize("num_writes", range(2, 6))
def test_a_fault_that_was_half_written_while_a_barrier_forms_moves_those_who_wait(
    store: TcpKeyValues, num_writes: int
) -> None:
    ranks = world(store, 2)

    def break_off() -> Epoch:
        while RestartState(store).missing(1, 2) != (1,):
            time.sleep(0.001)
        with suppress(StoppedError):
            stopping(store, num_writes).end(Fault(1, 1, FaultMode.DEATH, "killed"))
        while RestartState(store).current() == 1:  # who waits does the rest
            time.sleep(0.001)
        return ranks[1].barrier(LIMIT_S)

    assert in_threads(lambda: ranks[0].barrier(LIMIT_S), break_off) == [Epoch(2)] * 2


def test_a_barrier_that_times_out_names_the_ranks_that_are_missing(store: TcpKeyValues) -> None:
    first = world(store, 4)[2]

    with pytest.raises(PeerTimeoutError, match="missing: 0, 1, 3"):
        first.barrier(0.05)


def test_the_first_fault_reaches_all_and_later_ones_change_nothing(
    store: TcpKeyValues,
) -> None:
    ranks = world(store, 3)
    in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))

    ranks[1].report(1, 1, FaultMode.EXCEPTION, "boom")
    ranks[2].report(2, 1, FaultMode.EXCEPTION, "because of 1")

    expected = Fault(1, 1, FaultMode.EXCEPTION, "boom")
    assert in_threads(*(lambda c=c: c.wait_fault(1, LIMIT_S) for c in ranks)) == [expected] * 3


def test_a_fault_against_the_forming_epoch_moves_those_who_wait_in_it(store: TcpKeyValues) -> None:
    ranks = world(store, 3)

    def die_and_be_replaced() -> Epoch:
        while RestartState(store).missing(1, 3) != (2,):
            time.sleep(0.001)
        ranks[2].report(2, 1, FaultMode.DEATH, "killed")
        return ranks[2].barrier(LIMIT_S)

    waiting = (lambda c=c: c.barrier(LIMIT_S) for c in ranks[:2])

    assert in_threads(*waiting, die_and_be_replaced) == [Epoch(2)] * 3


def test_who_has_finished_hears_of_a_fault_and_runs_again(store: TcpKeyValues) -> None:
    ranks = world(store, 2)
    in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))

    def fail_late() -> None:
        time.sleep(0.05)
        ranks[1].report(1, 1, FaultMode.EXCEPTION, "boom")

    assert in_threads(lambda: ranks[0].finish(1, LIMIT_S), fail_late)[0] is False
    assert in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks)) == [Epoch(2)] * 2
    assert in_threads(*(lambda c=c: c.finish(2, LIMIT_S) for c in ranks)) == [True] * 2


def test_a_fault_after_all_have_finished_is_none(store: TcpKeyValues) -> None:
    ranks = world(store, 2)
    in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))
    in_threads(*(lambda c=c: c.finish(1, LIMIT_S) for c in ranks))

    ranks[0].report(0, 1, FaultMode.DEATH, "killed while it ended")

    assert ranks[1].wait_fault(1, 0.02) is None
    assert in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks)) == [Epoch(2)] * 2


def test_finish_names_the_ranks_that_have_not_returned(store: TcpKeyValues) -> None:
    ranks = world(store, 3)
    in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))

    with pytest.raises(PeerTimeoutError, match="missing: 1, 2"):
        ranks[0].finish(1, 0.05)


@pytest.mark.parametrize("num_writes", range(8))
def test_a_reporter_that_stops_between_two_writes_holds_up_nobody(
    store: TcpKeyValues, num_writes: int
) -> None:
    ranks = world(store, 3)
    in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))

    with suppress(StoppedError):
        stopping(store, num_writes).end(Fault(2, 1, FaultMode.EXCEPTION, "boom"))
    # Whoever watches has to hear of its death, and reports that.
    ranks[0].report(2, 1, FaultMode.DEATH, "killed")

    faults = in_threads(*(lambda c=c: c.wait_fault(1, LIMIT_S) for c in ranks))
    assert len(set(faults)) == 1
    assert isinstance(faults[0], Fault)
    assert in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks)) == [Epoch(2)] * 3


@pytest.mark.parametrize("num_writes", range(2, 6))
def test_once_a_fault_is_written_it_needs_no_second_reporter(
    store: TcpKeyValues, num_writes: int
) -> None:
    ranks = world(store, 2)
    in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))

    # Asking for the current epoch is the first of its writes, the fault the second.
    with suppress(StoppedError):
        stopping(store, num_writes).end(Fault(1, 1, FaultMode.EXCEPTION, "boom"))

    # The rank that failed does not return; if it did, the epoch could just as well be done.
    assert ranks[0].finish(1, LIMIT_S) is False
    assert in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks)) == [Epoch(2)] * 2


@pytest.mark.parametrize("num_writes", range(5))
def test_a_joiner_that_dies_between_two_writes_opens_no_barrier(
    store: TcpKeyValues, num_writes: int
) -> None:
    state = RestartState(store)
    with suppress(StoppedError):
        stopping(store, num_writes).join(1, "dead", 1)
    joined = state.joined("dead")
    if joined is not None:  # what a supervisor does about a death
        state.end(Fault(1, joined, FaultMode.DEATH, "killed"))
    ranks = world(store, 2)

    with pytest.raises(PeerTimeoutError, match="missing: 1"):
        ranks[0].barrier(0.05)
    epochs = in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))
    assert epochs == [Epoch(1 if joined is None else 2)] * 2


def test_a_spare_with_an_old_epoch_does_not_pass_its_open_barrier(store: TcpKeyValues) -> None:
    ranks = world(store, 2)
    in_threads(*(lambda c=c: c.barrier(LIMIT_S) for c in ranks))
    state = RestartState(store)
    assert state.barrier(1) is BarrierState.OPEN
    spare = StoreCoordinator(store.another(), "spare", place(1, 2))

    def end_it() -> Epoch:
        while state.joined("spare") is None:
            time.sleep(0.001)
        ranks[0].report(1, 1, FaultMode.DEATH, "killed")
        return ranks[0].barrier(LIMIT_S)

    # The spare reads epoch 1, whose barrier is open, before anybody has ended it.
    assert in_threads(lambda: spare.barrier(LIMIT_S), end_it) == [Epoch(2)] * 2


def test_a_spare_waits_until_it_is_given_a_rank(store: TcpKeyValues) -> None:
    spare = StoreCoordinator(store.another(), "spare")
    with pytest.raises(PeerTimeoutError, match="worker spare"):
        spare.wait_rank(0.02)
    assert store.read("ready/spare") == "1"
    given = RankInfo(3, 1, 8, 4, (("MASTER_PORT", "1234"),))

    RestartState(store).assign("spare", given)

    assert spare.wait_rank(LIMIT_S) == given


def test_whoever_waits_learns_that_the_store_is_gone() -> None:
    host: TcpHost | None = TcpHost()
    assert host is not None
    rank = StoreCoordinator(TcpKeyValues(host.host, host.port), "w0", place(0, 2))
    waiting = threading.Thread(target=lambda: time.sleep(0.1), daemon=True)
    waiting.start()
    results: list[object] = []

    def wait() -> None:
        try:
            results.append(rank.wait_fault(1, LIMIT_S))
        except PeerLostError as error:
            results.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    del host
    thread.join(LIMIT_S)

    assert isinstance(results[0], PeerLostError)
    for ask in (
        lambda: rank.barrier(0.1),
        lambda: rank.finish(1, 0.1),
        lambda: rank.report(0, 1, FaultMode.HANG, ""),
    ):
        with pytest.raises(PeerLostError):
            ask()


def test_closing_wakes_up_who_waits(store: TcpKeyValues) -> None:
    rank = StoreCoordinator(store.another(), "w0", place(0, 1))
    rank.barrier(LIMIT_S)

    def close() -> None:
        time.sleep(0.05)
        rank.close()

    assert isinstance(in_threads(lambda: rank.wait_fault(1, LIMIT_S), close)[0], PeerLostError)


class Life:
    """One rank that fails, dies or finishes at random moments, until all finish together."""

    def __init__(self, store: TcpKeyValues, rank: int, size: int, seed: int) -> None:
        self._shared = store
        self._rank = rank
        self._size = size
        self._rng = random.Random(seed * 100 + rank)
        self._me = StoreCoordinator(store, f"{rank}", place(rank, size))

    def run(self) -> int:
        while True:
            epoch = self._me.barrier(LIMIT_S).number
            assert RestartState(self._shared).missing(epoch, self._size) == ()
            time.sleep(self._rng.random() * 0.004)
            if self._ends(epoch):
                return epoch
            assert self._me.wait_fault(epoch, LIMIT_S) is not None

    def _ends(self, epoch: int) -> bool:
        fate = self._rng.random() if epoch < 8 else 1.0
        if fate < 0.25:
            self._me.report(self._rank, epoch, FaultMode.EXCEPTION, "fails")
            return False
        if fate < 0.5:
            # Whoever watches reports the death; and what the dead one has sent comes late.
            RestartState(self._shared).end(Fault(self._rank, epoch, FaultMode.DEATH, "killed"))
            name = f"{self._rank}.{epoch}"
            self._me = StoreCoordinator(self._shared, name, place(self._rank, self._size))
            self._me.report(self._rank, epoch - 1, FaultMode.EXCEPTION, "late")
            return False
        return self._me.finish(epoch, LIMIT_S)


@pytest.mark.parametrize("seed", range(10))
def test_in_any_interleaving_ranks_run_only_with_all_others_in_the_same_epoch(
    store: TcpKeyValues, seed: int
) -> None:

    ends = in_threads(*(Life(store, rank, 4, seed).run for rank in range(4)))

    assert len(set(ends)) == 1, ends
    assert isinstance(ends[0], int), ends
