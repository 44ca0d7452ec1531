"""What a strategy and a resumption of NeMo do more; their bases are given. No import of NeMo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dist_ckpt_strategies.comm.rendezvous import store_of_attempt
from dist_ckpt_strategies.config import environment
from dist_ckpt_strategies.inprocess.wrap import HPCallWrapper
from dist_ckpt_strategies.integrations.lightning_steps import (
    manager_of,
    peft_callback_of,
    wrapper_of,
)
from dist_ckpt_strategies.integrations.megatron_steps import guard_optimizer
from dist_ckpt_strategies.integrations.nemo_state import NemoStateProvider
from dist_ckpt_strategies.megatron.process_state import forget_num_microbatches

_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


def strategy_class(base: Any) -> type:  # noqa: C901 - the methods of one class
    """A subclass of NeMo's MegatronStrategy, or of what has its methods."""

    class CheckpointlessMegatronStrategy(base):  # type: ignore[misc]
        """NeMo's MegatronStrategy, whose state survives faults in the memory of the ranks.

        The model is to be trained with ``num_distributed_optimizer_instances`` of two or more, so
        that each shard of the optimizer has a copy; ``trainer.wrapper`` is the HPCallWrapper.

        Attributes:
            base_store: where ranks meet, over which each attempt has keys of its own; None: where
                the environment says.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.base_store: Any = None

        def setup(self, trainer: Any) -> None:
            """See NeMo; the parts that need the trainer are told of it, and its steps are ours."""
            super().setup(trainer)
            self.trainer = trainer
            _tell_of_trainer(trainer)
            _provide_state(self, trainer)

        def setup_distributed(self) -> None:
            """See NeMo; over ``base_store``, if there is one, with keys of this attempt.

            The number of micro-batches is determined anew: where it grows in a training, NeMo
            refuses one that an earlier attempt has left.
            """
            forget_num_microbatches()
            if self.base_store is not None:
                attempt = environment().get(_ATTEMPT, "0")
                self.store = store_of_attempt(self.base_store, attempt)
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
            """What the block has put on its trainer."""
            return wrapper_of(self.trainer)

        def is_peft(self) -> bool:
            """Whether one of the trainer's callbacks is NeMo's PEFT."""
            return peft_callback_of(self.trainer) is not None

        def teardown(self) -> None:
            """Nothing: abort and finalize end what a fault leaves; what survives stays where it is.

            After a training that no fault has ended there is nothing to free but the process.
            """

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
        found
        for one in getattr(strategy, "optimizers", None) or []
        if (found := getattr(one, "mcore_optimizer", None)) is not None
    ]
    if len(optimizers) == 1:
        provider = NemoStateProvider(list(strategy.megatron_parallel), optimizers[0], trainer)
        trainer.state_provider = provider
        guard_optimizer(optimizers[0], provider, manager_of(trainer))
