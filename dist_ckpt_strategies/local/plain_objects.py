"""Objects as their fields and what they hold, and made again of them without calling their code."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any

from dist_ckpt_strategies.errors import PlanError

_NO_SLOTS = frozenset({"__dict__", "__weakref__"})


@dataclass(frozen=True, slots=True)
class Base:
    """A built-in class that others derive from: what its instances hold beside their fields.

    Attributes:
        name: stands for it in the encoding.
        cls: the class itself.
        content_of: what an instance holds, as items that can be packed.
        made: an instance of a class derived from it that holds them.
    """

    name: str
    cls: type[Any]
    content_of: Callable[[Any], Iterable[Any]]
    made: Callable[[type[Any], Sequence[Any]], Any]


def _mapping(name: str, cls: Any) -> Base:
    def made(derived: type[Any], items: Sequence[Any]) -> Any:
        found = cls.__new__(derived)
        for key, held in items:
            cls.__setitem__(found, key, held)
        return found

    return Base(name, cls, lambda value: [list(pair) for pair in cls.items(value)], made)


def _growing(name: str, cls: Any, add: Callable[[Any, Iterable[Any]], None]) -> Base:
    def made(derived: type[Any], items: Sequence[Any]) -> Any:
        found = cls.__new__(derived)
        add(found, items)
        return found

    return Base(name, cls, lambda value: list(cls.__iter__(value)), made)


def _scalar(name: str, cls: Any) -> Base:
    def made(derived: type[Any], items: Sequence[Any]) -> Any:
        (content,) = items
        return cls.__new__(derived, content)

    return Base(name, cls, lambda value: [getattr(cls, f"__{name}__")(value)], made)


_BASES: Mapping[str, Base] = MappingProxyType(
    {
        base.name: base
        for base in (
            _mapping("ordered", collections.OrderedDict),
            _mapping("dict", dict),
            _growing("list", list, list.extend),
            _growing("set", set, set.update),
            Base(
                "frozenset",
                frozenset,
                lambda value: list(frozenset.__iter__(value)),
                frozenset.__new__,
            ),
            Base(
                "namespace",
                types.SimpleNamespace,
                lambda _: (),
                lambda derived, _: types.SimpleNamespace.__new__(derived),
            ),
            _scalar("str", str),
            _scalar("int", int),
            _scalar("float", float),
        )
    }
)


def base_of(cls: type[Any], where: str) -> Base | None:
    """The built-in class with content of its own that a class derives from; None: there is none.

    Raises:
        PlanError: an instance could not be made again without the class's own code.
    """
    for base in _BASES.values():
        if issubclass(cls, base.cls):
            _require_made(base.cls, cls, where)
            return base
    _require_made(object, cls, where)
    return None


def _require_made(base: Any, cls: type[Any], where: str) -> None:
    """Python refuses where another built-in class is in between, which would not be filled."""
    try:
        base.__new__(cls)
    except TypeError as error:
        raise PlanError(
            f"{where}: an object of {name_of(cls)} is more than its fields and could not be made "
            f"again ({error}); convert it to plain values",
            key=where,
        ) from error


def made_on(name: str, derived: Any, items: Sequence[Any]) -> Any:
    """An instance of a class that holds what one of its built-in base class held."""
    base = _BASES[name]
    if not issubclass(derived, base.cls):
        raise TypeError(f"{derived} is no {name}")
    return base.made(derived, items)


def require_named(value: Enum, where: str) -> None:
    """Raise where a member of an enum has no name of its own, as a combination of flags.

    Raises:
        PlanError: it could not be found again by its name.
    """
    if type(value).__members__.get(str(value.name)) is not value:
        raise PlanError(
            f"{where}: {value!r} has no name of its own; store its value instead", key=where
        )


def fields_of(value: Any) -> list[tuple[str, Any]]:
    """The names and values that make up an object, beside what its built-in base holds."""
    found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    if isinstance(value, collections.defaultdict):
        found["default_factory"] = value.default_factory
    for name in _slots(type(value)):
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return list(found.items())


def _slots(cls: type[Any]) -> Iterable[str]:
    """The names under which the values of all slots are found."""
    for one in cls.__mro__:
        stated = vars(one).get("__slots__", ())
        for name in [stated] if isinstance(stated, str) else stated:
            is_private = name.startswith("__") and not name.endswith("__")
            if name not in _NO_SLOTS:
                yield f"_{one.__name__.lstrip('_')}{name}" if is_private else name


def name_of(cls: type) -> str:
    """The full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
