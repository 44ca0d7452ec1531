"""The model of the sets, in any parallel layout, and its state as global tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.cli.demo.main import ModelSize, ParallelLayout
from dist_ckpt_strategies.cli.demo.rank import build_model, build_optimizer

METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


@contextmanager
def parallel(layout: ParallelLayout) -> Iterator[None]:
    """Within the block Megatron-Core's groups are those of the layout, and it needs no GPU."""
    with cpu_stand_ins():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp
        )
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


@dataclass(frozen=True)
class Trainee:
    """One rank's part of the model and its optimizer, fresh."""

    model: Any
    optimizer: Any

    @classmethod
    def build(cls, layout: ParallelLayout, num_rows: int) -> Trainee:
        """The sets' model with a vocabulary padded to ``num_rows``."""
        size = ModelSize(4, 64, num_heads=4, ffn_hidden=256, vocab=num_rows, sequence_length=32)
        model = build_model(size, layout)
        _, optimizer = build_optimizer(model, lr=0.001, weight_decay=0.01)
        return cls(model.module, optimizer)

    def state(self, *, is_loading: bool) -> dict[str, Any]:
        """The sharded state dict. Collective over the world."""
        model = self.model.sharded_state_dict(metadata=METADATA)
        optimizer = self.optimizer.sharded_state_dict(
            model, is_loading=is_loading, metadata=METADATA
        )
        return {"model": model, "optimizer": optimizer}

    def take_over(self, loaded: Mapping[str, Any]) -> None:
        """Put loaded values into the model and its optimizer."""
        self.model.load_state_dict(loaded["model"], strict=True)
        self.optimizer.load_state_dict(loaded["optimizer"])


def whole_tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Every global tensor, assembled on rank 0 without this package. Collective: world.

    A mistake that loads and saves share would not be seen in what is saved and read back.
    """
    apply_factories(state)
    own = [
        (shard.key, tuple(shard.global_shape), shard.global_slice(), shard.data.detach())
        for shard in nested_values(state)
        if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
    ]
    content = BytesIO()
    torch.save(own, content)  # at once: a pickle of each tensor takes seconds
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(content.getvalue(), gathered if dist.get_rank() == 0 else None)
    parts = [torch.load(BytesIO(part), weights_only=False) for part in gathered if part]
    whole: dict[str, torch.Tensor] = {}
    for key, shape, index, data in chain.from_iterable(parts):
        whole.setdefault(key, torch.zeros(shape, dtype=data.dtype))[index] = data
    return whole
