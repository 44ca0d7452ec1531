"""Runs a block of training again in place when a rank fails."""

import functools
import importlib.util
import inspect
import logging
import math
import re
import sys
import time
import typing
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch

from dist_ckpt_strategies.comm.interruptible_gloo import register_interruptible_gloo
from dist_ckpt_strategies.comm.teardown import rendezvous_by_attempt
from dist_ckpt_strategies.config import require_in_range, update_environment
from dist_ckpt_strategies.device import has_gpu
from dist_ckpt_strategies.errors import (
    MissingDependencyError,
    PeerError,
    RestartError,
    StrategyError,
    forget_frames,
    text_of,
)
from dist_ckpt_strategies.inprocess.abort import Abort, Compose, HPAbortTorchDistributed
from dist_ckpt_strategies.inprocess.attempt import Attempt, Interrupter, RankShouldRestart
from dist_ckpt_strategies.inprocess.finalize import Finalize, ProcessMemory
from dist_ckpt_strategies.inprocess.health_check import HealthCheck, HPState
from dist_ckpt_strategies.inprocess.launch import outlive_nccl_errors
from dist_ckpt_strategies.inprocess.rendezvous import RendezvousClient
from dist_ckpt_strategies.inprocess.store_rendezvous import (
    StoreRendezvous,
    rendezvous_from_environment,
)

logger = logging.getLogger(__name__)

_LONGEST_S = 1e9
_LIMITS = ("barrier_timeout_s", "finish_timeout_s", "abort_timeout", "progress_timeout_s")
_COUNTS = ("max_attempts", "max_idle_attempts")
_NEEDED = _LIMITS[:2]
"""The others may be None."""

_FIRST_TELLER_S = 0.1
"""How long a broken connection waits to be explained by the fault that broke it."""

_LONG_S = 600.0
"""An attempt of this length is not idle where nothing says how many steps it has done."""

_ABORT_TIMEOUT_S = 60.0  # by default: a rank that cannot be stopped must not be waited for
_LEAVE_S = 3.0
"""Ranks that leave after a common save do so together, if the first does not interrupt others."""


