"""NeMo trainings that survive faults. Importing this imports nothing of NeMo.

``CheckpointlessMegatronStrategy`` and ``CheckpointlessAutoResume`` are subclasses of NeMo's own,
and are made when they are first asked for.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore

from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.errors import MissingDependencyError
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from dist_ckpt_strategies.integrations.lightning_state import (
    LoopState,
    manager_of,
    peft_callback_of,
    wrapper_of,
)
from dist_ckpt_strategies.megatron.training_state import forget_num_microbatches
from dist_ckpt_strategies.recovery import CheckpointManager
from dist_ckpt_strategies.recovery.megatron_provider import MegatronStateProvider

if TYPE_CHECKING:
    CheckpointlessAutoResume: Any
    CheckpointlessMegatronStrategy: Any

__all__ = ["CheckpointlessAutoResume", "CheckpointlessMegatronStrategy"]

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


class NemoStateProvider(LoopState, MegatronStateProvider):
    """A StateProvider over the chunks and the optimizer of NeMo's strategy, and Lightning's loops.

    Objects: beside Megatron-Core's and LoopState's, the state of the datamodule: NeMo's say how
    many samples were consumed, and their loaders begin after these.

    The chunks are in Megatron-Core's DistributedDataParallel, and the strategy has been set up.
    """

    def __init__(self, chunks: Sequence[Any], optimizer: Any, trainer: Any) -> None:
        LoopState.__init__(self, trainer)
        MegatronStateProvider.__init__(self, chunks, optimizer)

    def why_declined(self) -> str:
        """See LoopState: a datamodule must say where the data continues."""
        module = self._trainer.datamodule
        if module is not None and module.state_dict():
            return ""
        name = "a loader without datamodule" if module is None else type(module).__name__
        return f"{name} has no state_dict that says where the data continues"

    def _other_objects(self) -> dict[str, Any]:
        module = self._trainer.datamodule
        return {
            "optimizer": MegatronStateProvider.objects(self),
            "datamodule": module.state_dict() if module is not None else {},
        }

    def _load_others(self, objects: Mapping[str, Any]) -> None:
        MegatronStateProvider.load_objects(self, objects["optimizer"])
        self._trainer.datamodule.load_state_dict(objects["datamodule"])


def guard_optimizer(
    optimizer: Any, provider: MegatronStateProvider, manager: CheckpointManager
) -> None:
    """Put a step in the place of ``optimizer.step`` that commits it and holds the lock.

    The state counts as inconsistent until the end of the loop's step, where what it counts is
    captured. The lock is held until then, except while the ranks gather their weights.

    The step returns what Megatron-Core's own does: whether the update was made, the norm of the
    gradients and the number of zeros in them; the last two are None here.
    """

    def step() -> tuple[bool, None, None]:
        applies = provider.finish_gradients()
        manager.vote()
        manager.begin_update()
        provider.update_shard()
        manager.parameter_update_lock.release()
        provider.gather_weights()
        manager.parameter_update_lock.acquire()
        return applies, None, None

    optimizer.step = step


def strategy_class(base: Any) -> type:  # noqa: C901 - the methods of one class
    """A subclass of NeMo's MegatronStrategy, or of what has its methods."""

    class CheckpointlessMegatronStrategy(base):  # type: ignore[misc]
        """NeMo's MegatronStrategy, whose state survives faults in the memory of the ranks.

        The model is to be trained with ``num_distributed_optimizer_instances`` of two or more, so
        that each shard of the optimizer has a copy; ``trainer.wrapper`` is the HPCallWrapper.

        Attributes:
            base_store: rendezvous store, in which each attempt has keys of its own; None: where
                the environment says.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.base_store: Any = None

        def setup(self, trainer: Any) -> None:
            """See NeMo; then registers the trainer, and wraps its optimizer's step."""
            super().setup(trainer)
            self.trainer = trainer
            _tell_of_trainer(trainer)
            _provide_state(self, trainer)

        def setup_distributed(self) -> None:
            """See NeMo; over ``base_store``, if there is one, with keys of this attempt.

            The number of micro-batches is determined again: where it grows in a training, NeMo
            refuses one that an earlier attempt has left.
            """
            forget_num_microbatches()
            if self.base_store is not None:
                attempt = environment().get(_ATTEMPT, "0")
                self.store = PrefixStore(f"attempt{attempt}", self.base_store)
            super().setup_distributed()

        def load_model_state_dict(
            self,
            checkpoint: Mapping[str, Any],
            strict: bool = True,  # noqa: FBT001, FBT002 - the kept signature
        ) -> None:
            """See NeMo; nothing where the state has come from memory: there is no checkpoint."""
            if checkpoint:
                super().load_model_state_dict(checkpoint, strict=strict)

        def get_wrapper(self) -> HPCallWrapper:
            """The caller that the block has set on its trainer."""
            return wrapper_of(self.trainer)

        def is_peft(self) -> bool:
            """Whether one of the trainer's callbacks is NeMo's PEFT."""
            return peft_callback_of(self.trainer) is not None

        def teardown(self) -> None:
            """Nothing: abort and finalize end what a fault leaves; what survives stays there."""

    return CheckpointlessMegatronStrategy


