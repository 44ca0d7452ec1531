"""Steps by which each rank ends the function while it runs, when a fault is reported."""

import gc
import multiprocessing
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dist_ckpt_strategies.errors import RestartError, text_of
from dist_ckpt_strategies.inprocess.finalize import CheckpointlessFinalizeCleanup, imported
from dist_ckpt_strategies.inprocess.health_check import HPState

__all__ = [
    "Abort",
    "AbortTransformerEngine",
    "CheckpointlessAbortManager",
    "CheckpointlessFinalizeCleanup",
    "Compose",
    "HPAbortTorchDistributed",
    "HPCheckpointingAbort",
    "HPDataLoaderAbort",
]


class Abort(ABC):
    """Ends one kind of work of this process, called from another thread.

    It must not wait for other ranks, and may be called again.
    """

    @abstractmethod
    def __call__(self, state: HPState) -> HPState:
        """End it; the state, unchanged."""


class Compose(Abort):
    """Several aborts as one. As in NVRx, the last one is called first: ``a(b(c(state)))``.

    All are called, even if some raise.

    Args:
        instances: the parts, in the reverse order of their calls.
    """

    def __init__(self, *instances: Callable[[HPState], HPState]) -> None:
        self.instances: tuple[Callable[[HPState], HPState], ...] = instances

    def __call__(self, state: HPState) -> HPState:
        """See Abort.

        Raises:
            RestartError: some raised; with the text of each.
        """
        errors: list[Exception] = []
        for instance in reversed(self.instances):
            try:
                state = instance(state)
            except Exception as error:  # noqa: BLE001 - the others must run; raised below
                errors.append(error)
        if errors:
            texts = "; ".join(f"{type(error).__name__}: {text_of(error)}" for error in errors)
            raise RestartError(f"abort failed: {texts}") from ExceptionGroup("abort", errors)
        return state

    def with_communication_first(self) -> "Compose":
        """The same parts; those that end communication are called before all others."""
        kind = HPAbortTorchDistributed
        return Compose(*sorted(self.instances, key=lambda one: isinstance(one, kind)))


class AbortTransformerEngine(Abort):
    """Destroys Transformer Engine's buffers for overlapped communication, if it is imported."""

    def __call__(self, state: HPState) -> HPState:
        """See Abort."""
        destroy = imported("transformer_engine.pytorch.module.base", "destroy_ub")
        if destroy is not None:
            destroy()
        return state


class HPCheckpointingAbort(Abort):
    """Ends asynchronous saves: kills the processes that Megatron-Core's queues started.

    Saves of this package end by themselves; none is finalized.
    """

    def __call__(self, state: HPState) -> HPState:
        """See Abort."""
        core = "megatron.core.dist_checkpointing.strategies.async_utils"
        for caller in _users_of_processes(
            imported(core, "TemporalAsyncCaller"), imported(core, "PersistentAsyncCaller")
        ):
            process = getattr(caller, "process", None)
            if process is not None and process.is_alive():
                process.kill()
        return state


class HPAbortTorchDistributed(Abort):
    """Ends the communication of all process groups: aborts NCCL's, cuts gloo's connections.

    It also cuts the connections to the groups' stores, and then aborts all waits.
    """

    def __call__(self, state: HPState) -> HPState:
        """See Abort."""
        if state.communication is not None:
            state.communication.end()
        return state


class HPDataLoaderAbort(Abort):
    """Kills the worker processes of torch's data loaders."""

    def __call__(self, state: HPState) -> HPState:
        """See Abort."""
        kind = imported("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter")
        for found in _users_of_processes(kind):
            _end_workers(found)
        return state


class CheckpointlessAbortManager:
    """Creates and changes the ``abort`` of an HPWrapper."""

    @staticmethod
    def get_default_checkpointless_abort() -> Compose:
        """Transformer Engine, checkpointing, torch.distributed, data loaders; the last runs first.

        Transformer Engine's buffers are thus destroyed after the communicators that use them.
        """
        return Compose(
            AbortTransformerEngine(),
            HPCheckpointingAbort(),
            HPAbortTorchDistributed(),
            HPDataLoaderAbort(),
        )

    @staticmethod
    def create_custom_abort(*abort_instances: Abort) -> Compose:
        """A Compose of these; the last one is called first.

        Raises:
            ValueError: there is none.
        """
        if not abort_instances:
            raise ValueError("abort_instances: expected one or more, found none")
        return Compose(*abort_instances)

    @staticmethod
    def override_abort(abort_compose: Compose, abort_type: type, new_abort: Abort) -> Compose:
        """A copy of ``abort_compose`` with ``new_abort`` in place of each ``abort_type``.

        Raises:
            ValueError: ``abort_compose`` is not a Compose, or has none of the type.
        """
        instances = getattr(abort_compose, "instances", None)
        if instances is None:
            raise ValueError(f"abort_compose: expected a Compose, found {abort_compose!r}")
        if not any(isinstance(one, abort_type) for one in instances):
            names = ", ".join(type(one).__name__ for one in instances)
            raise ValueError(f"{abort_type.__name__}: expected one of {names}")
        return Compose(*(new_abort if isinstance(one, abort_type) else one for one in instances))


def _users_of_processes(*kinds: Any) -> list[Any]:
    """Objects of the classes that are not None; none where this process has started no other."""
    if not multiprocessing.active_children():
        return []
    wanted = tuple(kind for kind in kinds if kind is not None)
    return [found for found in gc.get_objects() if isinstance(found, wanted)]


def _end_workers(iterator: Any) -> None:
    """Kill the workers. Torch raises in the main thread for those it still watches over."""
    signals = sys.modules["torch.utils.data._utils.signal_handling"]
    if iterator._worker_pids_set:  # noqa: SLF001 - no public way
        signals._remove_worker_pids(id(iterator))  # noqa: SLF001
        iterator._worker_pids_set = False  # noqa: SLF001
    iterator._shutdown = True  # noqa: SLF001
    pinning = getattr(iterator, "_pin_memory_thread_done_event", None)
    if pinning is not None:
        pinning.set()
    for worker in iterator._workers:  # noqa: SLF001
        worker.kill()
