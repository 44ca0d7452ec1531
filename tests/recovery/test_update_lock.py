"""The lock around updates: who holds it, and that waiting for it can be interrupted."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.recovery import ParameterUpdateLock


def taken_by_another_thread() -> ParameterUpdateLock:
    lock = ParameterUpdateLock()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lock.acquire).result()
    return lock


def test_giving_it_back_without_having_it_and_taking_it_twice_are_refused() -> None:
    lock, own = ParameterUpdateLock(), threading.get_ident()
    with pytest.raises(RestartError, match="held by no thread"):
        lock.release()
    with lock:
        assert lock.held_by(own)
        with pytest.raises(RestartError, match="by this thread already"):
            lock.acquire()
    assert not lock.locked()
    lock = taken_by_another_thread()
    with pytest.raises(RestartError, match="it is held by thread"):
        lock.release()
    assert lock.locked()
    assert not lock.held_by(own)


@pytest.mark.timeout(60)
def test_a_signal_interrupts_the_wait_and_leaves_the_lock_to_its_owner() -> None:
    lock = taken_by_another_thread()
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    timer = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)

    assert not lock.held_by(threading.get_ident())
