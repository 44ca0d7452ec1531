"""Megatron-Core's types, errors, allow-list and registry, whatever its release.

0.17 removed the registry, its enum and more. What is missing, be it the whole module, gets a
stand-in of the same name and attributes, so that our strategies stay what they are.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
from megatron.core import safe_globals
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.errors import CheckpointError, joint_class

try:
    from megatron.core.dist_checkpointing.strategies import base
except ImportError:
    base = types.ModuleType("base")

__all__ = [
    "TENSOR_AWARE_CLASS",
    "AsyncRequest",
    "AsyncSaveShardedStrategy",
    "CheckpointingException",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "ShardedObject",
    "ShardedTensor",
    "StrategyAction",
    "StrictHandling",
    "as_megatron_error",
    "default_allowed",
    "has_registry",
    "raises_megatron_errors",
    "register_strategy",
    "registered_strategy",
    "tensor_aware_class",
    "torch_dist_strategy",
]

P = ParamSpec("P")
T = TypeVar("T")

TENSOR_AWARE_CLASS = (
    "megatron.core.dist_checkpointing.tensor_aware_state_dict.MCoreTensorAwareStateDict"
)
"""Full name of its state dict for local checkpoints, which is not imported to recognise one."""


class _Action(Enum):
    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class _Saver:
    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class _Loader:
    @property
    def can_handle_sharded_objects(self) -> bool:
        return False


if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy,
        LoadCommonStrategy,
        LoadShardedStrategy,
        SaveCommonStrategy,
        SaveShardedStrategy,
        StrategyAction,
    )
else:

    def _base_class(name: str, *bases: type) -> type:
        return getattr(base, name, None) or type(name, bases, {})

    StrategyAction = getattr(base, "StrategyAction", _Action)
    SaveShardedStrategy = _base_class("SaveShardedStrategy", _Saver)
    AsyncSaveShardedStrategy = _base_class("AsyncSaveShardedStrategy", SaveShardedStrategy)
    SaveCommonStrategy = _base_class("SaveCommonStrategy", _Saver)
    LoadShardedStrategy = _base_class("LoadShardedStrategy", _Loader)
    LoadCommonStrategy = _base_class("LoadCommonStrategy", _Loader)


def tensor_aware_class() -> Any:
    """The class TENSOR_AWARE_CLASS; the first call imports NVRx where that is installed."""
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import (  # noqa: PLC0415
        MCoreTensorAwareStateDict,
    )

    return MCoreTensorAwareStateDict


def default_allowed() -> list[Any]:
    """The classes that a checkpoint may need when it is unpickled.

    Megatron-Core's own list, and numpy's arrays under the names of numpy 1 and 2: they are rebuilt
    by ``_reconstruct`` and ``scalar``, which moved from ``numpy.core`` to ``numpy._core``, and a
    checkpoint names the module of its writer.
    """
    multiarray = np._core.multiarray  # type: ignore[attr-defined]  # noqa: SLF001 - what pickles name
    named = [
        (rebuild, f"{module}.{rebuild.__name__}")
        for rebuild in (multiarray._reconstruct, multiarray.scalar)  # noqa: SLF001
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    ]
    dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__ if name != "ObjectDType"]
    megatron_classes: list[Any] = list(safe_globals.SAFE_GLOBALS)
    return [*megatron_classes, types.SimpleNamespace, np.ndarray, np.dtype, *dtypes, *named]


def has_registry() -> bool:
    """Whether ``dist_checkpointing.save/load`` look strategies up, as up to 0.16."""
    return hasattr(base, "default_strategies") and hasattr(base, "register_default_strategy")


def registered_strategy(action: StrategyAction, backend: str, version: int) -> Any | None:
    """What Megatron-Core has under a key; None where there is nothing, or no registry."""
    if not has_registry():
        return None
    return base.default_strategies[action.value].get((backend, version))


def register_strategy(action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
    """Put a strategy into Megatron-Core's registry, in place of what is there."""
    base.register_default_strategy(action, backend, version, strategy)


def torch_dist_strategy(action: StrategyAction) -> Any:
    """Megatron-Core's own strategy for ``("torch_dist", 1)``.

    Raises:
        CheckpointingException: it has none for this action.
    """
    if has_registry():
        return base.get_default_strategy(action, "torch_dist", 1)
    from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: PLC0415 - takes seconds
        TorchDistLoadShardedStrategy,
        TorchDistSaveShardedStrategy,
    )

    if action is StrategyAction.LOAD_SHARDED:
        return TorchDistLoadShardedStrategy()
    if action is not StrategyAction.SAVE_SHARDED:
        raise CheckpointingException(f"torch_dist has no strategy for {action.value}")
    takes_names = "backend" in inspect.signature(TorchDistSaveShardedStrategy).parameters
    return TorchDistSaveShardedStrategy(*(("torch_dist", 1) if takes_names else ()))


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
