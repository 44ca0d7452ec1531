"""How many micro-batches a step has: a number that Megatron-Core keeps for the whole process."""

from __future__ import annotations

from megatron.core import num_microbatches_calculator


def forget_num_microbatches() -> None:
    """Have it determined anew; without an earlier one does nothing."""
    num_microbatches_calculator.destroy_num_microbatches_calculator()
