"""Runs a block of training again in place when a rank fails."""

from __future__ import annotations

import functools
import gc
import importlib.util
import logging
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dist_ckpt_strategies.comm.interruptible_gloo import register_interruptible_gloo
from dist_ckpt_strategies.comm.teardown import Communication, rendezvous_by_attempt
from dist_ckpt_strategies.config import update_environment
from dist_ckpt_strategies.errors import (
    MissingDependencyError,
    PeerError,
    RestartError,
    forget_frames,
    text_of,
)
from dist_ckpt_strategies.inprocess.abort import Abort, Compose, HPAbortTorchDistributed
from dist_ckpt_strategies.inprocess.attempt import Attempt, AttemptLimits, AttemptOptions
from dist_ckpt_strategies.inprocess.block import parameter_of, require_usable, without_argument
from dist_ckpt_strategies.inprocess.coordinator import Coordinator, RankInfo
from dist_ckpt_strategies.inprocess.finalize import (
    Finalize,
    MemoryLog,
    MemoryStatus,
    give_back_free_memory,
    release_cached_memory,
)
from dist_ckpt_strategies.inprocess.health_check import HealthCheck, HPState
from dist_ckpt_strategies.inprocess.interruption import Interrupter, RankShouldRestart

logger = logging.getLogger(__name__)

DEFAULT_ABORT_TIMEOUT_S = 60.0
"""Where ``abort_timeout`` is None: a rank that cannot be stopped must not be waited for."""

_FIRST_TELLER_S = 0.1
"""How long a broken connection waits to be explained by the fault that broke it."""


