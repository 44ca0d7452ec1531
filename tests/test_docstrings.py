"""Nothing public is left unexplained."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType
from typing import Any

import pytest

import dist_ckpt_strategies
from dist_ckpt_strategies import strategies


def public_of(module: Any) -> Iterator[tuple[str, Any]]:
    """Public classes and functions made in a module, and the public members of the classes."""
    for name, value in vars(module).items():
        is_ours = getattr(value, "__module__", None) == module.__name__
        if name.startswith("_") or not is_ours or not callable(value):
            continue
        yield f"{module.__name__}.{name}", value
        for member, content in vars(value).items() if isinstance(value, type) else ():
            if not member.startswith("_") and isinstance(content, (property, FunctionType)):
                yield f"{module.__name__}.{name}.{member}", content


def strategy_modules() -> list[Any]:
    names = (info.name for info in pkgutil.iter_modules(strategies.__path__))
    return [import_module(f"{strategies.__name__}.{name}") for name in names]


@pytest.mark.parametrize("name", dist_ckpt_strategies.__all__)
def test_every_public_name_of_the_package_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(dist_ckpt_strategies, name))


@pytest.mark.parametrize("module", strategy_modules(), ids=lambda module: module.__name__)
def test_everything_public_in_the_strategies_has_a_docstring(module: Any) -> None:
    assert module.__doc__
    assert [name for name, value in public_of(module) if not inspect.getdoc(value)] == []
