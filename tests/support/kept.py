"""Calls as the reference of another package states them."""

from __future__ import annotations

import inspect
from typing import Any


def require_understood(function: Any, parameters: str) -> None:
    """A call takes the parameters that a reference states, without self, and asks for no more."""
    own = own_parameters(function)
    theirs = [part.partition("=") for part in parameters.split(", ") if part]
    assert [_starred(one) for one in own[: len(theirs)]] == [name for name, _, _ in theirs]
    for parameter, (name, _, default) in zip(own, theirs, strict=False):
        assert name.startswith("*") or parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert not default or repr(parameter.default) == default
    for parameter in own[len(theirs) :]:
        is_optional = parameter.default is not parameter.empty
        assert is_optional or parameter.kind is parameter.VAR_KEYWORD


def own_parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a call, without self."""
    own = list(inspect.signature(function).parameters.values())
    return own[1:] if own and own[0].name == "self" else own


def _starred(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name