@dataclass(kw_only=True, eq=False, repr=False)
class HPWrapper:
    """Decorator: run a function again on every rank, in place, when a rank fails.

    A parameter of the function that is annotated with HPCallWrapper receives the call. Times are
    seconds above 0. Pass objects, not classes.

    Args:
        abort: ends communication and other work when a fault is reported. None: nothing; the
            function has to return by itself. CheckpointlessAbortManager has a default that includes
            Transformer Engine's buffers, asynchronous saves and data loaders. Compose calls its
            last part first, as NVRx does.
        finalize: called with the state between two attempts.
        health_check: called with the state and the exception of the function; if it raises, this
            process ends. CudaHealthCheck, FaultCounter, ChainedHealthCheck.
        hp_api_factory: creates the rendezvous client; None: the one that the environment names.
        abort_timeout: longest time from a fault until the function has been left; then the process
            ends with code 86. None: 60.
        enabled: False: the function is not wrapped.
        trace_file_path: file for a trace of the call by VizTracer, if it is installed.
        async_raise_before_abort: interrupt the function as soon as communication has ended; False:
            after all of ``abort``.
        early_abort_communicator: end communication before the other parts of ``abort``.
        checkpoint_manager: its ``parameter_update_lock`` protects updates from interruption; its
            ``on_fault(fault)``, if any, is called between two attempts.
        check_memory_status: log memory at each restart, and warn if it grows.
        barrier_timeout_s: longest wait for all ranks to join an attempt. A process whose
            ``finalize`` and ``health_check`` take half of it ends with code 86, and is replaced.
        finish_timeout_s: longest wait for all ranks to return from the function.
        max_attempts: attempts of this process; None: unlimited.
        max_idle_attempts: this process ends after so many consecutive attempts that its own
            fault ended before a step was done (``step_upon_restart`` or the step of the
            ``checkpoint_manager`` did not grow, or, without both, ten minutes had not passed). The
            job ends after twice as many of all its processes. None: unlimited.
        progress_timeout_s: longest time between two calls of ``ping``, or from the start of the
            function to the first; None: unlimited.

    Raises:
        StrategyError: a time or count is not above 0, or a part is not callable.
        MissingDependencyError: ``trace_file_path`` is set, and VizTracer is not installed.
    """

    abort: Callable[[HPState], HPState] | None = Compose(HPAbortTorchDistributed())  # noqa: RUF009 - it has no state
    finalize: Finalize | Callable[..., Any] | None = None
    health_check: HealthCheck | Callable[..., Any] | None = None
    hp_api_factory: Callable[[], RendezvousClient] | None = None
    abort_timeout: float | None = None
    enabled: bool = True
    trace_file_path: str | None = None
    async_raise_before_abort: bool = True
    early_abort_communicator: bool = False
    checkpoint_manager: Any = None
    check_memory_status: bool = True
    barrier_timeout_s: float = 1800.0
    finish_timeout_s: float = 7 * 86400.0
    max_attempts: int | None = None
    max_idle_attempts: int | None = 3
    progress_timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Check the options."""
        _require_usable(self)
        traces = self.enabled and self.trace_file_path is not None
        if traces and importlib.util.find_spec("viztracer") is None:
            raise MissingDependencyError("trace_file_path needs VizTracer: pip install viztracer")

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn`` as a block that is run again; ``fn`` itself where the wrapper is not enabled."""
        if not self.enabled:
            return fn
        kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if any(is_kind(fn) for is_kind in kinds):
            raise StrategyError(
                f"{fn}: a call of it returns before any of it has run, so that no "
                "fault would be seen; wrap a plain function that runs it to its end"
            )

        @functools.wraps(fn)
        def wrapped(*a: Any, **kw: Any) -> Any:
            with self._traced():
                return HPCallWrapper(self).run(fn, a, kw)

        return wrapped

    def _traced(self) -> AbstractContextManager[Any]:
        if self.trace_file_path is None:
            return nullcontext()
        from viztracer import VizTracer  # noqa: PLC0415 - optional

        return VizTracer(output_file=self.trace_file_path)  # type: ignore[no-any-return]


