"""HPWrapper on one rank, without process groups."""

import datetime as dt
import gc
import importlib.util
import multiprocessing
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.async_utils import TemporalAsyncCaller

from dist_ckpt_strategies.errors import MissingDependencyError, RestartError, StrategyError
from dist_ckpt_strategies.inprocess.abort import (
    CheckpointlessAbortManager,
    Compose,
    HPAbortTorchDistributed,
)
from dist_ckpt_strategies.inprocess.attempt import SIGNAL, Interrupter, RankShouldRestart
from dist_ckpt_strategies.inprocess.finalize import CheckpointlessFinalizeCleanup, memory_in_use
from dist_ckpt_strategies.inprocess.health_check import HPState
from dist_ckpt_strategies.inprocess.rendezvous import Fault, FaultMode
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper, HPWrapper
from dist_ckpt_strategies.recovery import CheckpointManager
from tests.support.leaks import threads_left


def wrapper(**settings: Any) -> HPWrapper:
    """Of a script started on its own: a world of one."""
    return HPWrapper(barrier_timeout_s=60, **settings)


def fails_once(call: HPCallWrapper) -> int:
    if call.num_attempts == 1:
        raise ValueError("once")
    return call.num_attempts


def test_a_wrapper_that_is_not_enabled_gives_the_function_back() -> None:
    assert HPWrapper(enabled=False)(fails_once) is fails_once


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"abort_timeout": dt.timedelta(seconds=60)}, r"abort_timeout: .* found .*timedelta"),
        ({"abort_timeout": -1}, "abort_timeout: .* found -1"),
        ({"progress_timeout_s": 0}, "progress_timeout_s: .* found 0"),
        ({"barrier_timeout_s": None}, "barrier_timeout_s: .* found None"),
        ({"finish_timeout_s": float("nan")}, "finish_timeout_s: .* found nan"),
        ({"max_attempts": 0}, "max_attempts: .* found 0"),
        ({"max_idle_attempts": 1.5}, "max_idle_attempts: .* found 1.5"),
        ({"abort": HPAbortTorchDistributed}, r"abort: .* write HPAbortTorchDistributed\(\)"),
        ({"finalize": CheckpointlessFinalizeCleanup}, "finalize: .*found the class"),
        ({"health_check": 5}, "health_check: .* found 5"),
        ({"hp_api_factory": 5}, "hp_api_factory: .* found 5"),
    ],
)
def test_settings_that_would_fail_at_the_first_fault_are_refused_at_once(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        HPWrapper(**settings)


def in_optional(call: Optional[HPCallWrapper] = None) -> Any:  # noqa: UP045 - as users do
    return call


def in_text(call: HPCallWrapper | None = None) -> Any:
    return call


@pytest.mark.parametrize("block", [in_optional, in_text])
def test_the_call_is_given_by_the_annotation_unless_the_caller_gives_one(block: Any) -> None:
    mine = HPCallWrapper(wrapper())

    assert wrapper()(block).__name__ == block.__name__
    assert wrapper()(block)(call=mine) is mine
    assert isinstance(wrapper()(block)(), HPCallWrapper)
    assert wrapper()(lambda call=None: call)() is None
    assert wrapper()(dict)() == {}


def noting(calls: list[str], name: str) -> Any:
    """A part that is given the state, and perhaps an error."""

    def part(state: HPState, *errors: BaseException | None) -> Any:
        calls.append(f"{name} {state.attempt} {errors or ''}")
        return (state, *errors) if errors else state

    return part


def test_parts_are_called_in_order() -> None:
    calls: list[str] = []
    parts = {name: noting(calls, name) for name in ("abort", "finalize", "health_check")}

    class Manager:
        def on_fault(self, fault: Fault) -> None:
            calls.append(f"fault {fault.restart_round}: {fault.why}")

    assert wrapper(**parts, checkpoint_manager=Manager())(fails_once)() == 2
    assert calls == [
        "abort 1 ",
        "fault 1: ValueError: once",
        "finalize 1 ",
        "health_check 1 (ValueError('once'),)",
    ]


@pytest.mark.parametrize("is_early", [False, True])
def test_communication_is_ended_first_where_that_is_asked_for(is_early: bool) -> None:
    calls: list[str] = []

    class Groups(HPAbortTorchDistributed):
        def __call__(self, state: HPState) -> HPState:
            calls.append("groups")
            return super().__call__(state)

    abort = Compose(Groups(), noting(calls, "loaders"))
    assert wrapper(abort=abort, early_abort_communicator=is_early)(fails_once)() == 2
    assert calls == (["groups", "loaders 1 "] if is_early else ["loaders 1 ", "groups"])


def failing(state: HPState, *_: Any) -> Any:
    raise RestartError("unfit")


@pytest.mark.parametrize("abort", [failing, None])
def test_an_abort_that_fails_does_not_end_the_restart(abort: Any) -> None:
    assert wrapper(abort=abort)(fails_once)() == 2


@pytest.mark.parametrize("leaving", [KeyboardInterrupt(), SystemExit(0), SystemExit(3)], ids=repr)
@pytest.mark.slow
def test_an_exit_of_the_process_is_not_delayed(leaving: BaseException) -> None:
    def block() -> None:
        raise leaving

    with pytest.raises(type(leaving)) as found:
        wrapper()(block)()
    assert found.value is leaving


def test_errors_of_the_health_check_leave_the_call() -> None:
    with pytest.raises(RestartError, match="unfit"):
        wrapper(health_check=failing)(fails_once)()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_attempts": 1}, "1 attempts, 1 allowed; the last: rank 0: exc"),
        ({}, r"3 attempts in a row .* ValueError: always"),
    ],
)
def test_a_block_that_fails_every_time_is_not_run_for_ever(
    settings: dict[str, Any], why: str
) -> None:
    def fails() -> None:
        raise ValueError("always")

    with pytest.raises(RestartError, match=why):
        wrapper(**settings)(fails)()


