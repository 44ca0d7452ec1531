"""What Megatron-Core keeps for the whole process: parallel layout, number of micro-batches."""

from __future__ import annotations

from megatron.core import num_microbatches_calculator, parallel_state


def forget_parallel_layout() -> None:
    """Forget its groups, which are dead, and the global buffers; again does nothing. Rank-local."""
    parallel_state.destroy_model_parallel()


def forget_num_microbatches() -> None:
    """Have the number of micro-batches in a step determined anew; without one does nothing."""
    num_microbatches_calculator.destroy_num_microbatches_calculator()
