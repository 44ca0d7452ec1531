"""Where a step of Lightning's loops begins, is voted on, changes parameters, and ends.

Imports nothing of Lightning.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

import torch

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from dist_ckpt_strategies.integrations.lightning_state import LightningStateProvider
from dist_ckpt_strategies.recovery import CheckpointManager

logger = logging.getLogger(__name__)

_ITERATING = "_DataLoaderIterDataFetcher"
"""Hands the iterator itself to the training step, which then keeps the position."""


class AfterClosure:
    """A precision plugin's ``_after_closure``, and then a call.

    Lightning runs forward, backward and the clipping of gradients within the optimizer's step, and
    this method last: after it gradients are final, and the parameters change next.

    Args:
        before: the plugin's own method.
        then: called with nothing once that has returned.
    """

    def __init__(self, before: Callable[..., Any], then: Callable[[], None]) -> None:
        self.before = before
        self._then = then

    def __call__(self, *a: Any, **kw: Any) -> Any:
        """What the plugin's own method returns."""
        found = self.before(*a, **kw)
        self._then()
        return found


def call_after_closure(plugin: Any, then: Callable[[], None]) -> None:
    """Have ``then`` called between the last change of a gradient and the first of a parameter.

    In the place of what an earlier call has set.

    Raises:
        StrategyError: the plugin has no such moment.
    """
    before = getattr(plugin, "_after_closure", None)
    if before is None:
        raise StrategyError(
            f"{type(plugin).__name__}: expected one of Lightning's precision plugins, with "
            "_after_closure"
        )
    if isinstance(before, AfterClosure):
        before = before.before
    plugin._after_closure = AfterClosure(before, then)  # noqa: SLF001 - there is no public place


def wrapper_of(trainer: Any) -> HPCallWrapper:
    """What the block has put on its trainer: ``trainer.wrapper = caller``.

    Raises:
        StrategyError: it has not.
    """
    found = getattr(trainer, "wrapper", None)
    if found is None:
        raise StrategyError(
            "the trainer has no wrapper: set trainer.wrapper to the HPCallWrapper that the block "
            "is given"
        )
    return found  # type: ignore[no-any-return]


def manager_of(trainer: Any) -> CheckpointManager:
    """The manager that the wrapper was made with.

    Raises:
        StrategyError: it was made with none.
    """
    found = wrapper_of(trainer).wrapper.checkpoint_manager
    if not isinstance(found, CheckpointManager):
        raise StrategyError(
            "recovery from memory: give HPWrapper a CheckpointManager as checkpoint_manager"
        )
    return found


def attach_state_provider(trainer: Any) -> None:
    """Give a trainer a StateProvider, unless it has one that somebody else has made."""
    if isinstance(getattr(trainer, "state_provider", None), LightningStateProvider | None):
        trainer.state_provider = LightningStateProvider(trainer)


def may_recover(trainer: Any) -> bool:
    """Whether memory brings back all of a trainer; local, with the same answer on all ranks.

    Where the counters of its loops would begin at 0 again, with schedules and data, what is kept
    is let go of: weights of a later step would go on with them.
    """
    provider = getattr(trainer, "state_provider", None)
    if getattr(provider, "brings_back_loops", True):
        return True
    manager = manager_of(trainer)
    if manager.global_step is not None:
        logger.warning(
            "step %d is not recovered from memory, which has no counters of the loops, schedules "
            "and data of %s: a checkpoint has to serve",
            manager.global_step,
            type(trainer.strategy).__name__,
        )
    manager.delete_checkpoint()
    return False


def peft_callback_of(trainer: Any) -> Any:
    """NeMo's PEFT among the callbacks, or None."""
    for callback in getattr(trainer, "callbacks", None) or []:
        if any(kind.__name__ == "PEFT" for kind in type(callback).__mro__):
            return callback
    return None


def go_to_batch(trainer: Any, num_batches: int) -> None:
    """Begin the epoch's data anew, and pass over what the state has seen of it.

    Lightning's loops count on from where they were; without this the loader would not.
    """
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher  # noqa: SLF001 - there is no public place
    if fetcher is None or type(fetcher).__name__ == _ITERATING:
        return
    _set_epoch(loop._combined_loader.flattened, loop.epoch_progress.current.processed)  # noqa: SLF001
    iter(fetcher)
    for _ in range(num_batches):
        next(fetcher)
    fetcher.fetched -= num_batches  # the loop adds them when it goes on


def begin_epoch_if_over(trainer: Any) -> None:
    """Where the state is from an epoch's last batch, have the next epoch begin as any other.

    Lightning takes it for the middle of one, and leaves out the count of the epoch that begins:
    by its own rule the state of a step in it could not be gone on from.
    """
    loop = trainer.fit_loop
    reset = getattr(loop, "reset_restart_stage", None)
    if loop.epoch_loop.batch_progress.is_last_batch and reset is not None:
        reset()


def clear_tensor_hooks(device_type: str) -> int:
    """Take all hooks off the tensors of a device; the number of tensors that had any."""
    found = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor)
        and one.device.type == device_type
        and one._backward_hooks  # noqa: SLF001 - no public way to take all off
    ]
    for tensor in found:
        tensor._backward_hooks = None  # noqa: SLF001
    return len(found)


def _set_epoch(loaders: list[Any], epoch: int) -> None:
    for loader in loaders:
        batches = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)
