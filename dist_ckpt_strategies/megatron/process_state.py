"""What Megatron-Core keeps for the whole process: random states, parallel layout, micro-batches.

Importing this does not import it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

_MODULE = "megatron.core.tensor_parallel.random"


def tracked_states() -> dict[str, torch.Tensor]:
    """The states of the tracker by name; empty where this process has not imported it."""
    tracker = _tracker()
    if tracker is None:
        return {}
    return {name: _as_tensor(state) for name, state in sorted(tracker.get_states().items())}


def set_tracked_states(states: Mapping[str, torch.Tensor]) -> None:
    """Put the tracker into these states; nothing happens where there are none."""
    tracker = _tracker()
    if tracker is None or not states:
        return
    current = dict(tracker.get_states())
    for name, state in states.items():
        generator = current.get(name)
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        else:
            current[name] = state.clone()
    tracker.set_states(current)


def _tracker() -> Any:
    module = sys.modules.get(_MODULE)
    tracker = None if module is None else vars(module).get("_CUDA_RNG_STATE_TRACKER")
    return tracker if tracker is not None and tracker.is_initialized() else None


def _as_tensor(state: Any) -> torch.Tensor:
    found: torch.Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return found.clone()


def forget_parallel_layout() -> None:
    """Forget its groups, which are dead, and the global buffers; again does nothing. Rank-local."""
    from megatron.core import parallel_state  # noqa: PLC0415 - takes seconds

    parallel_state.destroy_model_parallel()


def forget_num_microbatches() -> None:
    """Have the number of micro-batches in a step determined anew; without one does nothing."""
    from megatron.core import num_microbatches_calculator  # noqa: PLC0415 - takes seconds

    num_microbatches_calculator.destroy_num_microbatches_calculator()
