"""Megatron-Core's own state dict for local checkpoints."""

from __future__ import annotations

from typing import Any

TENSOR_AWARE_CLASS = (
    "megatron.core.dist_checkpointing.tensor_aware_state_dict.MCoreTensorAwareStateDict"
)
"""Its full name, by which a state of it is known without importing it."""


def tensor_aware_class() -> Any:
    """The class; the first call imports NVRx, on which it builds where that is installed."""
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import (  # noqa: PLC0415
        MCoreTensorAwareStateDict,
    )

    return MCoreTensorAwareStateDict
