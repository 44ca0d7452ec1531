"""What arrays of older optimizer states are called now."""

from __future__ import annotations

import re
from collections.abc import Iterable

OLD_FORM = "fully_sharded_model_space"
"""Written by Megatron-Core up to 0.15.3, and NeMo 1.x."""

NEW_FORM = "fully_reshardable"
"""Read and written by Megatron-Core 0.15 and later: the same whole arrays, other names."""

_MASTER = re.compile(r"((?:chained_\d+\.)*optimizer\.state\.)fp32_param\.(.+)", re.DOTALL)
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")


def upgraded_keys(keys: Iterable[str]) -> dict[str, str]:
    """The new key of each array that has one: ``fp32_param`` is called ``param`` now."""
    found = {key: _MASTER.fullmatch(key) for key in keys}
    return {key: f"{match[1]}param.{match[2]}" for key, match in found.items() if match}


def is_of_optimizer(key: str) -> bool:
    """Whether an array belongs to the optimizer's state, by its key; others are the model's."""
    return _OPTIMIZER.match(key) is not None
