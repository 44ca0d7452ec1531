"""NeMo trainings that survive faults. Importing this imports nothing of NeMo.

``CheckpointlessMegatronStrategy`` and ``CheckpointlessAutoResume`` are subclasses of NeMo's own,
and are made when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.errors import MissingDependencyError
from dist_ckpt_strategies.integrations.nemo_classes import auto_resume_class, strategy_class

if TYPE_CHECKING:
    CheckpointlessAutoResume: Any
    CheckpointlessMegatronStrategy: Any

__all__ = ["CheckpointlessAutoResume", "CheckpointlessMegatronStrategy"]

_MADE: Mapping[str, tuple[Callable[[Any], type], str, str]] = {
    "CheckpointlessAutoResume": (auto_resume_class, "nemo.lightning.resume", "AutoResume"),
    "CheckpointlessMegatronStrategy": (
        strategy_class,
        "nemo.lightning.pytorch.strategies",
        "MegatronStrategy",
    ),
}


def __getattr__(name: str) -> Any:
    """A class over NeMo's, on first use.

    Raises:
        MissingDependencyError: NeMo is not installed, or lacks something that it needs itself.
        AttributeError: there is no such name.
    """
    if name not in _MADE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _class_named(name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals(), *__all__])


@cache
def _class_named(name: str) -> type:
    make, module, base = _MADE[name]
    try:
        found = make(getattr(import_module(module), base))
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{name} needs NeMo with its Lightning strategies: pip install 'nemo_toolkit[llm]' "
            f"({error})"
        ) from error
    found.__name__ = found.__qualname__ = name
    found.__module__ = __name__
    return found
