"""What may be in a state, and which state dicts are known, unless a caller says more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dist_ckpt_strategies.formats.objects import names_of
from dist_ckpt_strategies.local.mcore_codecs import mcore_codec, megatron_codec
from dist_ckpt_strategies.local.state_codecs import StateCodecs, basic_codec
from dist_ckpt_strategies.megatron.types import default_allowed


def default_codecs() -> StateCodecs:
    """The codecs of this package's own state dicts, and of Megatron-Core's."""
    return StateCodecs([basic_codec(), mcore_codec(), megatron_codec()])


def default_allowed_names(allow: Sequence[Any] = ()) -> Mapping[str, Any]:
    """Classes and functions that a state may hold, by name.

    Args:
        allow: further ones.

    Raises:
        StrategyError: something in it is neither a class nor a function.
    """
    return names_of([*default_allowed(), *allow])
