"""The restart state of a job in its launcher's store, and the rendezvous client over it.

docs/design/recovery.md has the keys, and why each is written when.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dist_ckpt_strategies.comm.job_store import JobStore, host_store
from dist_ckpt_strategies.config import (
    environment,
    options_from_environment,
    update_environment,
)
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.inprocess.launch import launch_from_environment
from dist_ckpt_strategies.inprocess.rendezvous import (
    Fault,
    FaultMode,
    RankInfo,
    RendezvousClient,
    environment_of,
    place_of,
)
from dist_ckpt_strategies.inprocess.worker_process import start_heartbeat

_OPEN, _DONE, _BROKEN = "open", "done", "broken"
_NO_FAULT = "none"
"""Replaces the fault of a round that all ranks have finished, so that no rank waits for one."""

_MAX_WHY = 2000
_MAX_NAMED = 64
IDLE = "idle"  # key: why the job ends, attempt after attempt did no step
_ROUNDS_PER_ATTEMPT = 1_000_000
_LONGEST_SILENCE_S = 30.0
"""Of the launcher's store, where ``timeout_s`` of the options is not shorter."""

_LEAST_PAUSE_S = 0.25
_MAX_REQUESTS_PER_S = 2000
"""Limit for all ranks together, while they wait for the store's news."""


