"""What recovery asks of a training, under the names by which users import it."""

from __future__ import annotations

from typing import Any, Protocol, cast

from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.recovery.part_transfer import flat_parts
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.state_provider import StateProvider

__all__ = ["HasStateProvider", "Phase", "StateProvider", "provider_of"]


class HasStateProvider(Protocol):
    """What stands for a StateProvider: a trainer that an integration has given one."""

    state_provider: StateProvider


def provider_of(trainer: StateProvider | HasStateProvider) -> StateProvider:
    """The StateProvider that a trainer has as ``state_provider``, or is.

    Raises:
        StrategyError: it is none, and has none.
    """
    found: Any = getattr(trainer, "state_provider", trainer)
    if not callable(getattr(found, "parts", None)):
        raise StrategyError(
            f"{type(trainer).__name__}: expected a StateProvider, or an object that has one as "
            "state_provider; CheckpointlessCallback and CheckpointlessCompatibleConnector give a "
            "trainer of Lightning one"
        )
    return cast("StateProvider", found)


def require_movable(provider: StateProvider) -> None:
    """Raise unless all of a state could be sent to another rank: at the start, not at the fault.

    Raises:
        PlanError: a tensor has no memory of its own, or an object is no JSON.
    """
    flat_parts(provider.parts())
    _require_json("objects", dict(provider.objects()))


def _require_json(where: str, value: Any) -> None:
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _require_json(f"{where}[{number}]", one)
        return
    if not isinstance(value, dict):
        raise PlanError(f"{where}: expected JSON types, found {type(value).__name__}")
    for key, one in value.items():
        if not isinstance(key, str):  # it would come back as text, and nobody would find it
            raise PlanError(f"{where}: expected keys of type str, found {key!r}")
        _require_json(f"{where}[{key!r}]", one)