def auto_resume_class(base: Any) -> type:
    """A subclass of NeMo's AutoResume, or of what has its methods."""

    class CheckpointlessAutoResume(base):  # type: ignore[misc]
        """NeMo's AutoResume, which looks for a checkpoint only when memory has no answer."""

        def setup(
            self,
            trainer: Any,
            model: Any = None,
            force_setup: bool = False,  # noqa: FBT001, FBT002 - the kept signature
        ) -> None:
            """See NeMo; unless forced, put off until CheckpointlessCompatibleConnector asks.

            A trainer without a wrapper has no memory to ask, and is set up at once.
            """
            if force_setup or getattr(trainer, "wrapper", None) is None:
                super().setup(trainer, model)
                return
            trainer.fresume = self

    return CheckpointlessAutoResume


def _tell_of_trainer(trainer: Any) -> None:
    """Callbacks with hooks, and the parts of abort and finalize that ask for it."""
    wrapper = wrapper_of(trainer).wrapper
    aborts = getattr(wrapper.abort, "instances", [wrapper.abort])
    registering = [
        *(getattr(callback, "register_hooks", None) for callback in trainer.callbacks),
        *(getattr(part, "register_attributes", None) for part in (wrapper.finalize, *aborts)),
    ]
    for register in registering:
        if register is not None:
            register(trainer)


def _provide_state(strategy: Any, trainer: Any) -> None:
    """A StateProvider over the strategy's chunks and its Megatron-Core optimizer, if it has one."""
    optimizers = [
        mcore
        for one in getattr(strategy, "optimizers", None) or []
        if (mcore := getattr(one, "mcore_optimizer", None)) is not None
    ]
    if len(optimizers) == 1:
        provider = NemoStateProvider(list(strategy.megatron_parallel), optimizers[0], trainer)
        trainer.state_provider = provider
        guard_optimizer(optimizers[0], provider, manager_of(trainer))


def __getattr__(name: str) -> Any:
    """A class over NeMo's, on first use; a MissingDependencyError if NeMo cannot be imported."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == "CheckpointlessAutoResume":
            cls = auto_resume_class(import_module("nemo.lightning.resume").AutoResume)
        else:
            strategies = import_module("nemo.lightning.pytorch.strategies")
            cls = strategy_class(strategies.MegatronStrategy)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{name} needs NeMo with its Lightning strategies: pip install 'nemo_toolkit[llm]' "
            f"({error})"
        ) from error
    cls.__name__ = cls.__qualname__ = name
    cls.__module__ = __name__
    globals()[name] = cls  # the next look finds it
    return cls