@pytest.mark.slow
def test_attempts_that_do_a_step_are_not_idle_and_steps_are_counted_anew() -> None:
    found: list[int] = []

    def fails_often(call: HPCallWrapper) -> str:
        found.append(call.step_upon_restart)
        if len(found) % 3:
            call.step_upon_restart += 1
        if len(found) < 12:
            raise ValueError
        return "done"

    assert wrapper()(fails_often)() == "done"
    assert found == [0] * 12


@pytest.mark.slow
def test_a_block_without_progress_is_interrupted_and_one_that_tells_of_it_is_not() -> None:
    calls: list[float] = []

    def block(call: HPCallWrapper) -> Any:
        if call.last_fault is None:
            for _ in range(40):
                call.ping()
                time.sleep(0.1)
            calls.append(time.monotonic())
            time.sleep(100)
        return call.last_fault

    assert wrapper(progress_timeout_s=3.0)(block)().mode is FaultMode.HANG
    assert time.monotonic() - calls[0] < 60


def swallowing(call: Any) -> None:
    """What ignores the first interruption, as a careless ``except`` does."""
    with suppress(BaseException):
        time.sleep(60)
    call.whole = True


def importing(call: Any) -> None:
    """A module of which half was run would stay like that as long as the process lives."""
    call.whole = importlib.import_module("takes_long_to_import").whole


@pytest.mark.slow
@pytest.mark.parametrize("is_early", [True, False])
def test_the_block_is_interrupted_before_or_after_what_the_abort_does(is_early: bool) -> None:
    found: list[bool] = []
    is_aborted = threading.Event()

    def abort(state: HPState) -> HPState:
        until = time.monotonic() + (30 if is_early else 0.5)
        while not found and time.monotonic() < until:
            time.sleep(0.01)
        is_aborted.set()
        return state

    def block(call: HPCallWrapper) -> None:
        if call.num_attempts == 1:
            try:
                time.sleep(60)
            finally:
                found.append(is_aborted.is_set())

    parts: Any = Compose(abort, HPAbortTorchDistributed())  # the last one is called first
    wrapper(progress_timeout_s=0.5, abort=parts, async_raise_before_abort=is_early)(block)()

    assert found == [not is_early]


def updating(call: Any) -> None:
    with call.wrapper.checkpoint_manager.parameter_update_lock:
        time.sleep(1.0)
        call.whole = True


def called_from_native_code(call: Any) -> None:
    def _extract_tensors() -> None:
        time.sleep(1.0)
        call.whole = True

    _extract_tensors()


