"""The coordinator over a store that the launcher hosts; docs/design/recovery.md has the keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from dist_ckpt_strategies.comm.key_values import KeyValues, TcpHost
from dist_ckpt_strategies.errors import CheckpointError, PeerLostError, PeerTimeoutError
from dist_ckpt_strategies.inprocess.coordinator import (
    Epoch,
    Fault,
    FaultMode,
    RankInfo,
    assignment_key,
    rank_info_from_text,
    ready_key,
)
from dist_ckpt_strategies.inprocess.epoch_book import BarrierState, EpochBook, FinishState

_FIRST_PAUSE_S = 0.001
_MAX_QUESTIONS_PER_S = 2000
"""What all ranks together ask of the store while they wait for its news all the same."""

_LEAST_BACKSTOP_S = 0.25
_MAX_NAMED = 64


class StoreCoordinator:
    """One worker's Coordinator. Both of its connections are made here, none later.

    Args:
        store: of the job.
        worker: what the supervisor calls this process.
        place: in the job; None: the supervisor says, under ``assign/<worker>``.
        first_epoch: number of the first epoch; the same for all.
        master: address at which rank 0 hosts, for each attempt, a store for its process groups;
            None: it hosts none.

    Raises:
        PeerLostError: the store does not answer.
    """

    def __init__(
        self,
        store: KeyValues,
        worker: str,
        place: RankInfo | None = None,
        *,
        first_epoch: int = 1,
        master: str | None = None,
    ) -> None:
        self._store = store
        self._worker = worker
        self._place = place
        self._book = EpochBook(store, first_epoch)
        self._waiting = store.another()
        self._watch = FaultWatch(self._waiting, first_epoch)
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
            epoch = self._book.current()
            if self._passes(epoch, place, deadline):
                return Epoch(epoch, self._meeting_place(epoch))
            if time.monotonic() > deadline:
                raise self._timed_out(epoch, "joined", self._book.missing(epoch, place.world_size))

    def wait_fault(self, epoch: int, timeout_s: float) -> Fault | None:
        """See Coordinator."""
        if epoch < self._watch.start:
            return self._book.fault(epoch)
        return self._watch.wait_fault(epoch, timeout_s)

    def report(self, global_rank: int | None, epoch: int, mode: FaultMode, why: str) -> None:
        """See Coordinator."""
        self._book.end(Fault(global_rank, epoch, mode, why))

    def finish(self, epoch: int, timeout_s: float) -> bool:
        """See Coordinator."""
        place = self.wait_rank(timeout_s)
        if self._returned[0] != epoch:
            self._returned = (epoch, self._book.count_return(epoch, place.global_rank))
        if self._returned[1] == place.world_size:
            self._book.mark_done(epoch)
        for pause_s in _pauses(time.monotonic() + timeout_s, _backstop_s(place)):
            if self._book.finish(epoch) is not None:
                is_done = self._book.settle(epoch) is FinishState.DONE
                self._watch.wait_end(epoch, timeout_s)
                return is_done
            self._watch.wait_end(epoch, pause_s)
        late = self._book.unfinished(epoch, place.world_size)
        raise self._timed_out(epoch, "returned from the block", late)

    def close(self) -> None:
        """See Coordinator."""
        self._watch.close()
        self._store.close()

    def _passes(self, epoch: int, place: RankInfo, deadline: float) -> bool:
        """Whether the barrier opened; False where the epoch has ended, or the time is over."""
        if self._joined[0] != epoch:
            self._host_meeting(epoch, place)
            count = self._book.join(epoch, self._worker, place.global_rank)
            self._joined = (epoch, count)
            self._watch.want(epoch)
        is_counted = self._joined[1] <= place.world_size
        if self._joined[1] == place.world_size:
            self._book.open_barrier(epoch)
        for pause_s in _pauses(deadline, _backstop_s(place)):
            barrier = self._book.barrier(epoch)
            if barrier is BarrierState.BROKEN:
                self._book.settle(epoch)
                return False
            if barrier is BarrierState.OPEN and is_counted:
                return True
            # Who comes on top of a full world read an old epoch: it waits for the next one.
            if not is_counted and self._book.current() != epoch:
                return False
            if barrier is None:
                self._book.fault(epoch)  # settles what a reporter began and did not end
            wait = self._watch.wait_barrier if is_counted else self._watch.wait_end
            wait(epoch, pause_s)
        return False

    def _host_meeting(self, epoch: int, place: RankInfo) -> None:
        """Where process groups met before, keys of then are left: each attempt has a new store."""
        if self._master is not None and place.global_rank == 0:
            self._hosted = TcpHost(self._master)
            self._book.announce_master(epoch, f"{self._master}:{self._hosted.port}")

    def _meeting_place(self, epoch: int) -> tuple[tuple[str, str], ...]:
        address = None if self._master is None else self._book.master(epoch)
        if address is None:
            return ()
        host, _, port = address.rpartition(":")
        return (
            ("MASTER_ADDR", host),
            ("MASTER_PORT", port),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("TORCHELASTIC_RESTART_COUNT", str(epoch)),
        )

    def _assigned(self, timeout_s: float | None) -> RankInfo:
        self._store.write(ready_key(self._worker), "1")
        key = assignment_key(self._worker)
        self._waiting.wait(key, timeout_s)
        text = self._store.read(key)
        if text is None:
            raise PeerTimeoutError(
                None, f"worker {self._worker}: expected a rank in {timeout_s:g} s, got none"
            )
        return rank_info_from_text(text)

    def _timed_out(self, epoch: int, what: str, ranks: tuple[int, ...]) -> PeerTimeoutError:
        names = ", ".join(map(str, ranks[:_MAX_NAMED])) or "none"
        if len(ranks) > _MAX_NAMED:
            names += f" and {len(ranks) - _MAX_NAMED} more"
        return PeerTimeoutError(
            ranks[0] if ranks else None,
            f"epoch {epoch}: not all ranks have {what} in time; missing: {names}",
        )


def _backstop_s(place: RankInfo) -> float:
    """The longest pause between two questions that should not be needed.

    The watch hears of everything at once, but for what was done by halves by somebody who died
    over it. Not more questions a second than the store of a large world can answer.
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
    """Knows of barriers and faults of epochs as soon as there are any, and settles their ends.

    One connection waits for one key at a time: for the barrier of an epoch, which any end of it
    breaks, and then for its end.

    The thread waits for an epoch only once somebody wants it: a process whose last epoch is done
    can end without a thread that comes back from the store in the middle of that.

    Args:
        store: a connection that nobody else uses; it is blocked all the time.
        first_epoch: see EpochBook.
    """

    def __init__(self, store: KeyValues, first_epoch: int) -> None:
        self._store = store
        self._book = EpochBook(store, first_epoch)
        self._ended: dict[int, Fault | None] = {}
        self._lost: CheckpointError | None = None
        self._changed = threading.Condition()
        self._next = self._start = self._book.current()
        self._wanted = self._decided = self._next - 1
        self._thread = threading.Thread(
            target=self._follow, name="dist-ckpt-fault-watch", daemon=True
        )
        self._thread.start()

    @property
    def start(self) -> int:
        """The first epoch that it watches."""
        return self._start

    def want(self, epoch: int) -> None:
        """Watch this epoch, and all before it."""
        with self._changed:
            self._wanted = max(self._wanted, epoch)
            self._changed.notify_all()

    def wait_barrier(self, epoch: int, timeout_s: float) -> bool:
        """Whether the barrier of a watched epoch is known to be open or broken in time.

        Raises:
            PeerLostError: the store is gone, or this has been closed.
        """
        return self._waited(lambda: self._decided >= epoch, timeout_s)

    def wait_end(self, epoch: int, timeout_s: float) -> bool:
        """Whether a watched epoch has ended in time, by a fault or because all have finished it.

        Raises:
            PeerLostError: the store is gone, or this has been closed.
        """
        return self._waited(lambda: epoch in self._ended, timeout_s)

    def wait_fault(self, epoch: int, timeout_s: float) -> Fault | None:
        """The fault that ended an epoch, from ``start`` on; None where there is none in time.

        Raises:
            PeerLostError: the store is gone, or this has been closed.
        """
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
                    if self._book.wait_barrier(self._next):
                        self._note_barrier()
                elif self._book.wait_end(self._next):
                    self._note(self._book.fault(self._next))
        except CheckpointError as error:
            with self._changed:
                self._lost = self._lost or error
                self._changed.notify_all()

    def _is_wanted(self) -> bool:
        """True once somebody wants the next epoch; False once nobody can any more."""
        with self._changed:
            while self._wanted < self._next and self._lost is None:
                self._changed.wait()
            return self._lost is None

    def _note_barrier(self) -> None:
        with self._changed:
            self._decided = self._next
            self._changed.notify_all()

    def _note(self, fault: Fault | None) -> None:
        with self._changed:
            self._ended[self._next] = fault
            self._next += 1
            self._changed.notify_all()
