"""Takes Megatron-Core's parallel layout down, whose process groups are dead."""

from __future__ import annotations

from megatron.core import parallel_state


def forget_parallel_layout() -> None:
    """Forget the groups and the global buffers; again does nothing. Nobody is asked."""
    parallel_state.destroy_model_parallel()
