"""A model's arrays for other tools, where a checkpoint was looked for."""

from __future__ import annotations

from collections.abc import Iterable

_SUFFIXES = (".safetensors", ".safetensors.index.json")

HOLDS_SAFETENSORS = (
    "it holds files of safetensors, a model's arrays and no checkpoint; the library safetensors "
    "reads them, and `dist-ckpt diff` compares what `dist-ckpt convert` wrote with a checkpoint"
)
"""What such a directory is, and who reads it; follows what was looked for there."""


def are_safetensors(names: Iterable[str]) -> bool:
    """Whether there are files of safetensors among those of a directory without a marker."""
    return any(name.endswith(_SUFFIXES) for name in names)
