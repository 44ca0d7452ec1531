"""What Megatron-Core keeps for the whole process: parallel layout, number of micro-batches."""

from __future__ import annotations

from megatron.core import num_microbatches_calculator, parallel_state


def parallel_sizes() -> dict[str, int]:
    """Sizes of the kinds of parallelism, by name; empty where Megatron-Core was not set up."""
    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "data": parallel_state.get_data_parallel_world_size(),
        "context": parallel_state.get_context_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
    }


def forget_parallel_layout() -> None:
    """Forget its groups, which are dead, and the global buffers; again does nothing. Rank-local."""
    parallel_state.destroy_model_parallel()


def forget_num_microbatches() -> None:
    """Have the number of micro-batches in a step determined anew; without one does nothing."""
    num_microbatches_calculator.destroy_num_microbatches_calculator()
