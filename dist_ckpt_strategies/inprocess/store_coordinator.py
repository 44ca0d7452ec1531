"""The rendezvous client over a launcher's store, and how a process finds the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from dist_ckpt_strategies.comm.key_values import TcpHost, TcpKeyValues
from dist_ckpt_strategies.config import (
    launch_from_environment,
    options_from_environment,
    update_environment,
    world_from_environment,
)
from dist_ckpt_strategies.errors import CheckpointError, PeerLostError, PeerTimeoutError
from dist_ckpt_strategies.inprocess.coordinator import (
    Coordinator,
    Epoch,
    Fault,
    FaultMode,
    RankInfo,
    environment_of,
)
from dist_ckpt_strategies.inprocess.restart_state import BarrierState, FinishState, RestartState
from dist_ckpt_strategies.inprocess.worker_process import start_heartbeat

KEY_PREFIX = "dist_ckpt/"
"""Of our keys in a store that others use too."""

_EPOCHS_PER_ATTEMPT = 1_000_000
_LONGEST_SILENCE_S = 30.0
"""Of the launcher's store, where ``timeout_s`` of the options is not shorter."""

_FIRST_PAUSE_S = 0.001
_MAX_QUESTIONS_PER_S = 2000
"""What all ranks together ask of the store while they wait for its news all the same."""

_LEAST_BACKSTOP_S = 0.25
_MAX_NAMED = 64


