"""What the wrapper knows of the function that it runs, and of what came out of it."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any


def parameter_of(kind: type, fn: Callable[..., Any]) -> str | None:
    """The name of the parameter annotated with ``kind``, alone or among others; None: none is."""
    try:
        parameters = inspect.signature(fn).parameters
    except ValueError:  # some functions that are written in C do not say
        return None
    for name, parameter in parameters.items():
        if _names(kind, parameter.annotation):
            return name
    return None


def without_argument(
    name: str, fn: Callable[..., Any], a: tuple[Any, ...], kw: Mapping[str, Any]
) -> bool:
    """Whether a call gives nothing for a parameter."""
    return name not in inspect.signature(fn).bind_partial(*a, **kw).arguments


def _names(kind: type, annotation: Any) -> bool:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return re.search(rf"\b{kind.__name__}\b", annotation) is not None
    if annotation is kind:
        return True
    return any(_names(kind, one) for one in typing.get_args(annotation))
