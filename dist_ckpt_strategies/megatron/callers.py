"""Who in Megatron-Core calls a load strategy, and how often."""

from __future__ import annotations

import sys
from typing import Any

from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)
from megatron.core.utils import get_pg_size


def num_expected_meetings(depth: int) -> int:
    """How many meetings of all ranks the present call of ``load`` has to hold.

    FullyParallelLoadStrategyWrapper calls its base strategy twice on ranks whose group has
    several ranks (objects, then tensors) and once on ranks whose group has one. With groups of
    both kinds in one job, the single call holds the meetings of both, or the others would wait
    for a third for ever. Nothing in the arguments tells the calls apart (both dicts are often
    empty), so the caller is looked up: the frame ``depth`` above this function.

    Source: ``FullyParallelLoadStrategyWrapper.load`` of Megatron-Core 0.16.1.
    """
    caller = _parallel_loader(depth + 1)
    return 2 if caller is not None and get_pg_size(caller.parallelization_group) <= 1 else 1


def is_exchanged(depth: int) -> bool:
    """Whether FullyParallelLoadStrategyWrapper is the caller of the present call of ``load``.

    It sends what one rank loaded to others, which receive into memory of the ShardedTensor's
    dtype: what is loaded must have that dtype too, or they get garbage.
    """
    return _parallel_loader(depth + 1) is not None


def _parallel_loader(depth: int) -> Any:
    caller = sys._getframe(depth).f_locals.get("self")  # noqa: SLF001 - see num_expected_meetings
    return caller if isinstance(caller, FullyParallelLoadStrategyWrapper) else None