class RestartState:
    """Reads and writes the state of rounds and workers; waits for nothing.

    ``first_round`` is the same for all.
    """

    def __init__(self, store: JobStore, first_round: int = 1) -> None:
        self._store = store
        self._first = first_round

    def assign(self, worker: str, place: RankInfo) -> None:
        """Give a worker its place."""
        self._store.set(f"assign/{worker}", json.dumps(environment_of(place)))

    def place(self, worker: str) -> RankInfo | None:
        """A worker's place, None before it has one; a PeerError if the store holds no place."""
        text = self._store.get(f"assign/{worker}")
        try:
            return None if text is None else place_of(json.loads(text))
        except (ValueError, AttributeError) as error:
            raise PeerError(None, f"expected a place in the job, found {text!r:.200}") from error

    def is_ready(self, worker: str) -> bool:
        """Whether a worker waits for its place, or has one."""
        return self._store.check([f"ready/{worker}"])

    def current(self) -> int:
        """The forming or running round."""
        return int(self._store.compare_set("restart_round", "", str(self._first)))

    def join(self, restart_round: int, worker: str, global_rank: int) -> int:
        """Note that a worker has joined, once per round; how many have by now."""
        # First the key that the death of a worker is reported by, then the count.
        self._store.set(f"joined/{worker}", str(restart_round))
        self._store.set(f"reached/{restart_round}/{global_rank}", worker)
        return self._store.add(f"reached/{restart_round}")

    def joined(self, worker: str) -> int | None:
        """The last round that a worker has joined."""
        found = self._store.get(f"joined/{worker}")
        return None if found is None else int(found)

    def is_done(self, restart_round: int) -> bool:
        """Whether all ranks have returned from the block in this round."""
        return self._store.get(f"finish/{restart_round}") == _DONE

    def has_finished(self) -> bool:
        """Whether a wrapped block has ended on all ranks: a new process would run it again."""
        return self._store.check(["finished"])

    def end(self, fault: Fault) -> None:
        """End the fault's round, unless it is no longer the current one."""
        if self.current() != fault.restart_round:
            return
        content = {"rank": fault.global_rank, "mode": fault.mode, "why": fault.why[:_MAX_WHY]}
        self._store.compare_set(f"fault/{fault.restart_round}", "", json.dumps(content))
        self.settle(fault.restart_round)

    def settle(self, restart_round: int) -> bool:
        """Complete the end of a round that a fault, or the return of all ranks, has ended.

        Every process that sees the end does this, as the one that ended the round may have died
        between two writes. Call it only for a round that has ended. Returns whether
        all ranks have finished it.
        """
        self._store.compare_set(f"barrier/{restart_round}", "", _BROKEN)
        is_done = self._store.compare_set(f"finish/{restart_round}", "", _BROKEN) == _DONE
        if is_done:
            self._store.set("finished", "1")
            self._store.compare_set(f"fault/{restart_round}", "", _NO_FAULT)
        self._store.compare_set("restart_round", str(restart_round), str(restart_round + 1))
        return is_done

    def fault(self, restart_round: int) -> Fault | None:
        """The fault that ended a round; None before, and if all ranks finished it."""
        text = self._store.get(f"fault/{restart_round}")
        if text is None or self.settle(restart_round):
            return None
        found = json.loads(text)
        return Fault(found["rank"], restart_round, FaultMode(found["mode"]), found["why"])

    def without(self, what: str, restart_round: int, ranks: range) -> list[int]:
        """Ranks that have not "reached" or "returned", by halves: few requests for few ranks."""
        if self._store.check([f"{what}/{restart_round}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return [
            *self.without(what, restart_round, ranks[:half]),
            *self.without(what, restart_round, ranks[half:]),
        ]


class StoreRendezvous:
    """One worker's RendezvousClient over the job's store.

    A thread waits in the store for the barrier of a round, which any end of it breaks, and then
    for its end. It waits for a round only once that is wanted: a thread that returned from the
    store while the interpreter exits would abort the process.

    Args:
        store: of the job; is closed with this.
        worker: the launcher's name for this process.
        place: in the job; None: the launcher assigns one, and its variables are set.
        first_round: number of the first round; the same for all.
        host: server of the store, if it is in this process.

    Raises:
        PeerLostError: the store does not answer.
    """

    def __init__(
        self,
        store: JobStore,
        worker: str,
        place: RankInfo | None = None,
        *,
        first_round: int = 1,
        host: Any = None,
    ) -> None:
        self._store = store
        self._host = host
        self._worker = worker
        self._place = place
        self._state = RestartState(store, first_round)
        self._joined = self._returned = (-1, 0)  # round, and how many had by then
        self._changed = threading.Condition()
        self._ended: dict[int, Fault | None] = {}
        self._lost: CheckpointError | None = None
        self._next = self._first_watched = self._state.current()
        self._wanted = self._decided = self._next - 1
        threading.Thread(target=self._follow, name="dist-ckpt-fault-watch", daemon=True).start()

    def wait_rank(self, timeout_s: float | None = None) -> RankInfo:
        """See RendezvousClient."""
        if self._place is None:
            self._store.set(f"ready/{self._worker}", "1")
            self._store.wait(f"assign/{self._worker}", timeout_s)
            self._place = self._state.place(self._worker)
            if self._place is None:
                raise PeerTimeoutError(
                    None, f"worker {self._worker}: expected a rank in {timeout_s:g} s, got none"
                )
            update_environment(environment_of(self._place))
        return self._place

    def barrier(self, timeout_s: float) -> int:
        """See RendezvousClient."""
        deadline = time.monotonic() + timeout_s
        place = self.wait_rank(timeout_s)
        while True:
            restart_round = self._state.current()
            if self._joined[0] != restart_round:
                self._joined = (
                    restart_round,
                    self._state.join(restart_round, self._worker, place.global_rank),
                )
                self._want(restart_round)
            if self._passes(restart_round, place, deadline):
                return restart_round
            if time.monotonic() > deadline:
                raise self._timed_out(restart_round, "joined", "reached", place)

    def wait_fault(self, restart_round: int, timeout_s: float) -> Fault | None:
        """See RendezvousClient."""
        if restart_round < self._first_watched:
            return self._state.fault(restart_round)
        self._want(restart_round)
        self._wait_until(lambda: self._ended.get(restart_round) is not None, timeout_s)
        return self._ended.get(restart_round)

    def report(
        self, global_rank: int | None, restart_round: int, mode: FaultMode, why: str
    ) -> None:
        """See RendezvousClient."""
        self._state.end(Fault(global_rank, restart_round, mode, why))

    def finish(self, restart_round: int, timeout_s: float) -> bool:
        """See RendezvousClient."""
        place = self.wait_rank(timeout_s)
        if self._returned[0] != restart_round:
            self._store.set(f"returned/{restart_round}/{place.global_rank}", "1")
            self._returned = (restart_round, self._store.add(f"returned/{restart_round}"))
        if self._returned[1] == place.world_size:
            self._store.compare_set(f"finish/{restart_round}", "", _DONE)
        for limit_s in _looks(time.monotonic() + timeout_s, place):
            if self._store.check([f"finish/{restart_round}"]):
                is_done = self._state.settle(restart_round)
                self._wait_until(lambda: restart_round in self._ended, timeout_s)
                return is_done
            self._wait_until(lambda: restart_round in self._ended, limit_s)
        raise self._timed_out(restart_round, "returned from the block", "returned", place)

    def count_idle(self, restart_round: int, steps: tuple[Any, Any], *, is_own: bool) -> int:
        """How many attempts of the job in a row have failed before a step was done.

        ``steps`` are those before and after this rank's attempt; it counts one that is its own. A
        new process, without a step before, has done none if it loaded what the job had reached.
        """
        (before, after), progress = steps, self._store.get("progress") or "0/"
        since, _, reached = progress.partition("/")
        if before != after and not (before is None and reached == str(after)):
            self._store.set("progress", f"{restart_round}/{after}")
            return 0
        key = f"{IDLE}/{since}"
        return self._store.add(key) if is_own else int(self._store.get(key) or 0)

    def give_up(self, why: str) -> None:
        """Have the launcher end the job."""
        self._store.set(IDLE, why)

    def close(self) -> None:
        """See RendezvousClient. The thread ends with its round, or with the store."""
        self._lose(PeerLostError(None, "this rendezvous client has been closed"))
        self._store.close()

    def _passes(self, restart_round: int, place: RankInfo, deadline: float) -> bool:
        """Whether the barrier opened; False where the round has ended, or the time is over."""
        # A rank on top of a full world has read an old round: it waits for the next one.
        is_counted = self._joined[1] <= place.world_size
        # A process that died in this round is counted beside its successor; then there is a fault.
        if self._joined[1] == place.world_size and self._state.fault(restart_round) is None:
            self._store.compare_set(f"barrier/{restart_round}", "", _OPEN)
        for limit_s in _looks(deadline, place):
            barrier = self._store.get(f"barrier/{restart_round}")
            if barrier == _BROKEN:
                self._state.settle(restart_round)
                return False
            if barrier == _OPEN and is_counted:
                return True
            if not is_counted and self._state.current() != restart_round:
                return False
            if barrier is None:
                self._state.fault(restart_round)  # settles what a reporter began and did not end
            self._wait_until(
                lambda: (
                    self._decided >= restart_round if is_counted else restart_round in self._ended
                ),
                limit_s,
            )
        return False

    def _timed_out(
        self, restart_round: int, what: str, key: str, place: RankInfo
    ) -> PeerTimeoutError:
        ranks = self._state.without(key, restart_round, range(place.world_size))
        names = ", ".join(map(str, ranks[:_MAX_NAMED])) or "none"
        if len(ranks) > _MAX_NAMED:
            names += f" and {len(ranks) - _MAX_NAMED} more"
        return PeerTimeoutError(
            ranks[0] if ranks else None,
            f"restart round {restart_round}: not all ranks have {what} in time; missing: {names}",
        )

    def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Return when the thread has seen it, or after the time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not is_so():
                left_s = deadline - time.monotonic()
                if self._lost is not None:
                    raise PeerLostError(None, self._lost.message) from self._lost
                if left_s <= 0:
                    return
                self._changed.wait(left_s)

    def _want(self, restart_round: int) -> None:
        """Have the thread watch this round, and all before it."""
        with self._changed:
            self._wanted = max(self._wanted, restart_round)
            self._changed.notify_all()

    def _lose(self, error: CheckpointError) -> None:
        with self._changed:
            self._lost = self._lost or error
            self._changed.notify_all()

    def _follow(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._wanted >= self._next or self._lost)
                    if self._lost is not None:
                        return
                is_forming = self._decided < self._next
                if not self._store.wait(f"{'barrier' if is_forming else 'fault'}/{self._next}"):
                    continue
                fault = None if is_forming else self._state.fault(self._next)
                with self._changed:
                    if is_forming:
                        self._decided = self._next
                    else:
                        self._ended[self._next] = fault
                        self._next += 1
                    self._changed.notify_all()
        except CheckpointError as error:
            self._lose(error)


def _looks(deadline: float, place: RankInfo) -> Iterator[float]:
    """How long to wait for the thread until the next look at the store; 0 at the deadline.

    The thread reports all but what a process left half done when it died. The pause grows with
    the world, so that the store can answer all ranks.
    """
    pause_s = max(_LEAST_PAUSE_S, place.world_size / _MAX_REQUESTS_PER_S)
    while (left_s := deadline - time.monotonic()) > 0:
        yield min(pause_s, left_s)
    yield 0.0


def rendezvous_from_environment() -> RendezvousClient:
    """The rendezvous client of this process, whose heartbeats begin with this call.

    Under ``dist-ckpt run`` it uses the launcher's store, under torchrun the agent's. Torchrun
    reports exceptions only: when a process dies, it restarts them all. Without either, and with no
    WORLD_SIZE above 1, the job is this process alone.

    ``wait_rank`` sets the variables of a place that the elastic agent assigns, so that
    ``init_process_group`` finds the other ranks.

    Raises:
        StrategyError: the environment names none of these.
        PeerLostError: the launcher's store does not answer.
    """
    launch = launch_from_environment()
    start_heartbeat(launch)
    if launch.address is None:
        own = host_store()
        alone = RankInfo(0, 0, 1, 1)
        return StoreRendezvous(JobStore(own.host, own.port), launch.worker, alone, host=own)
    host, port = launch.address
    silence_s = min(_LONGEST_SILENCE_S, options_from_environment().timeout_s)
    if launch.rank is None:
        store = JobStore(host, port, timeout_s=silence_s)
        return StoreRendezvous(store, launch.worker)
    try:
        place = replace(place_of(environment()), environment=())
    except ValueError as error:
        raise StrategyError(f"torchrun's variables: {error}") from error
    # The agent's store outlives the processes: keys and rounds differ by attempt.
    store = JobStore(host, port, prefix=f"dist_ckpt/{launch.attempt}", timeout_s=silence_s)
    first_round = launch.attempt * _ROUNDS_PER_ATTEMPT + 1
    return StoreRendezvous(store, launch.worker, place, first_round=first_round)
