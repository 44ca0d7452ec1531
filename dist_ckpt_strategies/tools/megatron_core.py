"""Megatron-Core's errors and allowed classes, imported where one is needed: it takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.formats.objects import Allowed

P = ParamSpec("P")
T = TypeVar("T")


def with_default_allowed(allow: Allowed) -> Allowed:
    """These classes, and those that any checkpoint may need when it is unpickled."""
    from dist_ckpt_strategies.megatron.types import default_allowed  # noqa: PLC0415 - see above

    return [*default_allowed(), *allow]


def raises_megatron_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: every CheckpointError that it raises is Megatron-Core's too."""

    @wraps(function)
    def adapted(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CheckpointError as error:
            from dist_ckpt_strategies.megatron.types import as_megatron_error  # noqa: PLC0415

            raise as_megatron_error(error) from error.__cause__

    return adapted
