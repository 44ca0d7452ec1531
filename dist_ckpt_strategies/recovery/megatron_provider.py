"""The state of a Megatron-Core training, with its distributed optimizer."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dist_ckpt_strategies.megatron.training_state import (
    buffers_of,
    distributed_optimizers,
    finish_gradients,
    gather_parameters,
    group_values,
    make_moments,
    model_place,
    set_group_values,
    shard_number,
    shard_tensors,
    update_shards,
    weight_tensors,
)
from dist_ckpt_strategies.recovery.provider import ReplicatedState, StepBuffers


class MegatronStateProvider(ReplicatedState):
    """A StateProvider over DistributedDataParallel chunks and a distributed optimizer.

    With ``num_distributed_optimizer_instances`` of two or more, each shard of the optimizer is
    held by as many ranks. Megatron's ``optimizer.step()`` is cut in three::

        provider.finish_gradients()       # collective: copies, checks and clips them
        manager.vote()
        with manager.updating():
            provider.apply_update()       # local
        provider.gather_weights()         # collective within the instance

    The optimizer is what ``get_megatron_optimizer`` gave; one of a kind whose state cannot be moved
    from here is a StrategyError. Each update moves the scheduler on by ``increment`` samples.
    Buffers are those of the step's beginning until the update; see TorchStateProvider.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any = None,
        *,
        increment: int = 1,
        step: int = 0,
    ) -> None:
        super().__init__(step)
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._optimizers = distributed_optimizers(optimizer)
        self._scheduler = scheduler
        self._increment = increment
        self._applies = True
        self._buffers = StepBuffers(lambda: buffers_of(self._chunks))
        # Kept, for Megatron's own groups may be gone when they are asked for again.
        self._place, self._shard = model_place(), shard_number()
        make_moments(self._optimizers)

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        super().set_step(step)
        self._buffers.keep()

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateProvider."""
        gathered, fixed = weight_tensors(self._chunks)
        return {
            f"weights/{self._place}": gathered,
            f"fixed/{self._place}": fixed | self._buffers.tensors(),
            f"optimizer/{self._place}/{self._shard}": shard_tensors(self._optimizers),
        }

    def gathered_parts(self) -> frozenset[str]:
        """See StateProvider."""
        return frozenset({f"weights/{self._place}"})

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider."""
        schedule = self._scheduler.state_dict() if self._scheduler else None
        groups = group_values(self._optimizers)
        return copy.deepcopy({"groups": groups, "scheduler": schedule})

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider."""
        self._buffers.restore()
        found = copy.deepcopy(dict(objects))
        if self._scheduler:
            self._scheduler.num_steps = 0  # Megatron-Core's adds what it loads
            self._scheduler.load_state_dict(found["scheduler"])
        set_group_values(self._optimizers, found["groups"])

    def finish_gradients(self) -> bool:
        """Make the gradients final; False if they are not finite, and the update does nothing.

        Collective over the ranks of the model. The step commit comes next.
        """
        with torch.no_grad():
            self._applies = finish_gradients(self._optimizer, self._optimizers)
        return self._applies

    def apply_update(self) -> None:
        """See StateProvider; the block calls it too."""
        self.update_shard()

    def update_shard(self) -> None:
        """Update this rank's shard, and move the scheduler on."""
        self._buffers.accept()
        if not self._applies:
            return
        with torch.no_grad():
            update_shards(self._optimizers)
        if self._scheduler:
            self._scheduler.step(increment=self._increment)

    def gather_weights(self) -> None:
        """See StateProvider."""
        with torch.no_grad():
            gather_parameters(self._optimizers, self._chunks)
