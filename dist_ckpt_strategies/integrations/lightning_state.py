"""The state of a Lightning trainer, as a StateProvider. Imports nothing of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.integrations.lightning_loops import Loops
from dist_ckpt_strategies.integrations.lightning_steps import (
    begin_epoch_if_over,
    call_after_closure,
    go_to_batch,
)
from dist_ckpt_strategies.recovery.json_values import from_json_value
from dist_ckpt_strategies.recovery.torch_provider import TorchStateProvider

_REPLICATING = frozenset({"DDPStrategy", "SingleDeviceStrategy"})
"""Strategies, and classes made from them, whose ranks all hold everything."""

_DIVIDING = frozenset({"MegatronStrategy"})
"""Made from one of those, and yet its ranks hold different parts."""


class LightningStateProvider:
    """A StateProvider over a trainer whose ranks all hold everything.

    Tensors: the LightningModule's and its optimizer's. Objects: loops, schedules, precision and
    callbacks, as they were at the end of the last step; ``capture`` takes them. That is the moment
    at which Lightning's own checkpoints of a step are made, and its loops know how to go on from.

    Nothing of the trainer is asked for before it is set up. From then on module, optimizer,
    schedules and loops are held here, so that an update can be finished after its teardown.

    Args:
        trainer: with automatic optimization, hence one optimizer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._live: _Live | None = None
        self._captured: dict[str, Any] | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._step: int | None = None
        self._is_captured_ahead = False

    @property
    def step(self) -> int:
        """See StateProvider; updates of the optimizer."""
        return int(self._trainer.global_step) if self._step is None else self._step

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        self._step, self._is_captured_ahead = step, False

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateProvider."""
        return {
            part_id: {**tensors, **self._buffers}
            for part_id, tensors in self._bound().tensors.parts().items()
        }

    def gathered_parts(self) -> frozenset[str]:
        """See StateProvider; none, as every rank updates everything."""
        return frozenset()

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider."""
        if self._captured is None:
            self._take()
        assert self._captured is not None  # noqa: S101 - just taken
        return self._captured

    def why_no_objects(self) -> str:
        """See HasLateObjects."""
        return "" if self._is_captured_ahead else self._bound().loops.why_not_advance()

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider."""
        live = self._bound()
        live.tensors.load_objects(objects["optimizer"])
        live.loops.load(objects)
        self._captured = dict(objects)
        self._buffers = live.copied_buffers()

    def apply_update(self) -> None:
        """See StateProvider; the optimizer's step and what Lightning does right after it.

        Where a callback's state would be left behind, objects are not taken: another rank's serve.
        """
        live = self._bound()
        live.update()
        if not self.why_no_objects():
            live.loops.advance()
            self.capture()

    def gather_weights(self) -> None:
        """See StateProvider; there is nothing to gather."""

    def capture(self) -> None:
        """Take objects and buffers as they are now, at the end of a step, for those of the state.

        Buffers are copied: forward changes them, and a step that is run again must not find that.
        """
        self._take()
        self._is_captured_ahead = True

    def _take(self) -> None:
        live = self._bound()
        self._buffers = live.copied_buffers()
        self._captured = {"optimizer": dict(live.tensors.objects()), **live.loops.objects()}

    def begin_training(self, on_final_gradients: Callable[[], None]) -> None:
        """Have the data go on from where the state is, and be told when gradients are final.

        Args:
            on_final_gradients: called in each step, before a parameter changes.
        """
        if self._trainer.fit_loop.is_resuming:
            go_to_batch(self._trainer, self.num_batches_done())
            begin_epoch_if_over(self._trainer)
        self.objects()
        call_after_closure(self._trainer.precision_plugin, on_final_gradients)

    def num_batches_done(self) -> int:
        """Batches of its epoch that the state has seen, and that a new data loader gives again.

        0 where the epoch is over, and where the loader has a state of its own.
        """
        loops = from_json_value(self.objects()["loops"])
        if loops["state_dict"].get("combined_loader"):
            return 0
        progress = loops["epoch_loop.batch_progress"]
        done = int(progress["current"]["ready"])
        return 0 if progress["is_last_batch"] else done

    def _bound(self) -> _Live:
        if self._live is None:
            self._live = _Live(self._trainer)
        return self._live


class _Live:
    """What a trainer that has been set up trains with."""

    def __init__(self, trainer: Any) -> None:
        _require_replicated(trainer)
        self._module = trainer.lightning_module
        (self._optimizer,) = trainer.optimizers
        self.tensors = TorchStateProvider(self._module, self._optimizer)
        self.loops = Loops(trainer)

    def copied_buffers(self) -> dict[str, torch.Tensor]:
        buffers = self._module.named_buffers()
        return {f"module/{name}": buffer.detach().clone() for name, buffer in buffers}

    def update(self) -> None:
        """The optimizer's step, from gradients that are there, unscaled and clipped."""
        scaler = getattr(self.loops.precision, "scaler", None)
        if scaler is None:
            self._optimizer.step()
            return
        scaler.step(self._optimizer)
        scaler.update()


def attach_state_provider(trainer: Any) -> None:
    """Give a trainer a StateProvider, unless it has one that somebody else has made."""
    if isinstance(getattr(trainer, "state_provider", None), LightningStateProvider | None):
        trainer.state_provider = LightningStateProvider(trainer)


def _require_replicated(trainer: Any) -> None:
    kinds = {kind.__name__ for kind in type(trainer.strategy).__mro__}
    if not kinds & _REPLICATING or kinds & _DIVIDING:
        raise StrategyError(
            f"{type(trainer.strategy).__name__}: expected a strategy whose ranks all hold "
            f"everything, {' or '.join(sorted(_REPLICATING))}; give the trainer a StateProvider "
            "as state_provider"
        )
    if not trainer.lightning_module.automatic_optimization or len(trainer.optimizers) != 1:
        raise StrategyError(
            f"{len(trainer.optimizers)} optimizers: recovery from memory needs automatic "
            "optimization and one optimizer, so that a step has one place for the vote"
        )
