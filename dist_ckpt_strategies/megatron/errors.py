"""Our errors as Megatron-Core's, so that ``except`` on either works."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from dist_ckpt_strategies.errors import CheckpointError, joint_class
from dist_ckpt_strategies.megatron.types import CheckpointingException

P = ParamSpec("P")
T = TypeVar("T")


def as_megatron_error(error: CheckpointError) -> CheckpointError:
    """The same error, of a class that is also a ``CheckpointingException``."""
    kind: Any = type(error)
    if issubclass(kind, CheckpointingException):
        return error
    adapted = joint_class(kind.__name__, (kind, CheckpointingException))
    found: CheckpointError = adapted.__new__(adapted, *error.args)
    found.args = error.args
    found.__dict__.update(error.__dict__)
    found.path = error.path  # an ImportError keeps it elsewhere
    found.__traceback__ = error.__traceback__
    return found


def raises_megatron_errors(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: every CheckpointError that it raises is Megatron-Core's too."""

    @wraps(function)
    def adapted(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except CheckpointError as error:
            raise as_megatron_error(error) from error.__cause__

    return adapted
