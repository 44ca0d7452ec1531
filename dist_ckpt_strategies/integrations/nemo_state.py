"""The state of a NeMo training, as a StateProvider. Imports nothing of NeMo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.integrations.lightning_loops import Loops
from dist_ckpt_strategies.integrations.lightning_steps import begin_epoch_of_steps_if_over
from dist_ckpt_strategies.integrations.nemo_data import DataPosition
from dist_ckpt_strategies.recovery.megatron_provider import MegatronStateProvider

_ENDING = "was interrupted when its weights were those of the next step and its loops were changing"

_ENDS_BATCH = "ends_batch"


class _Stage(Enum):
    """How far the loops are, beside the shard."""

    TOGETHER = "what was captured belongs to the shard"
    BEHIND = "the shard is updated, and the loops are still within the optimizer's step"
    ENDING = "the loops change, and callbacks are told that the batch is over"


class NemoStateProvider(MegatronStateProvider):
    """A StateProvider over the chunks and the optimizer of NeMo's strategy, and Lightning's loops.

    Objects: beside Megatron-Core's, what Lightning's checkpoint has of loops, schedules, precision,
    callbacks and datamodule, and the position in the data, all as at the end of the last step.
    After an update they come later than the tensors: until ``capture`` they are worked out from
    where the loops stand, or known to be in between.

    Args:
        chunks: the model's, in Megatron-Core's DistributedDataParallel.
        optimizer: Megatron-Core's.
        trainer: with a strategy that has been set up.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, trainer: Any) -> None:
        super().__init__(chunks, optimizer)
        self._trainer = trainer
        self._held: tuple[Loops, DataPosition] | None = None
        self._captured: dict[str, Any] | None = None
        self._captured_step = 0
        self._stage = _Stage.TOGETHER

    def set_step(self, step: int) -> None:
        """See StateProvider; what was captured or loaded belongs to it."""
        super().set_step(step)
        self._captured_step = step

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider.

        Raises:
            RestartError: they cannot be told, as ``why_no_objects`` says.
            PlanError: a schedule's state is no number, text, container or tensor.
        """
        if self._captured is None:
            self._captured = self._objects(ends_batch=False)
        if self._stage is not _Stage.TOGETHER:
            self._advance()
        return self._captured

    def why_no_objects(self) -> str:
        """See HasLateObjects."""
        if self._captured_step > self.step:
            return ""
        return _ENDING if self._stage is _Stage.ENDING else self._bound()[0].why_not_advance()

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider; before the loader is made."""
        loops, position = self._bound()
        super().load_objects(objects["optimizer"])
        loops.load(objects)
        position.load(objects["data"])
        self._captured, self._stage = dict(objects), _Stage.TOGETHER

    def begin_training(self, on_final_gradients: Callable[[], None]) -> None:
        """See KnowsLoops; the optimizer has its vote in it."""
        del on_final_gradients
        _, position = self._bound()
        is_recovered = position.go_on()
        captured = self.objects()
        if is_recovered and captured[_ENDS_BATCH]:
            begin_epoch_of_steps_if_over(self._trainer)
        # The loops have begun to change; but what is counted from the loader on is known only now.
        self._captured = {**captured, "data": position.objects()}
        self.set_step(int(self._trainer.global_step))

    def finish_gradients(self) -> bool:
        """See MegatronStateProvider; the step's data has been drawn by now."""
        self._bound()[1].note()
        return super().finish_gradients()

    def update_shard(self) -> None:
        """See StepInParts; the loops come later."""
        super().apply_update()
        self._stage = _Stage.BEHIND

    def begin_ending(self) -> None:
        """See StepInParts; Lightning goes on with its loops."""
        self._stage = _Stage.ENDING

    def apply_update(self) -> None:
        """See StateProvider; where the trainer does not go on, and its loops are finished here."""
        self.update_shard()
        if not self.why_no_objects():
            self._advance()

    def capture(self) -> None:
        """See KnowsLoops."""
        self._bound()[1].end_epoch_if_over()
        self._captured = self._objects(ends_batch=True)
        self._captured_step, self._stage = self.step + 1, _Stage.TOGETHER

    def _advance(self) -> None:
        why = self.why_no_objects()
        if why:
            raise RestartError(f"this rank {why}")
        loops, position = self._bound()
        loops.advance(is_last=position.is_last)
        self.capture()

    def _objects(self, *, ends_batch: bool) -> dict[str, Any]:
        loops, position = self._bound()
        return {
            "optimizer": dict(super().objects()),
            **loops.objects(ends_batch=ends_batch),
            "data": position.objects(),
            _ENDS_BATCH: ends_batch,
        }

    def _bound(self) -> tuple[Loops, DataPosition]:
        if self._held is None:
            self._held = Loops(self._trainer), DataPosition(self._trainer)
        return self._held