class StoreCoordinator:
    """One worker's Coordinator. Both of its connections are made here, none later.

    Args:
        store: of the job.
        worker: the launcher's name for this process.
        place: in the job; None: the launcher assigns one.
        first_epoch: number of the first epoch; the same for all.
        master: address at which rank 0 hosts, for each attempt, a store for its process groups;
            ``barrier`` then sets this process's variables, as its launcher would have. None: no
            store is hosted, no variable set.
        host: of the store, if it is in this process.

    Raises:
        PeerLostError: the store does not answer.
    """

    def __init__(
        self,
        store: TcpKeyValues,
        worker: str,
        place: RankInfo | None = None,
        *,
        first_epoch: int = 1,
        master: str | None = None,
        host: TcpHost | None = None,
    ) -> None:
        self._store = store
        self._host = host
        self._worker = worker
        self._place = place
        self._state = RestartState(store, first_epoch)
        waiting = store.another()
        self._waiting_state = RestartState(waiting, first_epoch)
        self._watch = FaultWatch(waiting, first_epoch)
        self._master = master
        self._hosted: TcpHost | None = None
        self._joined = (-1, 0)
        self._returned = (-1, 0)

    def wait_rank(self, timeout_s: float | None = None) -> RankInfo:
        """See Coordinator."""
        if self._place is None:
            self._place = self._assigned(timeout_s)
        return self._place

    def barrier(self, timeout_s: float) -> Epoch:
        """See Coordinator."""
        deadline = time.monotonic() + timeout_s
        place = self.wait_rank(timeout_s)
        while True:
            epoch = self._state.current()
            if self._passes(epoch, place, deadline):
                return self._begun(epoch, place)
            if time.monotonic() > deadline:
                raise self._timed_out(epoch, "joined", self._state.missing(epoch, place.world_size))

    def wait_fault(self, epoch: int, timeout_s: float) -> Fault | None:
        """See Coordinator."""
        if epoch < self._watch.start:
            return self._state.fault(epoch)
        return self._watch.wait_fault(epoch, timeout_s)

    def report(self, global_rank: int | None, epoch: int, mode: FaultMode, why: str) -> None:
        """See Coordinator."""
        self._state.end(Fault(global_rank, epoch, mode, why))

    def finish(self, epoch: int, timeout_s: float) -> bool:
        """See Coordinator."""
        place = self.wait_rank(timeout_s)
        if self._returned[0] != epoch:
            self._returned = (epoch, self._state.count_return(epoch, place.global_rank))
        if self._returned[1] == place.world_size:
            self._state.mark_done(epoch)
        for pause_s in _pauses(time.monotonic() + timeout_s, _backstop_s(place)):
            if self._state.finish(epoch) is not None:
                is_done = self._state.settle(epoch) is FinishState.DONE
                self._watch.wait_end(epoch, timeout_s)
                return is_done
            self._watch.wait_end(epoch, pause_s)
        late = self._state.unfinished(epoch, place.world_size)
        raise self._timed_out(epoch, "returned from the block", late)

    def close(self) -> None:
        """See Coordinator."""
        self._watch.close()
        self._store.close()

    def _passes(self, epoch: int, place: RankInfo, deadline: float) -> bool:
        """Whether the barrier opened; False where the epoch has ended, or the time is over."""
        if self._joined[0] != epoch:
            self._host_groups(epoch, place)
            count = self._state.join(epoch, self._worker, place.global_rank)
            self._joined = (epoch, count)
            self._watch.want(epoch)
        is_counted = self._joined[1] <= place.world_size
        if self._joined[1] == place.world_size:
            self._state.open_barrier(epoch)
        for pause_s in _pauses(deadline, _backstop_s(place)):
            barrier = self._state.barrier(epoch)
            if barrier is BarrierState.BROKEN:
                self._state.settle(epoch)
                return False
            if barrier is BarrierState.OPEN and is_counted:
                return True
            # Who comes on top of a full world read an old epoch: it waits for the next one.
            if not is_counted and self._state.current() != epoch:
                return False
            if barrier is None:
                self._state.fault(epoch)  # settles what a reporter began and did not end
            wait = self._watch.wait_barrier if is_counted else self._watch.wait_end
            wait(epoch, pause_s)
        return False

    def _host_groups(self, epoch: int, place: RankInfo) -> None:
        """Host a store for the epoch's process groups: an older one holds keys of old groups."""
        if self._master is not None and place.global_rank == 0:
            self._hosted = TcpHost(self._master)
            self._state.announce_master(epoch, f"{self._master}:{self._hosted.port}")

    def _begun(self, epoch: int, place: RankInfo) -> Epoch:
        if self._master is None:
            return Epoch(epoch)
        address = self._state.master(epoch)
        variables: dict[str, str] = {}
        if address is not None:
            host, _, port = address.rpartition(":")
            variables = {
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(epoch),
            }
        update_environment({**environment_of(place), **variables})
        return Epoch(epoch, tuple(variables.items()))

    def _assigned(self, timeout_s: float | None) -> RankInfo:
        self._state.note_ready(self._worker)
        self._waiting_state.wait_place(self._worker, timeout_s)
        place = self._state.place(self._worker)
        if place is None:
            raise PeerTimeoutError(
                None, f"worker {self._worker}: expected a rank in {timeout_s:g} s, got none"
            )
        return place

    def _timed_out(self, epoch: int, what: str, ranks: tuple[int, ...]) -> PeerTimeoutError:
        names = ", ".join(map(str, ranks[:_MAX_NAMED])) or "none"
        if len(ranks) > _MAX_NAMED:
            names += f" and {len(ranks) - _MAX_NAMED} more"
        return PeerTimeoutError(
            ranks[0] if ranks else None,
            f"epoch {epoch}: not all ranks have {what} in time; missing: {names}",
        )


def _backstop_s(place: RankInfo) -> float:
    """The longest pause between two looks at the store.

    The watch reports all but what a process left half done when it died. The pause grows with the
    world, so that the store can answer all ranks.
    """
    return max(_LEAST_BACKSTOP_S, place.world_size / _MAX_QUESTIONS_PER_S)


def _pauses(deadline: float, longest_s: float) -> Iterator[float]:
    """How long to wait before the next look, longer and longer; 0 once the deadline has passed."""
    pause_s = _FIRST_PAUSE_S
    while (left_s := deadline - time.monotonic()) > 0:
        yield min(pause_s, left_s)
        pause_s = min(longest_s, pause_s * 2)
    yield 0.0


