"""Names that users know from elsewhere: whether they are here, as they were, and tested."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Kept:
    """A name that code written for another package uses.

    Attributes:
        name: module below ``home``, class, member.
        parameters: as the reference states them, without self; None for what is not called.
        test: file and function that show its behaviour.
        home: the package that the module is in.
    """

    name: str
    parameters: str | None
    test: str
    home: str = "dist_ckpt_strategies.strategies"

    def find(self) -> Any:
        """What has the name."""
        module, *names = self.name.split(".")
        found: Any = import_module(f"{self.home}.{module}")
        for name in names:
            found = getattr(found, name)
        return found


def require_understood(kept: Kept) -> None:
    """Calls as the reference states them are understood, and ask for nothing more."""
    own = own_parameters(kept.find())
    theirs = _stated(str(kept.parameters))
    assert [_starred(parameter) for parameter in own[: len(theirs)]] == [name for name, _ in theirs]
    for parameter, (name, default) in zip(own, theirs, strict=False):
        assert name.startswith("*") or parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        assert default is None or repr(parameter.default) == default
    for parameter in own[len(theirs) :]:
        is_optional = parameter.default is not parameter.empty
        assert is_optional or parameter.kind is parameter.VAR_KEYWORD


def own_parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a call, without self."""
    own = list(inspect.signature(function).parameters.values())
    return own[1:] if own and own[0].name == "self" else own


def require_tested(kept: Kept) -> None:
    """The test that is named exists."""
    path, _, function = kept.test.partition("::")
    assert function in _functions_of(path)


def _stated(parameters: str) -> list[tuple[str, str | None]]:
    """Names and defaults of parameters as the reference writes them."""
    pairs = (part.partition("=") for part in parameters.split(", ") if part)
    return [(name, default or None) for name, _, default in pairs]


def _starred(parameter: inspect.Parameter) -> str:
    stars: dict[Any, str] = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


@cache
def _functions_of(path: str) -> frozenset[str]:
    """Names of the functions of a file."""
    tree = ast.parse((_ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