class HPCallWrapper:
    """One call of the function: attempts until all ranks have returned from one.

    Args:
        wrapper: the options.

    Attributes:
        step_upon_restart: steps since the attempt began; the function counts them.
        num_attempts: number of attempts of this process.
        last_fault: the fault that ended the previous attempt.
    """

    def __init__(self, wrapper: HPWrapper) -> None:
        self.wrapper = wrapper
        self.step_upon_restart = 0
        self._is_in_block = False
        self.num_attempts = 0
        self.last_fault: Any = None
        self._client: RendezvousClient | None = None
        self._round = 0
        self._attempt: Attempt | None = None
        lock = getattr(wrapper.checkpoint_manager, "parameter_update_lock", None)
        self._interrupter = Interrupter(lock)
        self._idle = _IdleAttempts(wrapper.max_idle_attempts, wrapper.checkpoint_manager)
        self._memory = ProcessMemory()
        self._records_gradients = torch.is_grad_enabled()
        self._excepthook = sys.excepthook

    def run(self, fn: Callable[..., Any], a: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """The result of ``fn`` in the first attempt that no fault ends.

        Raises:
            RestartError: all attempts are used up, or this process cannot take part in another.
            PeerTimeoutError: not all ranks joined, or returned, in time.
            PeerLostError: the rendezvous does not answer.
        """
        self._opened()
        name = parameter_of(HPCallWrapper, fn)
        if name is not None and name not in inspect.signature(fn).bind_partial(*a, **kw).arguments:
            kw = {**kw, name: self}
        try:
            with (
                self._interrupter.installed(),
                rendezvous_by_attempt(lambda: self._round, self._note_store),
            ):
                while True:
                    self.initialize_barrier()
                    self.start_hp_fault_handling_thread()
                    try:
                        return self._result(fn, a, kw)
                    except RankShouldRestart as error:
                        interruption = error
                    self.restart(interruption)
                    del interruption  # its cause may hold tensors
        except BaseException as error:  # a request to leave the process gives up too
            if self._is_in_block:
                self._leave(error)
            raise
        finally:
            self.shutdown()

    def initialize_barrier(self) -> None:
        """Join the forming round; return once all ranks have."""
        self._round = self._opened().barrier(self.wrapper.barrier_timeout_s)
        self.num_attempts += 1
        self.step_upon_restart = 0
        self._idle.begin_attempt()
        update_environment({"TORCHELASTIC_RESTART_COUNT": str(self._round)})
        self._is_in_block = True

    def start_hp_fault_handling_thread(self) -> None:
        """Watch for faults from now on, and interrupt the function when there is one."""
        client = self._opened()
        place = client.wait_rank()
        state = HPState(place.global_rank, place.world_size, self._round, self.num_attempts)
        options, abort = self.wrapper, self.wrapper.abort
        if options.early_abort_communicator and isinstance(abort, Compose):
            abort = abort.with_communication_first()
        self._attempt = Attempt(
            state,
            client,
            self._interrupter,
            abort,
            limit_s=options.abort_timeout or _ABORT_TIMEOUT_S,
            early=options.async_raise_before_abort,
            progress_s=options.progress_timeout_s,
        )
        self._attempt.start()

    def launch(self, fn: Callable[..., Any], *a: Any, **kw: Any) -> Any:
        """The result of ``fn``.

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
            RestartError: as ``run``.
        """
        attempt = self._running()
        self._is_in_block = False
        attempt.wait_stopped()
        self.last_fault = attempt.fault
        train_ex = term_ex.__cause__
        forget_frames(term_ex)
        if attempt.lost is not None:
            raise attempt.lost
        with attempt.ending_after(self.wrapper.barrier_timeout_s / 2, "finalize or health check"):
            self._finalize(attempt)
            self._require_fit(attempt.state, train_ex)

    def shutdown(self) -> None:
        """Watch no longer, and close the rendezvous client. Again does nothing."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def ping(self) -> None:
        """The block makes progress; see ``progress_timeout_s``."""
        if self._attempt is not None:
            self._attempt.ping()

    def _opened(self) -> RendezvousClient:
        if self._client is None:
            self._client = (self.wrapper.hp_api_factory or rendezvous_from_environment)()
            self._client.wait_rank()
            register_interruptible_gloo()
            if has_gpu():
                outlive_nccl_errors()
        return self._client

    def _result(self, fn: Callable[..., Any], a: tuple[Any, ...], kw: dict[str, Any]) -> Any:
        """The block's result, once all ranks have one; raises the error that ends the process."""
        value, leaving = None, None
        try:
            value = self.launch(fn, *a, **kw)
        except SystemExit as error:
            if error.code not in {None, 0}:
                raise
            leaving = error
        attempt = self._running()
        self._is_in_block = False
        if not self._opened().finish(attempt.restart_round, self.wrapper.finish_timeout_s):
            attempt.wait_stopped()
            raise RankShouldRestart(attempt.fault)
        if leaving is not None:
            raise leaving
        return value

    def _leave(self, error: BaseException) -> None:
        """The block has been left for good: report why, and end all communication.

        A pending wait that returned while the interpreter exits would abort the process, in place
        of its own exit code.
        """
        attempt = self._running()
        try:
            if not attempt.hears_within(_LEAVE_S if isinstance(error, SystemExit) else 0.0):
                attempt.report(error)
            attempt.wait_stopped()
        except PeerError as lost:
            logger.warning("the other ranks could not be notified that this rank leaves: %s", lost)
            return
        attempt.communication.take_down()

    def _finalize(self, attempt: Attempt) -> None:
        # An interruption may come within torch.no_grad() before its body, which would undo it.
        torch.set_grad_enabled(self._records_gradients)
        sys.excepthook = self._excepthook  # each init_process_group would wrap the one before
        on_fault = getattr(self.wrapper.checkpoint_manager, "on_fault", None)
        if on_fault is not None:
            on_fault(attempt.fault)
        attempt.communication.take_down()
        if self.wrapper.finalize is not None:
            self.wrapper.finalize(attempt.state)
        self._memory.release()
        if self.wrapper.check_memory_status:
            self._memory.log(self.num_attempts)

    def _note_store(self, store: Any) -> None:
        self._running().communication.note_store(store)

    def _require_fit(self, state: HPState, train_ex: BaseException | None) -> None:
        """Raise unless this process may run another attempt."""
        limit = self.wrapper.max_attempts
        if limit is not None and state.attempt >= limit:
            raise RestartError(
                f"{state.attempt} attempts, {limit} allowed; the last: {state.fault}"
            ) from train_ex
        if why := self._idle.end_attempt(state, self._opened(), self.step_upon_restart):
            raise RestartError(why) from train_ex
        if self.wrapper.health_check is not None:
            self.wrapper.health_check(state, train_ex)

    def _running(self) -> Attempt:
        if self._attempt is None:
            raise RestartError("no attempt is running; call start_hp_fault_handling_thread first")
        return self._attempt


class _IdleAttempts:
    """Counts attempts in a row that failed before a step was done, of this process and the job.

    The step is that of the checkpoint manager, if there is one that says.
    """

    def __init__(self, limit: int | None, manager: Any) -> None:
        self._limit, self._manager = limit, manager
        self._num = 0
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self._first_step, self._began = self._step(), time.monotonic()

    def end_attempt(self, state: HPState, client: RendezvousClient, num_steps: int) -> str:
        """Why there are too many; "" if there are not. The function has counted ``num_steps``."""
        step, num_of_job, fault = self._step(), 0, state.fault
        is_long = step is None and time.monotonic() - self._began > _LONG_S
        before = -1 if num_steps or is_long else self._first_step
        is_own = fault is not None and fault.global_rank == state.rank
        if isinstance(client, StoreRendezvous):
            num_of_job = client.count_idle(state.restart_round, (before, step), is_own=is_own)
        self._num = self._num + is_own if num_of_job or before == step else 0
        if self._limit is None or max(self._num, num_of_job / 2) < self._limit:
            return ""
        num_idle = max(self._num, num_of_job)
        why = f"{num_idle} attempts in a row failed before a step was done; the last: {fault}"
        if isinstance(client, StoreRendezvous) and num_of_job >= 2 * self._limit:
            client.give_up(why)
        return why

    def _step(self) -> Any:
        return getattr(self._manager, "global_step", None)


def _require_usable(options: HPWrapper) -> None:
    for name in (*_LIMITS, *_COUNTS):
        kind, most = (Real, _LONGEST_S) if name in _LIMITS else (Integral, math.inf)
        value = getattr(options, name)
        if value is not None or name in _NEEDED:
            require_in_range(name, kind, most, value)
    for name in ("abort", "finalize", "health_check", "hp_api_factory"):
        value = getattr(options, name)
        # Called with the state, a class would make an object, and do nothing.
        if isinstance(value, type) and name != "hp_api_factory":
            raise StrategyError(
                f"option {name}: expected an object, found the class; write {value.__name__}()"
            )
        if value is not None and not callable(value):
            raise StrategyError(f"option {name}: expected a function, found {value!r}")


def parameter_of(kind: type, fn: Callable[..., Any]) -> str | None:
    """The name of the parameter annotated with ``kind``, alone or among others; None: none is."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some functions that are written in C do not say
        return None
    for name, parameter in parameters.items():
        if re.search(rf"\b{kind.__name__}\b", str(parameter.annotation)):
            return name
    return None


__all__ = ["Abort", "HPCallWrapper", "HPWrapper", "RankShouldRestart"]
