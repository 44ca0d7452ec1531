"""How Megatron-Core has laid the job out, to be written down."""

from __future__ import annotations

from megatron.core import parallel_state


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
