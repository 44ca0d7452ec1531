"""How far Lightning's loops are, and what goes with them. Imports nothing of Lightning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.integrations.lightning_steps import knows_batch_end
from dist_ckpt_strategies.recovery.json_values import from_json_value, to_json_value

logger = logging.getLogger(__name__)

_STEPPED = "_batches_that_stepped"


@runtime_checkable
class KnowsLoops(Protocol):
    """A StateProvider of loops too, which the callback tells how far they are."""

    def begin_training(self, on_final_gradients: Callable[[], None]) -> None:
        """The state is loaded, and the first step comes next.

        Args:
            on_final_gradients: to be called in each step before a parameter changes, by a provider
                whose optimizer has no vote in it.
        """
        ...

    def capture(self) -> None:
        """A step is over: take the objects as they are now."""
        ...


class Loops:
    """Loops, schedules, precision and callbacks of a trainer that has been set up.

    They are held here, so that a step can be finished after the trainer's teardown. Their state
    is what Lightning's own checkpoint holds of them.
    """

    def __init__(self, trainer: Any) -> None:
        self.fit = trainer.fit_loop
        self.precision = trainer.precision_plugin
        self._module = trainer.lightning_module
        self._schedules = list(trainer.lr_scheduler_configs)
        self._callbacks = list(trainer.callbacks)

    def objects(self, *, ends_batch: bool = False) -> dict[str, Any]:
        """As they are now, as JSON types.

        Args:
            ends_batch: this is the end of a batch; Lightning before 2.5 has to be told so, or it
                takes that batch for one that was begun, and counts it again.

        Raises:
            PlanError: a schedule's state is no number, text, container or tensor.
        """
        loops = self.fit.state_dict()
        if ends_batch and not knows_batch_end(self.fit):
            loops = _with_batch_completed(loops)
        return {
            "loops": to_json_value(loops),
            "schedules": [to_json_value(one.scheduler.state_dict()) for one in self._schedules],
            "precision": to_json_value(self.precision.state_dict()),
            "callbacks": dict(self._callback_states()),
        }

    def why_not_advance(self) -> str:
        """What ``advance`` would leave out, in words; empty if nothing.

        A callback's state that the end of a batch changes: its hooks cannot be called once the
        trainer is gone. One that writes checkpoints has missed one then, and is none the worse.
        """
        found = sorted(
            callback.state_key
            for callback in self._callbacks
            if _overrides(callback, "on_train_batch_end") and callback.state_dict()
        )
        return f"cannot tell the state of {' and '.join(found)} after the batch" if found else ""

    def load(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``objects`` gave."""
        loops = from_json_value(objects["loops"])
        # To a loop that has not begun, a state would say that it goes on from somewhere.
        if loops["epoch_loop.batch_progress"]["total"]["ready"]:
            self.fit.load_state_dict(loops)
        for one, state in zip(self._schedules, objects["schedules"], strict=True):
            one.scheduler.load_state_dict(from_json_value(state))
        self.precision.load_state_dict(from_json_value(objects["precision"]))
        for callback in self._callbacks:
            state = objects["callbacks"].get(callback.state_key)
            if state is not None:
                callback.load_state_dict(from_json_value(state))

    def advance(self, *, is_last: bool | None = None) -> None:
        """Counters and schedules, from the optimizer's step to the end of its batch.

        Args:
            is_last: whether that batch turned out to be the epoch's last; None: that was known.
        """
        loop = self.fit.epoch_loop
        ready = loop.batch_progress.current.ready
        loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        loop.batch_progress.increment_processed()
        self._step_schedules("step", ready)
        if ready == self.fit.max_batches or loop.batch_progress.is_last_batch:
            self._step_schedules("epoch", self.fit.epoch_progress.current.completed + 1)
        if is_last is not None:
            loop.batch_progress.is_last_batch = is_last

    def _step_schedules(self, interval: str, number: int) -> None:
        for one in self._schedules:
            is_due = one.interval == interval and number % one.frequency == 0
            if is_due and not one.reduce_on_plateau:
                self.fit.epoch_loop.scheduler_progress.increment_ready()
                self._module.lr_scheduler_step(one.scheduler, None)
                self.fit.epoch_loop.scheduler_progress.increment_completed()

    def _callback_states(self) -> dict[str, Any]:
        found = {}
        for callback in self._callbacks:
            state = callback.state_dict()
            try:
                found.update({callback.state_key: to_json_value(state)} if state else {})
            except PlanError as error:
                logger.warning("%s is not recovered: %s", callback.state_key, error)
        return found


def _with_batch_completed(loops: dict[str, Any]) -> dict[str, Any]:
    """The state of Lightning's fit loop, as it is a moment later."""
    batches = loops["epoch_loop.batch_progress"]
    counted = {
        name: {**batches[name], "completed": batches[name]["processed"]}
        for name in ("total", "current")
    }
    own = loops["epoch_loop.state_dict"]
    return {
        **loops,
        "epoch_loop.batch_progress": {**batches, **counted},
        "epoch_loop.state_dict": {**own, _STEPPED: own[_STEPPED] + 1},
    }


def _overrides(callback: Any, hook: str) -> bool:
    """Whether a callback that writes no checkpoints has a hook of its own."""
    names = [kind.__name__ for kind in type(callback).__mro__]
    owners = (kind.__name__ for kind in type(callback).__mro__ if hook in vars(kind))
    return next(owners, "Callback") != "Callback" and "Checkpoint" not in names
