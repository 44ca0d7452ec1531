"""Taking a thread out of a block, wherever it is."""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from dist_ckpt_strategies.inprocess.coordinator import Fault, FaultMode
from dist_ckpt_strategies.inprocess.interruption import SIGNAL, Interrupter, RankShouldRestart

FAULT = Fault(1, 7, FaultMode.EXCEPTION, "a test")
LIMIT_S = 60.0


@contextmanager
def interrupted_after(
    interrupter: Interrupter, delay_s: float, has_begun: Callable[[], bool] = lambda: True
) -> Iterator[Future[bool]]:
    """Another thread interrupts so long after what must have begun; whether the block was left."""
    found: Future[bool] = Future()

    def interrupt() -> None:
        while not has_begun():
            time.sleep(0.001)
        time.sleep(delay_s)
        found.set_result(interrupter.interrupt(FAULT, LIMIT_S))

    interrupter.prepare()
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield found
    finally:
        interrupter.leave()
        thread.join()


def require_interrupted(
    block: Callable[[], None], has_begun: Callable[[], bool], lock: Lock | None = None
) -> None:
    """The block is left by an exception, soon after it has begun."""
    interrupter = Interrupter(lock)
    before = signal.getsignal(SIGNAL)
    with (
        interrupter.installed(),
        interrupted_after(interrupter, 0.02, has_begun) as left,
        pytest.raises(RankShouldRestart) as found,
    ):
        interrupter.guarded(block)
    assert found.value.fault == FAULT
    assert left.result()
    assert signal.getsignal(SIGNAL) is before


def swallowing() -> None:
    """What ignores the first interruption, as a careless ``except`` does."""
    try:
        time.sleep(60)
    except BaseException:  # noqa: BLE001 - the point of it
        logging.getLogger(__name__).debug("swallowed")
    time.sleep(60)


def test_a_block_that_swallows_an_interruption_is_interrupted_again() -> None:
    require_interrupted(swallowing, lambda: True)


def test_no_interruption_comes_after_the_block_has_returned() -> None:
    """A thousand blocks that return about when the signal comes: never an exception outside.

    Who was interrupted returns earlier the next time, who was not later: whatever else the machine
    does, the end of the block stays where the signal comes.
    """
    interrupter = Interrupter()
    num_interrupted = 0
    length_s = 1e-4
    with interrupter.installed(), switching_often():
        for _ in range(1000):
            with interrupted_after(interrupter, 0.0) as left:
                until = time.perf_counter() + length_s
                try:
                    interrupter.guarded(lambda: busy_until(until))  # noqa: B023 - called at once
                    length_s = min(0.1, length_s * 1.3)
                except RankShouldRestart:
                    num_interrupted += 1
                    length_s = max(1e-6, length_s / 1.3)
                assert left.result(LIMIT_S)
    assert 0 < num_interrupted < 1000


@contextmanager
def switching_often() -> Iterator[None]:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def busy_until(until: float) -> None:
    while time.perf_counter() < until:
        pass


class Lock:
    def __init__(self) -> None:
        self.owner: int | None = None

    def held_by(self, thread_id: int) -> bool:
        return self.owner == thread_id


def test_an_update_under_the_lock_is_not_interrupted() -> None:
    lock = Lock()
    steps: list[str] = []

    def update() -> None:
        lock.owner = threading.get_ident()
        time.sleep(0.3)
        steps.append("updated")
        lock.owner = None
        time.sleep(60)

    require_interrupted(update, lambda: lock.owner is not None, lock)
    assert steps == ["updated"]


def test_a_block_that_is_not_left_is_reported() -> None:
    lock = Lock()
    lock.owner = threading.get_ident()
    interrupter = Interrupter(lock)
    with interrupter.installed():
        interrupter.prepare()
        found: Future[bool] = Future()
        thread = threading.Thread(
            target=lambda: found.set_result(interrupter.interrupt(FAULT, 0.1))
        )
        thread.start()
        interrupter.guarded(lambda: found.result(LIMIT_S))
        thread.join()

    assert found.result() is False


def test_an_import_is_not_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of which half was run would stay like that as long as the process lives."""
    name = "takes_long_to_import"
    (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(2.5)\nwhole = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def block() -> None:
        importlib.import_module(name)
        time.sleep(60)

    require_interrupted(block, lambda: name in sys.modules)
    assert sys.modules[name].whole


def test_what_torch_calls_from_native_code_is_not_broken_off() -> None:
    steps: list[str] = []

    def _extract_tensors() -> None:
        steps.append("begun")
        time.sleep(0.2)
        steps.append("extracted")

    def block() -> None:
        _extract_tensors()
        time.sleep(60)

    require_interrupted(block, lambda: bool(steps))
    assert steps == ["begun", "extracted"]
