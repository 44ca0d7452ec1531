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


def test_the_thread_that_holds_the_lock_is_known() -> None:
    lock = ParameterUpdateLock()
    own = threading.get_ident()
    assert not lock.held_by(own)
    with lock:
        assert lock.held_by(own)
        assert not lock.held_by(own + 1)
    assert not lock.locked()


def in_a_thread(body: object) -> None:
    assert callable(body)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_another_thread_gets_it_only_once_it_is_free() -> None:
    lock, got = ParameterUpdateLock(), list[bool]()
    with lock:
        in_a_thread(lambda: got.append(lock.acquire(timeout_s=0.02)))
    in_a_thread(lambda: got.append(lock.acquire(timeout_s=60)))

    assert got == [False, True]


def test_giving_back_what_another_thread_holds_is_refused_by_name() -> None:
    lock = ParameterUpdateLock()
    in_a_thread(lock.acquire)

    with pytest.raises(RestartError, match="it is held by thread"):
        lock.release()
    assert lock.locked()


def test_giving_back_what_nobody_holds_and_taking_it_twice_are_refused() -> None:
    lock = ParameterUpdateLock()
    with pytest.raises(RestartError, match="held by no thread"):
        lock.release()
    with lock, pytest.raises(RestartError, match="by this thread already"):
        lock.acquire()


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
