"""A Megatron-Core model and distributed optimizer, split into what ranks share."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dist_ckpt_strategies.errors import StrategyError, needs_megatron_core

with needs_megatron_core():
    from megatron.core import num_microbatches_calculator, parallel_state
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

_FUSED = frozenset({"FusedAdam", "FusedLayoutAdam"})
"""Adams that count steps once per group, and whose moments begin as zeros."""

Tensors = dict[str, torch.Tensor]


def model_place() -> str:
    """This rank's place in model parallelism: ranks of one place hold the same weights."""
    tensor = parallel_state.get_tensor_model_parallel_rank()
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    expert = parallel_state.get_expert_model_parallel_rank()
    # Experts may be cut by another number of ranks than everything else.
    of_expert = parallel_state.get_expert_tensor_parallel_rank()
    return f"tp{tensor}.pp{pipeline}.ep{expert}.etp{of_expert}"


def shard_number() -> int:
    """Which shard of the optimizer this rank holds; each instance has one of every number."""
    rank: int = parallel_state.get_data_parallel_rank(
        with_context_parallel=True, partial_data_parallel=True
    )
    return rank


def distributed_optimizers(optimizer: Any) -> list[Any]:
    """The distributed optimizers that an optimizer is made of.

    Raises a StrategyError if one is none, or keeps state in a way that cannot be moved from here.
    """
    parts = [
        part
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        if not part.is_stub_optimizer
    ]
    for part in parts:
        if not isinstance(part, DistributedOptimizer):
            raise StrategyError(
                f"{type(part).__name__}: expected Megatron-Core's DistributedOptimizer; set "
                "use_distributed_optimizer=True"
            )
        if type(part.optimizer).__name__ not in _FUSED:
            raise StrategyError(
                f"{type(part.optimizer).__name__}: expected a fused Adam, one of {sorted(_FUSED)}"
            )
        if part.grad_scaler is not None and part.config.loss_scale is None and part.config.fp16:
            raise StrategyError(
                "a dynamic loss scale changes before the step commit; use bfloat16, or a fixed "
                "loss_scale"
            )
    return parts


def make_moments(optimizers: Sequence[Any]) -> None:
    """Let every optimizer have its moments, as zeros where it has none yet."""
    for part in optimizers:
        for param in _main_params(part):
            state = part.optimizer.state[param]
            for name in ("exp_avg", "exp_avg_sq"):
                state.setdefault(name, torch.zeros_like(param))


def shard_tensors(optimizers: Sequence[Any]) -> Tensors:
    """This rank's main parameters and moments."""
    tensors: Tensors = {}
    for number, part in enumerate(optimizers):
        for index, param in enumerate(_main_params(part)):
            tensors[f"{number}/{index}/main"] = param
            for name, value in part.optimizer.state[param].items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{number}/{index}/{name}"] = value
    return tensors


def weight_tensors(chunks: Sequence[Any]) -> tuple[Tensors, Tensors]:
    """The weights that are gathered from the shards, and those that never change."""
    gathered: Tensors = {}
    fixed: Tensors = {}
    for number, chunk in enumerate(chunks):
        for name, param in chunk.module.named_parameters():
            (gathered if param.requires_grad else fixed)[f"{number}/{name}"] = param
    return gathered, fixed


def buffers_of(chunks: Sequence[Any]) -> Tensors:
    """The buffers of the model, such as the experts' bias of a router."""
    named = ((n, *held) for n, chunk in enumerate(chunks) for held in chunk.module.named_buffers())
    return {f"{number}/{name}": buffer for number, name, buffer in named}


def group_values(optimizers: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """Entries of the optimizers' groups other than parameters: rates, and the step."""
    return [
        [{k: v for k, v in group.items() if k != "params"} for group in part.optimizer.param_groups]
        for part in optimizers
    ]


def set_group_values(optimizers: Sequence[Any], values: Sequence[Sequence[Any]]) -> None:
    """Take over what ``group_values`` gave."""
    for part, of_it in zip(optimizers, values, strict=True):
        for group, found in zip(part.optimizer.param_groups, of_it, strict=True):
            for key in [key for key in group if key != "params" and key not in found]:
                del group[key]
            for key, value in found.items():
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def finish_gradients(optimizer: Any, optimizers: Sequence[Any]) -> bool:
    """Copy, check and clip the gradients; False if the step is to be skipped.

    Collective. What Megatron-Core's ``step`` does before it changes a parameter.
    """
    if optimizer.prepare_grads():
        return False
    norm = optimizer.get_grad_norm()
    for part in optimizers:
        if part.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                part.get_parameters(), max_norm=part.config.clip_grad, total_norm=norm
            )
    return True


def update_shards(optimizers: Sequence[Any]) -> None:
    """Step every optimizer, and copy main parameters to the model's; no rank is asked."""
    for part in optimizers:
        MixedPrecisionOptimizer.step_with_ready_grads(part)


def gather_parameters(optimizers: Sequence[Any], chunks: Sequence[Any]) -> None:
    """Gather the model's parameters from the shards. Collective over each instance."""
    for part in optimizers:
        part._copy_main_params_to_model_params()  # noqa: SLF001 - Megatron has no other way
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)


def _main_params(optimizer: Any) -> Iterator[torch.Tensor]:
    for group in optimizer.optimizer.param_groups:
        yield from group["params"]


def forget_num_microbatches() -> None:
    """Have the number of micro-batches in a step determined again; without one does nothing."""
    num_microbatches_calculator.destroy_num_microbatches_calculator()