class FaultWatch:
    """Waits for barriers and faults of epochs on a thread, and settles their ends.

    One connection waits for one key at a time: for the barrier of an epoch, which any end of it
    breaks, and then for its end.

    The thread waits for an epoch only once it is wanted: a thread that returned from the store
    while the interpreter exits would abort the process.

    Args:
        store: a connection of its own; it is blocked all the time.
        first_epoch: see RestartState.

    Attributes:
        start: the first epoch that it watches.

    Its ``wait_*`` methods raise PeerLostError if the store is gone, or this has been closed.
    """

    def __init__(self, store: TcpKeyValues, first_epoch: int) -> None:
        self._store = store
        self._state = RestartState(store, first_epoch)
        self._ended: dict[int, Fault | None] = {}
        self._lost: CheckpointError | None = None
        self._changed = threading.Condition()
        self._next = self.start = self._state.current()
        self._wanted = self._decided = self._next - 1
        self._thread = threading.Thread(
            target=self._follow, name="dist-ckpt-fault-watch", daemon=True
        )
        self._thread.start()

    def want(self, epoch: int) -> None:
        """Watch this epoch, and all before it."""
        with self._changed:
            self._wanted = max(self._wanted, epoch)
            self._changed.notify_all()

    def wait_barrier(self, epoch: int, timeout_s: float) -> bool:
        """Whether the barrier of a watched epoch is known to be open or broken in time."""
        return self._waited(lambda: self._decided >= epoch, timeout_s)

    def wait_end(self, epoch: int, timeout_s: float) -> bool:
        """Whether a watched epoch has ended in time, by a fault or because all have finished it."""
        return self._waited(lambda: epoch in self._ended, timeout_s)

    def wait_fault(self, epoch: int, timeout_s: float) -> Fault | None:
        """The fault that ended an epoch, from ``start`` on; None where there is none in time."""
        self.want(epoch)
        self._waited(lambda: self._ended.get(epoch) is not None, timeout_s)
        return self._ended.get(epoch)

    def close(self) -> None:
        """Wake up who waits here. The thread itself ends with its epoch, or with the store."""
        with self._changed:
            self._lost = self._lost or PeerLostError(None, "this coordinator has been closed")
            self._changed.notify_all()
        self._store.close()

    def _waited(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not is_so():
                left_s = deadline - time.monotonic()
                if self._lost is not None:
                    raise PeerLostError(None, self._lost.message) from self._lost
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    def _follow(self) -> None:
        try:
            while self._is_wanted():
                if self._decided < self._next:
                    if self._state.wait_barrier(self._next):
                        with self._changed:
                            self._decided = self._next
                            self._changed.notify_all()
                elif self._state.wait_end(self._next):
                    fault = self._state.fault(self._next)
                    with self._changed:
                        self._ended[self._next] = fault
                        self._next += 1
                        self._changed.notify_all()
        except CheckpointError as error:
            with self._changed:
                self._lost = self._lost or error
                self._changed.notify_all()

    def _is_wanted(self) -> bool:
        """True once the next epoch is wanted, False once this is closed."""
        with self._changed:
            while self._wanted < self._next and self._lost is None:
                self._changed.wait()
            return self._lost is None


def coordinator_from_environment() -> Coordinator:
    """The rendezvous client of this process, whose heartbeats begin with this call.

    Under ``dist-ckpt run`` it uses the supervisor's store, under torchrun the agent's. Torchrun
    reports exceptions only: when a process dies, it restarts them all. Without either, and with no
    WORLD_SIZE above 1, the job is this process alone.

    ``barrier`` sets the variables of the attempt in this process's environment, so that
    ``init_process_group`` finds the other ranks.

    Raises:
        StrategyError: the environment names none of these.
        PeerLostError: the launcher's store does not answer.
    """
    launch = launch_from_environment()
    start_heartbeat(launch)
    if launch.address is None:
        own = TcpHost()
        alone = RankInfo(0, 0, 1, 1)
        return StoreCoordinator(TcpKeyValues(own.host, own.port), launch.worker, alone, host=own)
    host, port = launch.address
    prefix, first_epoch = KEY_PREFIX, 1
    place: RankInfo | None = None
    if launch.rank is not None:
        world_size, local_rank, local_world_size = world_from_environment()
        place = RankInfo(launch.rank, local_rank, world_size, local_world_size)
        # The agent's store outlives the processes: keys and epochs differ by attempt.
        prefix = f"{KEY_PREFIX}{launch.attempt}/"
        first_epoch = launch.attempt * _EPOCHS_PER_ATTEMPT + 1
    silence_s = min(_LONGEST_SILENCE_S, options_from_environment().timeout_s)
    store = TcpKeyValues(host, port, prefix=prefix, timeout_s=silence_s)
    return StoreCoordinator(store, launch.worker, place, first_epoch=first_epoch, master=host)
