"""Who takes part in the benchmark of local checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

FLOOR: Final = "floor"
NEW_MEMORY_FLOOR: Final = "floor, new memory"
OURS: Final = "local manager"
NVRX: Final = "nvrx"
FLUSHED_NVRX: Final = "nvrx, flushed"

LOCAL_PACKAGES: Mapping[str, str | None] = MappingProxyType(
    {
        FLOOR: None,
        NEW_MEMORY_FLOOR: None,
        OURS: None,
        NVRX: "nvidia_resiliency_ext",
        FLUSHED_NVRX: "nvidia_resiliency_ext",
    }
)
"""The package that each needs beside ours."""
