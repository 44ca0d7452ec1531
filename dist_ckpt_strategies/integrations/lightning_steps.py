"""Where a step of Lightning's loops begins, is voted on, changes parameters, and ends.

Imports nothing of Lightning.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from dist_ckpt_strategies.errors import StrategyError
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from dist_ckpt_strategies.recovery import CheckpointManager

_ITERATING = "_DataLoaderIterDataFetcher"
"""Hands the iterator itself to the training step, which then keeps the position."""


def call_after_closure(plugin: Any, then: Callable[[], None]) -> None:
    """Have ``then`` called between the last change of a gradient and the first of a parameter.

    Lightning runs forward, backward and the clipping of gradients within the optimizer's step, and
    the precision plugin's ``_after_closure`` last. An earlier call's ``then`` is replaced.

    Raises:
        StrategyError: the plugin has no such moment.
    """
    found = getattr(plugin, "_after_closure", None)
    if found is None:
        raise StrategyError(
            f"{type(plugin).__name__}: expected one of Lightning's precision plugins, with "
            "_after_closure"
        )
    before = getattr(found, "plugins_own", found)

    def after(*a: Any, **kw: Any) -> Any:
        result = before(*a, **kw)
        then()
        return result

    setattr(after, "plugins_own", before)  # noqa: B010 - a function has no such attribute to mypy
    plugin._after_closure = after  # noqa: SLF001 - there is no public place


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
    _set_epoch(loop)
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


def _set_epoch(loop: Any) -> None:
    """Tell the samplers of the fit loop's loaders which epoch it is."""
    for loader in loop._combined_loader.flattened:  # noqa: SLF001 - there is no public place
        batches = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
            tell = getattr(sampler, "set_epoch", None)
            if tell is not None:
                tell(loop.epoch_progress.current.processed)