@pytest.mark.slow
@pytest.mark.parametrize("what", [swallowing, importing, updating, called_from_native_code])
def test_code_that_must_not_be_interrupted_is_completed_and_then_the_block_is_left(
    what: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "takes_long_to_import.py").write_text("import time\ntime.sleep(2.5)\nwhole = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "takes_long_to_import", raising=False)
    before = signal.getsignal(SIGNAL)

    def block(call: HPCallWrapper) -> bool:
        if call.num_attempts == 1:
            what(call)
            time.sleep(60)
        return bool(vars(call)["whole"])

    assert wrapper(progress_timeout_s=0.5, checkpoint_manager=CheckpointManager())(block)()
    assert signal.getsignal(SIGNAL) is before


@pytest.mark.slow
def test_no_interruption_comes_after_the_block_has_returned() -> None:
    """A thousand blocks that return about when the signal comes: never an exception outside.

    After a block that was interrupted the next one is shorter, else longer: so the signal comes
    near the end of the block, however busy the machine is.
    """
    interrupter, fault = Interrupter(), Fault(1, 7, FaultMode.EXCEPTION, "a test")
    num_interrupted, length_s = 0, 1e-4
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with interrupter.installed():
            for _ in range(400):
                interrupter.prepare()
                thread = threading.Thread(target=interrupter.interrupt, args=(fault, 60))
                thread.start()
                until = time.perf_counter() + length_s
                try:
                    interrupter.guarded(lambda: busy_until(until))  # noqa: B023 - called at once
                    length_s = min(0.1, length_s * 1.3)
                except RankShouldRestart:
                    num_interrupted += 1
                    length_s = max(1e-6, length_s / 1.3)
                thread.join()
    finally:
        sys.setswitchinterval(switch_s)
    assert 0 < num_interrupted < 400


def busy_until(until: float) -> None:
    while time.perf_counter() < until:
        pass


def test_what_an_interrupted_block_has_set_for_the_process_is_as_before_in_the_next() -> None:
    found, hook = [], sys.excepthook

    def block(call: HPCallWrapper) -> None:
        found.append((torch.is_grad_enabled(), sys.excepthook))
        if call.num_attempts == 1:
            torch.set_grad_enabled(False)
            sys.excepthook = partial(hook)  # as init_process_group does
            raise ValueError("once")

    wrapper()(block)()

    assert found == [(True, hook)] * 2


def test_a_block_outside_the_main_thread_is_refused() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(StrategyError, match="main thread"):
        pool.submit(wrapper()(fails_once)).result()


@pytest.mark.slow
def test_memory_and_cycles_of_an_attempt_are_gone_in_the_next() -> None:
    resident: list[int] = []
    kept: list[torch.Tensor] = []
    left: list[weakref.ref[torch.nn.Module]] = []

    def block(call: HPCallWrapper) -> None:
        assert all(one() is None for one in left)
        resident.append(memory_in_use()[0])
        found = [torch.ones(24_000) for _ in range(1000)]
        kept.extend(found[::50])
        model = torch.nn.Linear(4000, 4000)
        vars(model)["itself"] = model
        left.append(weakref.ref(model))
        if call.num_attempts < 3:
            raise ValueError("again")

    wrapper()(block)()

    assert resident[2] - resident[0] < 30 << 20
    assert memory_in_use()[0] - resident[2] > 60 << 20


@pytest.mark.slow
def test_groups_made_before_the_call_are_ended_and_the_users_frozen_objects_stay_frozen() -> None:
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    items: Any = range(100)
    try:
        loader = torch.utils.data.DataLoader(
            items, num_workers=2, collate_fn=lambda _: time.sleep(60)
        )
        loading: Any = iter(loader)
        saving = TemporalAsyncCaller()
        saving.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        saving.process.start()
        abort = CheckpointlessAbortManager.get_default_checkpointless_abort()

        assert wrapper(abort=abort)(fails_once)() == 2
        for process in [*loading._workers, saving.process]:
            process.join(30)
            assert process.exitcode == -9
        assert gc.get_freeze_count() > 0.9 * num_frozen  # some have been deleted
    finally:
        gc.unfreeze()


def test_the_methods_can_be_called_one_by_one() -> None:
    call = HPCallWrapper(wrapper())

    call.initialize_barrier()
    call.start_hp_fault_handling_thread()
    with pytest.raises(RankShouldRestart) as raised:
        call.launch(fails_once, call)
    call.restart(raised.value)
    call.initialize_barrier()
    call.start_hp_fault_handling_thread()
    assert call.launch(fails_once, call) == 2
    assert call.last_fault.why == "ValueError: once"
    call.shutdown()
    call.shutdown()
    with pytest.raises(RestartError, match="no attempt is running"):
        HPCallWrapper(wrapper()).handle_fn_exception(ValueError("x"))


def test_a_function_that_returns_before_it_runs_is_refused() -> None:
    def steps() -> Iterator[int]:
        yield 1

    async def train() -> None:
        pass

    for function in (steps, train):
        with pytest.raises(StrategyError, match=f"{function.__name__}.*wrap a plain function"):
            wrapper()(function)


@pytest.mark.skipif(importlib.util.find_spec("viztracer") is not None, reason="it is installed")
def test_a_trace_needs_its_library() -> None:
    with pytest.raises(MissingDependencyError, match="pip install viztracer"):
        HPWrapper(trace_file_path="trace.json")


def test_nothing_of_a_call_is_left() -> None:
    before = threading.enumerate()
    wrapper()(fails_once)()

    assert threads_left(before) == []
