"""The state of a Lightning trainer, as a StateProvider, and hooks into its steps.

Imports nothing of Lightning.
"""

import copy
import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dist_ckpt_strategies.errors import RestartError, StrategyError
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from dist_ckpt_strategies.megatron.types import ShardedObject, ShardedTensor
from dist_ckpt_strategies.recovery import CheckpointManager
from dist_ckpt_strategies.recovery.provider import ReplicatedState
from dist_ckpt_strategies.recovery.torch_provider import TorchStateProvider

_ITERATING = "_DataLoaderIterDataFetcher"
"""Hands the iterator itself to the training step, which then keeps the position."""

_REPLICATING = frozenset({"DDPStrategy", "SingleDeviceStrategy"})
"""Strategies, and classes made from them, whose ranks all hold everything."""

_DIVIDING = frozenset({"MegatronStrategy"})
"""Made from one of those, and yet its ranks hold different parts."""


class LoopState(ReplicatedState):
    """A trainer's loops, schedules, precision and callbacks, as Lightning's checkpoint has them.

    It is captured at the end of each step: the moment at which Lightning's own checkpoints are
    made, and that its loops can go on from. Only the trainer can end a step, so a rank that was
    interrupted between the step commit and the end of its step takes the state of another rank.

    The loops are held from the first use on: a trainer that is torn down drops them.
    """

    def __init__(self, trainer: Any) -> None:
        ReplicatedState.__init__(self)
        self._trainer = trainer
        self._captured: dict[str, Any] | None = None
        self._held: tuple[Any, ...] | None = None

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider; as they were captured."""
        if self._captured is None:
            self.capture()
        assert self._captured is not None  # noqa: S101 - just taken
        return self._captured

    def capture(self) -> None:
        """Take the objects as they are now, at the end of a step."""
        self._captured = copy.deepcopy({**self._other_objects(), **self._loop_objects()})

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider; before the data loader is made."""
        self._captured = dict(objects)
        objects_now = copy.deepcopy(self._captured)
        self._load_others(objects_now)
        fit, precision, schedules, callbacks = self._bound()
        # To a loop that has not begun, a state would say that it continues from somewhere.
        if objects_now["loops"]["epoch_loop.batch_progress"]["total"]["ready"]:
            fit.load_state_dict(objects_now["loops"])
        for one, state in zip(schedules, objects_now["schedules"], strict=True):
            one.scheduler.load_state_dict(state)
        precision.load_state_dict(objects_now["precision"])
        for callback in callbacks:
            if callback.state_key in objects_now["callbacks"]:
                callback.load_state_dict(objects_now["callbacks"][callback.state_key])

    def why_declined(self) -> str:
        """Why a recovery from memory is not tried, in words; empty if it is."""
        return ""

    def begin_training(self, on_final_gradients: Callable[[], None]) -> None:
        """The state is loaded, and the first step comes next.

        ``on_final_gradients`` is to be called in each step before a parameter changes, where the
        optimizer does not commit the step.
        """
        del on_final_gradients
        self.objects()
        self.set_step(int(self._trainer.global_step))

    def apply_update(self) -> None:
        """Raise a RestartError: only the trainer can end a step."""
        raise RestartError(
            "it was interrupted before the end of its step, which only its trainer can complete"
        )

    def _other_objects(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_others(self, objects: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def _loop_objects(self) -> dict[str, Any]:
        fit, precision, schedules, callbacks = self._bound()
        states = {callback.state_key: callback.state_dict() for callback in callbacks}
        return {
            "loops": fit.state_dict(),
            "schedules": [one.scheduler.state_dict() for one in schedules],
            "precision": precision.state_dict(),
            "callbacks": {key: state for key, state in states.items() if state},
        }

    def _bound(self) -> tuple[Any, ...]:
        if self._held is None:
            trainer = self._trainer
            schedules, callbacks = list(trainer.lr_scheduler_configs), list(trainer.callbacks)
            self._held = (trainer.fit_loop, trainer.precision_plugin, schedules, callbacks)
        return self._held


class LightningStateProvider(LoopState):
    """A StateProvider over a trainer whose ranks all hold everything.

    Tensors: the LightningModule's and its optimizer's. Objects: see LoopState.

    Nothing of the trainer is asked for before it is set up.

    Args:
        trainer: with automatic optimization, hence one optimizer.
    """

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._tensors: TorchStateProvider | None = None

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateProvider; with the buffers of the end of the step before."""
        return self._provider().parts()

    def begin_training(self, on_final_gradients: Callable[[], None]) -> None:
        """See LoopState; the data continues from the state's position."""
        if self._trainer.fit_loop.is_resuming:
            go_to_batch(self._trainer, self.num_batches_done())
            # Of an epoch's last batch, Lightning would take the state for the middle of an epoch,
            # and leave out the count of the next one.
            loop = self._trainer.fit_loop
            if loop.epoch_loop.batch_progress.is_last_batch and hasattr(
                loop, "reset_restart_stage"
            ):
                loop.reset_restart_stage()
        super().begin_training(on_final_gradients)
        call_after_closure(self._trainer.precision_plugin, on_final_gradients)

    def sharded_state_dict(self) -> dict[str, Any]:
        """Tensors and objects for ``save`` and ``load``; ranks are to write even shares.

        The first rank writes the buffers, which may differ between ranks, as those of BatchNorm.
        """
        rank, size = self._trainer.global_rank, self._trainer.world_size
        buffers = {f"model/module/{n}" for n, _ in self._trainer.lightning_module.named_buffers()}
        objects = self.objects()  # first: from then on the parts have the step's own buffers
        named = {
            f"{part}/{name}": tensor.detach()
            for part, tensors in self.parts().items()
            for name, tensor in tensors.items()
        }
        shards = {
            key: ShardedTensor.from_rank_offsets(
                key, tensor, replica_id=rank if key in buffers else (rank + number) % size
            )
            for number, (key, tensor) in enumerate(named.items())
        }
        kept = ShardedObject("objects", objects, (1,), (0,), replica_id=rank)
        return {"tensors": shards, "objects": kept}

    def resumed_state_dict(self) -> dict[str, Any]:
        """Like ``sharded_state_dict``, of what the trainer has now, before its first step.

        Its loops and callbacks have begun anew: of these it has what was loaded.
        """
        now, loaded = LightningStateProvider(self._trainer), self.objects()
        now._captured = {**now.objects(), **{n: loaded[n] for n in ("loops", "callbacks")}}
        return now.sharded_state_dict()

    def num_batches_done(self) -> int:
        """Batches of its epoch that the state has seen, and that a new data loader gives again.

        0 where the epoch is over, and where the loader has a state of its own.
        """
        loops = self.objects()["loops"]
        if loops["state_dict"].get("combined_loader"):
            return 0
        progress = loops["epoch_loop.batch_progress"]
        done = int(progress["current"]["ready"])
        return 0 if progress["is_last_batch"] else done

    def _other_objects(self) -> dict[str, Any]:
        self._provider().keep_buffers()
        return {"optimizer": self._provider().objects()}

    def _load_others(self, objects: Mapping[str, Any]) -> None:
        self._provider().load_objects(objects["optimizer"])
        self._provider().keep_buffers()

    def _provider(self) -> TorchStateProvider:
        if self._tensors is None:
            _require_replicated(self._trainer)
            (optimizer,) = self._trainer.optimizers
            self._tensors = TorchStateProvider(self._trainer.lightning_module, optimizer)
        return self._tensors


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
            "optimization and one optimizer, so that a step is committed in one place"
        )


def call_after_closure(plugin: Any, then: Callable[[], None]) -> None:
    """Have ``then`` called between the last change of a gradient and the first of a parameter.

    Lightning runs forward, backward and the clipping of gradients within the optimizer's step, and
    the precision plugin's ``_after_closure`` last. An earlier call's ``then`` is replaced.
    Raises a StrategyError if the plugin has no such moment.
    """
    theirs = getattr(plugin, "_after_closure", None)
    if theirs is None:
        raise StrategyError(
            f"{type(plugin).__name__}: expected one of Lightning's precision plugins, with "
            "_after_closure"
        )
    before = getattr(theirs, "plugins_own", theirs)

    def after(*a: Any, **kw: Any) -> Any:
        result = before(*a, **kw)
        then()
        return result

    setattr(after, "plugins_own", before)  # noqa: B010 - a function has no such attribute to mypy
    plugin._after_closure = after  # noqa: SLF001 - there is no public place


def wrapper_of(trainer: Any) -> HPCallWrapper:
    """The caller that the block has set as ``trainer.wrapper``; else a StrategyError."""
    wrapper = getattr(trainer, "wrapper", None)
    if wrapper is None:
        raise StrategyError(
            "the trainer has no wrapper: set trainer.wrapper to the HPCallWrapper that the block "
            "is given"
        )
    return wrapper  # type: ignore[no-any-return]


def manager_of(trainer: Any) -> CheckpointManager:
    """The manager that the wrapper was made with; a StrategyError if there is none."""
    manager = wrapper_of(trainer).wrapper.checkpoint_manager
    if not isinstance(manager, CheckpointManager):
        raise StrategyError(
            "recovery from memory: give HPWrapper a CheckpointManager as checkpoint_manager"
        )
    return manager


def peft_callback_of(trainer: Any) -> Any:
    """NeMo's PEFT among the callbacks, or None."""
    for callback in getattr(trainer, "callbacks", None) or []:
        if any(kind.__name__ == "PEFT" for kind in type(callback).__mro__):
            return callback
    return None


def go_to_batch(trainer: Any, num_batches: int) -> None:
    """Restart the epoch's data, and pass over what the state has seen of it.

    Lightning's loops count on from where they were; without this the loader would not.
    """
    loop = trainer.fit_loop
    fetcher = loop._data_fetcher  # noqa: SLF001 - there is no public place
    if fetcher is None or type(fetcher).__name__ == _ITERATING:
        return
    for loader in loop._combined_loader.flattened:  # noqa: SLF001
        batches = getattr(loader, "batch_sampler", None)
        for sampler in (getattr(loader, "sampler", None), getattr(batches, "sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(loop.epoch_progress.current.processed)
    iter(fetcher)
    for _ in range(num_batches):
        next(fetcher)
    fetcher.fetched -= num_batches  # the loop adds them when it continues


def clear_tensor_hooks(device_type: str) -> int:
    """Take all hooks off the tensors of a device; the number of tensors that had any."""
    hooked = [
        one
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor)
        and one.device.type == device_type
        and one._backward_hooks  # noqa: SLF001 - no public way to take all off
    ]
    for tensor in hooked:
        tensor._backward_hooks = None  # noqa: SLF001
    return len(hooked)
