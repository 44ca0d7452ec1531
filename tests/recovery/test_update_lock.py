"""The lock around updates: who holds it, and that waiting for it can be interrupted."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import pytest

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.recovery import ParameterUpdateLock


class HeardError(Exception):
    """Raised by the signal's handler."""


def in_a_thread(body: object) -> None:
    assert callable(body)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_giving_it_back_without_having_it_and_taking_it_twice_are_refused() -> None:
    lock, own = ParameterUpdateLock(), threading.get_ident()
    with pytest.raises(RestartError, match="held by no thread"):
        lock.release()
    with lock:
        assert lock.held_by(own)
        with pytest.raises(RestartError, match="by this thread already"):
            lock.acquire()
    assert not lock.locked()
    in_a_thread(lock.acquire)
    with pytest.raises(RestartError, match="it is held by thread"):
        lock.release()
    assert lock.locked()
    assert not lock.held_by(own)


def test_a_signal_interrupts_the_wait_and_leaves_the_lock_to_its_owner() -> None:
    lock = ParameterUpdateLock()
    in_a_thread(lock.acquire)

    def handler(_signal: int, _frame: FrameType | None) -> None:
        raise HeardError

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGUSR1))
    started = time.monotonic()
    try:
        timer.start()
        with pytest.raises(HeardError):
            lock.acquire()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)

    assert time.monotonic() - started < 60
    assert not lock.held_by(threading.get_ident())
