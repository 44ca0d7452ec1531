"""Megatron-LM's ``pretrain``, run again in place after a fault, with the state from memory.

Importing this imports nothing of Megatron-LM.
"""

import copy
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.inprocess import HPCallWrapper, HPWrapper
from dist_ckpt_strategies.integrations.nemo import guard_optimizer
from dist_ckpt_strategies.recovery import CheckpointManager, Phase
from dist_ckpt_strategies.recovery.megatron_provider import MegatronStateProvider

__all__ = ["restarting"]

_COUNTS = (
    "iteration",
    "consumed_train_samples",
    "consumed_valid_samples",
    "skipped_train_samples",
    "num_floating_point_operations_so_far",
)
"""Arguments of Megatron-LM that say how far its loop is."""


class _LoopState(MegatronStateProvider):
    """Megatron-Core's state, the learning rate's schedule, and how far Megatron-LM's loop is."""

    def __init__(self, chunks: Any, optimizer: Any, schedule: Any, arguments: Any) -> None:
        super().__init__(chunks, optimizer)
        self._schedule, self._arguments = schedule, arguments
        self.capture(arguments.iteration, 0)

    def capture(self, iteration: int, num_samples: int) -> None:
        """Take the objects as they are, after so many samples more."""
        counts = {name: getattr(self._arguments, name) for name in _COUNTS}
        counts["iteration"] = iteration
        counts["consumed_train_samples"] += num_samples
        core, schedule = MegatronStateProvider.objects(self), self._schedule.state_dict()
        objects = {"core": core, "schedule": schedule, "counts": counts}
        self._captured: Mapping[str, Any] = copy.deepcopy(objects)

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider; as they were captured."""
        return self._captured

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider; before the data loader is made."""
        self._captured = copy.deepcopy(dict(objects))
        super().load_objects(objects["core"])
        self._schedule.num_steps = 0  # what it loads is added
        self._schedule.load_state_dict(copy.deepcopy(objects["schedule"]))
        for name, value in objects["counts"].items():
            setattr(self._arguments, name, value)

    def apply_update(self) -> None:
        """Raise a RestartError: the loop alone can end a step."""
        raise RestartError("it was interrupted amid its step, which only its loop can complete")


class _Loop:
    """Takes the place of two functions of Megatron-LM's training.py, and calls them."""

    def __init__(self, training: Any, manager: CheckpointManager) -> None:
        self.call: HPCallWrapper | None = None
        self._training, self._manager = training, manager
        self._make, self._train_step = training.setup_model_and_optimizer, training.train_step
        self._states: list[_LoopState] = []
        training.setup_model_and_optimizer, training.train_step = self.make, self.train_step

    def make(self, *a: Any, **kw: Any) -> Any:
        """``setup_model_and_optimizer``; then the state comes from memory, if it is there."""
        model, optimizer, schedule = self._make(*a, **kw)
        arguments = self._training.get_args()
        state = _LoopState(model, optimizer, schedule, arguments)
        self._manager.try_checkpointless_load(state)
        state.set_step(arguments.iteration)
        self._manager.track(state)
        guard_optimizer(optimizer, state, self._manager)
        self._states[:] = [state]
        return model, optimizer, schedule

    def train_step(self, *a: Any, iteration: int, **kw: Any) -> Any:
        """``train_step``, within a step of the manager."""
        (state,), manager, training = self._states, self._manager, self._training
        if self.call is not None:
            self.call.ping()
        state.capture(iteration, 0)
        manager.begin_step()
        manager.load_rng_states()
        result = self._train_step(*a, iteration=iteration, **kw)
        if manager.phase is Phase.UPDATING:
            num_batches = training.mpu.get_data_parallel_world_size()
            num_batches *= training.get_num_microbatches()
            state.capture(iteration + 1, num_batches * training.get_args().micro_batch_size)
            manager.end_update()
            manager.end_step()
        return result


def restarting(
    pretrain: Callable[..., Any], manager: CheckpointManager | None = None, **options: Any
) -> Callable[..., Any]:
    """``pretrain``, which survives exceptions and killed ranks; see HPWrapper. Rank-local.

    Start the script with ``dist-ckpt run``, train with ``--use-distributed-optimizer
    --num-distributed-optimizer-instances 2`` or more, so that each shard of the optimizer has a
    copy, and with ``--bf16``. The norm of the gradients is not logged.

    Args:
        pretrain: of ``megatron.training``.
        manager: keeps the state; by default a new one.
        options: further ones of HPWrapper.
    """
    kept = manager or CheckpointManager()
    loop = _Loop(import_module("megatron.training.training"), kept)
    restart: Any = import_module("megatron.training.inprocess_restart")
    variables: Any = import_module("megatron.training.global_vars")
    given: list[Any] = []

    def block(*a: Any, call: HPCallWrapper | None = None, **kw: Any) -> Any:
        loop.call = call
        if not given:  # on main the script has parsed the arguments; up to 0.16 pretrain does
            given.append(copy.deepcopy(variables._GLOBAL_ARGS))  # noqa: SLF001 - may be None
        elif given[0] is not None:  # and they were cleared after the attempt before
            variables.set_global_variables(copy.deepcopy(given[0]))
        return pretrain(*a, **kw)

    def forget(state: Any) -> Any:
        restart.destroy_state()
        return state

    return HPWrapper(checkpoint_manager=kept, finalize=forget, **options)(block)