class HPWrapper:
    """Makes a function a block that is run again on every rank, in place, when a rank fails.

    ``@HPWrapper(...)`` above a function whose parameter annotated with HPCallWrapper, if it has
    one, is given the wrapper of the call.

    Args:
        abort: what is ended at once when a fault is heard; None: nothing, so the block has to end
            by itself.
        finalize: called with the state between two attempts; None for nothing.
        health_check: called with the state and what the block raised; what it raises itself ends
            this process. None for no check.
        hp_api_factory: makes the coordinator; None: the one that the environment names.
        abort_timeout: longest time from a fault until the block has been left, in seconds; then
            the process ends with code 86. None for 60.
        enabled: False: the function stays what it is.
        trace_file_path: where VizTracer writes a trace of the call.
        async_raise_before_abort: interrupt the block as soon as communication has ended; False:
            once all of ``abort`` is done.
        early_abort_communicator: end communication before all else that ``abort`` ends.
        checkpoint_manager: its ``parameter_update_lock`` protects updates from interruption, its
            ``on_fault(fault)`` and ``on_attempt(epoch)`` are called, where it has them.
        check_memory_status: log memory at each restart, and warn where it grows.
        coordinator: in place of one that ``hp_api_factory`` makes; it is not closed.
        barrier_timeout_s: longest wait for all ranks to join an epoch.
        finish_timeout_s: longest wait for all ranks to return from the block.
        max_attempts: of this process; None for any number.
        max_idle_attempts: after so many attempts in a row that this rank's own exception has
            ended, before a step was done, the process ends: what fails every time is not mended by
            trying again. A step is done where ``step_upon_restart`` grows, or the step of the
            ``checkpoint_manager``. None for any number.
        progress_timeout_s: longest time between two calls of ``ping`` in the block, the first
            counted from its start; None for any.

    Raises:
        StrategyError: a time or a count is no number above 0, or a part cannot be called.
        MissingDependencyError: a trace is asked for, and VizTracer is not installed.
    """

    def __init__(  # noqa: PLR0913 - as documented
        self,
        *,
        abort: Callable[[HPState], HPState] | None = Compose(HPAbortTorchDistributed()),  # noqa: B008 - as documented; it has no state
        finalize: Finalize | Callable[..., Any] | None = None,
        health_check: HealthCheck | Callable[..., Any] | None = None,
        hp_api_factory: Callable[[], Coordinator] | None = None,
        abort_timeout: float | None = None,
        enabled: bool = True,
        trace_file_path: str | None = None,
        async_raise_before_abort: bool = True,
        early_abort_communicator: bool = False,
        checkpoint_manager: Any = None,
        check_memory_status: bool = True,
        coordinator: Coordinator | None = None,
        barrier_timeout_s: float = 1800.0,
        finish_timeout_s: float = 7 * 86400.0,
        max_attempts: int | None = None,
        max_idle_attempts: int | None = 3,
        progress_timeout_s: float | None = None,
    ) -> None:
        self.abort = abort
        self.finalize = finalize
        self.health_check = health_check
        self.hp_api_factory = hp_api_factory
        self.abort_timeout = abort_timeout
        self.enabled = enabled
        self.trace_file_path = trace_file_path
        self.async_raise_before_abort = async_raise_before_abort
        self.early_abort_communicator = early_abort_communicator
        self.checkpoint_manager = checkpoint_manager
        self.check_memory_status = check_memory_status
        self.coordinator = coordinator
        self.barrier_timeout_s = barrier_timeout_s
        self.finish_timeout_s = finish_timeout_s
        self.max_attempts = max_attempts
        self.max_idle_attempts = max_idle_attempts
        self.progress_timeout_s = progress_timeout_s
        require_usable(self)
        if enabled and trace_file_path is not None:
            _require_viztracer()

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` as a block that is run again; ``fn`` itself where the wrapper is not enabled."""
        if not self.enabled:
            return fn

        @functools.wraps(fn)
        def wrapped(*a: Any, **kw: Any) -> Any:
            with self._traced():
                return HPCallWrapper(self).run(fn, a, kw)

        return wrapped

    def attempt_options(self) -> AttemptOptions:
        """How an attempt is stopped."""
        abort = self.abort
        if self.early_abort_communicator and isinstance(abort, Compose):
            abort = abort.with_first(HPAbortTorchDistributed)
        limit_s = DEFAULT_ABORT_TIMEOUT_S if self.abort_timeout is None else self.abort_timeout
        return AttemptOptions(
            abort, limit_s, self.async_raise_before_abort, self.progress_timeout_s
        )

    def open_coordinator(self) -> tuple[Coordinator, bool]:
        """The coordinator, and whether it is closed after the call."""
        if self.coordinator is not None:
            return self.coordinator, False
        if self.hp_api_factory is not None:
            return self.hp_api_factory(), True
        from dist_ckpt_strategies.inprocess.launched import (  # noqa: PLC0415 - only where asked
            coordinator_from_environment,
        )

        return coordinator_from_environment(), True

    @contextmanager
    def _traced(self) -> Iterator[None]:
        if self.trace_file_path is None:
            yield
            return
        from viztracer import VizTracer  # noqa: PLC0415 - optional

        with VizTracer(output_file=self.trace_file_path):
            yield


class HPCallWrapper:
    """One call of the block: attempt after attempt, until all ranks have returned from one.

    Args:
        wrapper: with the settings.

    Attributes:
        step_upon_restart: steps since the attempt began; for the block to count.
        num_attempts: that this process has taken part in.
        last_fault: what has ended the attempt before this one.
    """

    def __init__(self, wrapper: HPWrapper) -> None:
        self.wrapper = wrapper
        self.step_upon_restart = 0
        self._is_in_block = False
        self.num_attempts = 0
        self.last_fault: Any = None
        self._coordinator: Coordinator | None = None
        self._closes = False
        self._place: RankInfo | None = None
        self._epoch = 0
        self._first_step: int | None = None
        self._attempt: Attempt | None = None
        lock = getattr(wrapper.checkpoint_manager, "parameter_update_lock", None)
        self._interrupter = Interrupter(lock)
        self._limits = AttemptLimits(wrapper.max_attempts, wrapper.max_idle_attempts)
        self._memory = MemoryLog()
        give_back_free_memory()
        self._memory_before = MemoryStatus.take()
        self._records_gradients = torch.is_grad_enabled()

    def run(self, fn: Callable[..., Any], a: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """What ``fn`` returns in the first attempt that no fault ends.

        Raises:
            RestartLimitError: all attempts are used up.
            HealthCheckError: this process is not fit for another one.
            PeerTimeoutError: not all ranks joined, or returned, in time.
            PeerLostError: the coordinator does not answer.
        """
        self._open()
        kw = self._with_self(fn, a, kw)
        try:
            with (
                self._interrupter.installed(),
                rendezvous_by_attempt(lambda: self._epoch, self._note_store),
            ):
                while True:
                    outcome = self._attempted(fn, a, kw)
                    if outcome is not None:
                        return outcome.result()
        except BaseException as error:  # a request to leave the process gives up too
            if self._is_in_block:
                self._leave(error)
            raise
        finally:
            self.shutdown()

    def initialize_barrier(self) -> None:
        """Join the forming epoch; return once all ranks have."""
        epoch = self._asked().barrier(self.wrapper.barrier_timeout_s)
        self._epoch = epoch.number
        self.num_attempts += 1
        self.step_upon_restart = 0
        self._first_step = self._step()
        update_environment({"TORCHELASTIC_RESTART_COUNT": str(epoch.number)})
        self._is_in_block = True
        _call_hook(self.wrapper.checkpoint_manager, "on_attempt", epoch)

    def start_hp_fault_handling_thread(self) -> None:
        """Watch for faults from now on, and stop the block when there is one."""
        place = self._place
        assert place is not None  # noqa: S101 - known since the call was opened
        coordinator = self._asked()
        state = HPState(
            place.global_rank,
            place.world_size,
            self._epoch,
            self.num_attempts,
            communication=Communication(),
        )
        options = self.wrapper.attempt_options()
        self._attempt = Attempt(state, coordinator, self._interrupter, options)
        self._attempt.start()

    def launch(self, fn: Callable[..., Any], *a: Any, **kw: Any) -> Any:
        """What ``fn`` returns.

        Raises:
            RankShouldRestart: it raised, or a fault has interrupted it.
        """
        try:
            with self._interrupter.installed():
                return self._interrupter.guarded(lambda: fn(*a, **kw))
        except RankShouldRestart as interruption:
            if self._running().fault is None:  # raised by the block itself
                self.handle_fn_exception(interruption)
            raise
        except Exception as error:  # noqa: BLE001 - whatever the block raises is a fault
            self.handle_fn_exception(error)

    def handle_fn_exception(self, call_ex: BaseException) -> typing.NoReturn:
        """Report what the block has raised, unless it follows from a fault that is known.

        Raises:
            RankShouldRestart: always.
        """
        attempt = self._running()
        is_peers_fault = isinstance(call_ex, RuntimeError | PeerError | ConnectionError)
        if not attempt.hears_within(_FIRST_TELLER_S if is_peers_fault else 0.0):
            attempt.report(call_ex)
        logger.warning("the block raised %s: %s", type(call_ex).__name__, text_of(call_ex))
        attempt.wait_stopped()
        raise RankShouldRestart(attempt.fault) from call_ex

    def restart(self, term_ex: RankShouldRestart) -> None:
        """Clean up after an attempt, and make sure that this process is fit for another one.

        Raises:
            RestartLimitError, HealthCheckError: as ``run``.
        """
        attempt = self._running()
        self._is_in_block = False
        attempt.wait_stopped()
        self.last_fault = attempt.fault
        train_ex = term_ex.__cause__
        forget_frames(term_ex)
        if attempt.lost is not None:
            raise attempt.lost
        self._finalize(attempt)
        self._require_fit(attempt.state, train_ex)

    def shutdown(self) -> None:
        """Watch no longer, and give the coordinator up. Again does nothing."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None and self._closes:
            coordinator.close()

    def ping(self) -> None:
        """The block makes progress; see ``progress_timeout_s``."""
        if self._attempt is not None:
            self._attempt.ping()

    def _open(self) -> None:
        self._coordinator, self._closes = self.wrapper.open_coordinator()
        self._place = self._coordinator.wait_rank()
        register_interruptible_gloo()

    def _attempted(
        self, fn: Callable[..., Any], a: tuple[Any, ...], kw: dict[str, Any]
    ) -> _Outcome | None:
        """What the block came to; None where a fault has ended the attempt, and all is ready."""
        self.initialize_barrier()
        self.start_hp_fault_handling_thread()
        try:
            return self._finished(self._outcome(fn, a, kw))
        except RankShouldRestart as error:
            interruption = error
        self.restart(interruption)
        return None

    def _outcome(self, fn: Callable[..., Any], a: tuple[Any, ...], kw: dict[str, Any]) -> _Outcome:
        try:
            return _Outcome(self.launch(fn, *a, **kw))
        except SystemExit as leaving:
            if leaving.code not in {None, 0}:
                raise
            return _Outcome(None, leaving)

    def _finished(self, outcome: _Outcome) -> _Outcome:
        """The outcome, once all ranks have one."""
        attempt = self._running()
        self._is_in_block = False
        if not self._asked().finish(attempt.epoch, self.wrapper.finish_timeout_s):
            attempt.wait_stopped()
            raise RankShouldRestart(attempt.fault)
        return outcome

    def _leave(self, error: BaseException) -> None:
        """The block has been left for good: tell the others why, and end all communication.

        What is still under way in it, and a thread that waits for news of the epoch, would come
        back while the interpreter ends, and abort the process in the place of its own exit code.
        """
        attempt = self._running()
        try:
            if not attempt.hears_within(0.0):
                attempt.report(error)
            attempt.wait_stopped()
        except PeerError as lost:
            logger.warning("nobody is told that this rank leaves: %s", lost)
            return
        assert attempt.state.communication is not None  # noqa: S101 - made with the attempt
        attempt.state.communication.take_down()

    def _finalize(self, attempt: Attempt) -> None:
        # An interruption may come within torch.no_grad() before its body, which would undo it.
        torch.set_grad_enabled(self._records_gradients)
        _call_hook(self.wrapper.checkpoint_manager, "on_fault", attempt.fault)
        state = attempt.state
        assert state.communication is not None  # noqa: S101 - made with the attempt
        state.communication.take_down()
        if self.wrapper.finalize is not None:
            self.wrapper.finalize(state)
        give_back_free_memory()
        # Most of an attempt is freed without it. It goes through all objects of all libraries,
        # which takes longer than all else that a restart does.
        if MemoryStatus.take().has_leftovers(self._memory_before):
            gc.collect()
            give_back_free_memory()
        release_cached_memory()
        self._memory_before = MemoryStatus.take()
        if self.wrapper.check_memory_status:
            self._memory.note(self.num_attempts)

    def _note_store(self, store: Any) -> None:
        communication = self._running().state.communication
        assert communication is not None  # noqa: S101 - made with the attempt
        communication.note_store(store)

    def _require_fit(self, state: HPState, train_ex: BaseException | None) -> None:
        did_step = self.step_upon_restart > 0 or self._step() != self._first_step
        self._limits.require_another(state, did_step=did_step, train_ex=train_ex)
        if self.wrapper.health_check is not None:
            self.wrapper.health_check(state, train_ex)

    def _step(self) -> int | None:
        """The step that the checkpoint manager keeps, if it says."""
        step: int | None = getattr(self.wrapper.checkpoint_manager, "global_step", None)
        return step

    def _with_self(
        self, fn: Callable[..., Any], a: tuple[Any, ...], kw: dict[str, Any]
    ) -> dict[str, Any]:
        name = parameter_of(HPCallWrapper, fn)
        if name is None or not without_argument(name, fn, a, kw):
            return kw
        return {**kw, name: self}

    def _running(self) -> Attempt:
        if self._attempt is None:
            raise RestartError("no attempt is running; call start_hp_fault_handling_thread first")
        return self._attempt

    def _asked(self) -> Coordinator:
        if self._coordinator is None:
            self._open()
        assert self._coordinator is not None  # noqa: S101 - opened above
        return self._coordinator


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the block came to: a value, or a request to end the process."""

    value: Any
    leaving: SystemExit | None = None

    def result(self) -> Any:
        if self.leaving is not None:
            raise self.leaving
        return self.value


def _call_hook(manager: Any, name: str, argument: Any) -> None:
    hook = getattr(manager, name, None)
    if hook is not None:
        hook(argument)


def _require_viztracer() -> None:
    if importlib.util.find_spec("viztracer") is None:
        raise MissingDependencyError("trace_file_path needs VizTracer: pip install viztracer")


__all__ = ["Abort", "HPCallWrapper", "HPWrapper", "RankShouldRestart"]
