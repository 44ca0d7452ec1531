"""A thread that waits for what becomes of one epoch after the other: nobody has to keep asking."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from dist_ckpt_strategies.comm.key_values import KeyValues
from dist_ckpt_strategies.errors import CheckpointError, PeerLostError
from dist_ckpt_strategies.inprocess.coordinator import Fault
from dist_ckpt_strategies.inprocess.epoch_book import EpochBook


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
