"""Calls that are to be made here as they are made of another package."""

from inspect import Parameter, signature
from typing import Any


def own_parameters(function: Any) -> list[Parameter]:
    """The parameters of a call, without self."""
    own = list(signature(function).parameters.values())
    return own[1:] if own and own[0].name == "self" else own


def require_understood(function: Any, theirs: list[Parameter]) -> None:
    """A call takes the other's parameters, with the defaults that those have, and needs no more."""
    own = own_parameters(function)
    taken, more = own[: len(theirs)], own[len(theirs) :]
    assert [(one.name, one.kind) for one in taken] == [(one.name, one.kind) for one in theirs]
    for one, other in zip(taken, theirs, strict=True):
        assert other.default in (Parameter.empty, one.default)
    for one in more:
        assert one.default is not Parameter.empty or one.kind is Parameter.VAR_KEYWORD
