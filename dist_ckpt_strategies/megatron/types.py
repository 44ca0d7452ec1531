"""Megatron-Core's types, errors, allow-list and registry, whatever its release.

What differs between releases is here:

- 0.17 removed the registry. Its ``save`` takes a strategy derived from
  ``TorchDistSaveShardedStrategy``, or a wrapper, and saves torch_dist instead of all else. So our
  save strategies are derived from that class there. Its own strategies have lost the methods that
  say what they read and whether they handle ShardedObjects.
- 0.19 removed the strategies' base classes. Its ``save`` hands the common state to the strategy, as
  one more ShardedObject, and its ``load`` reads it from ``common.pt``, or else as torch_dist.
- Later ones have no queue of asynchronous saves, and no request for it: see LocalSaveRequest.

What is missing, be it the whole module, gets a stand-in of the same name and attributes.
"""

import hashlib
import json
import types
from collections.abc import Sequence
from enum import Enum
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import safe_globals
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.core.array import COMMON_OBJECT
from dist_ckpt_strategies.errors import (
    IncompatibleVersionError,
    MissingDependencyError,
    StrategyError,
    as_megatron_error,
    needs_megatron_core,
    raises_megatron_errors,
)

try:
    from megatron.core.dist_checkpointing.strategies import base
except ImportError:
    base = types.ModuleType("base")

__all__ = [
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
    "raises_megatron_errors",
    "serialization",
]
"""Names of Megatron-Core, and those that make our errors instances of its own."""

TENSOR_AWARE_CLASS = (
    "megatron.core.dist_checkpointing.tensor_aware_state_dict.MCoreTensorAwareStateDict"
)
"""Full name of its state dict for local checkpoints, which is not imported to recognise one."""

TORCH_DIST = ("torch_dist", 1)
"""Megatron-Core's own format."""

_TORCH_DIST_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
_FULLY_PARALLEL_MODULE = "megatron.core.dist_checkpointing.strategies.fully_parallel"


def has_registry() -> bool:
    """Whether ``dist_checkpointing.save/load`` look strategies up, as up to 0.16."""
    return hasattr(base, "default_strategies") and hasattr(base, "register_default_strategy")


class _Action(Enum):
    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class _Strategy:
    def __init__(self, backend: str = "", version: int = 0) -> None:  # of one that saves
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        return False

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}({self.backend}, {self.version})" if self.backend else repr(self)
        )


if TYPE_CHECKING or has_registry():
    from megatron.core.dist_checkpointing.strategies.base import (
        AsyncSaveShardedStrategy,
        LoadCommonStrategy,
        LoadShardedStrategy,
        SaveCommonStrategy,
        SaveShardedStrategy,
        StrategyAction,
    )
else:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class SaveShardedStrategy(TorchDistSaveShardedStrategy, _Strategy):
        """A strategy that Megatron-Core's ``save`` takes as it is."""

        def async_save(self, *_: Any, **__: Any) -> None:
            """Refuse: what is inherited would save torch_dist."""
            raise as_megatron_error(StrategyError(f"{self}: it saves synchronously only"))

    AsyncSaveShardedStrategy = SaveShardedStrategy
    SaveCommonStrategy = LoadCommonStrategy = LoadShardedStrategy = _Strategy
    StrategyAction = getattr(base, "StrategyAction", _Action)


def is_strategy(value: Any, action: StrategyAction) -> bool:
    """Whether a value does what a strategy for an action does, whatever its class."""
    method: str = action.value.removesuffix("_sharded")
    return not isinstance(value, type) and callable(getattr(value, method, None))


def handles_objects(strategy: Any) -> bool:
    """Whether a strategy saves and loads ShardedObjects too; all that cannot say so do."""
    return bool(getattr(strategy, "can_handle_sharded_objects", True))


def is_torch_dist(strategy: Any) -> bool:
    """Whether a strategy is Megatron-Core's own for torch_dist, and of no class derived from it."""
    return type(strategy).__module__ == _TORCH_DIST_MODULE


def is_discarded(strategy: Any) -> bool:
    """Whether Megatron-Core's ``save`` takes torch_dist in place of a strategy: from 0.17 on."""
    modules = {_TORCH_DIST_MODULE, _FULLY_PARALLEL_MODULE}
    return not has_registry() and modules.isdisjoint(c.__module__ for c in type(strategy).__mro__)


def require_reads(strategy: Any, backend: str, version: int) -> None:
    """Raise an IncompatibleVersionError unless a load strategy, no wrapper, reads a format.

    Megatron-Core's own for torch_dist does not look at the format; from 0.17 on it cannot be asked.
    """
    if hasattr(strategy, "check_backend_compatibility"):
        strategy.check_backend_compatibility(backend)
        strategy.check_version_compatibility(version)
    if is_torch_dist(strategy) and (backend, version) != TORCH_DIST:
        raise IncompatibleVersionError(
            f"{type(strategy).__name__}: expected {TORCH_DIST}, found {(backend, version)!r}"
        )


def split_common_object(state_dict: dict[Any, Any]) -> tuple[dict[Any, Any], Any | None]:
    """A state dict to save without the object that 0.19 adds for the common state, and that.

    ``common.pt`` is what takes its place: every release of Megatron-Core loads that.
    """
    common = state_dict.get(COMMON_OBJECT.key)
    if not isinstance(common, ShardedObject) or common.unique_key != COMMON_OBJECT.unique_key:
        return state_dict, None
    return {k: v for k, v in state_dict.items() if k != COMMON_OBJECT.key}, common


def tensor_aware_class() -> Any:
    """The class TENSOR_AWARE_CLASS; the first call imports NVRx where that is installed."""
    with needs_megatron_core():
        from megatron.core.dist_checkpointing.tensor_aware_state_dict import (  # noqa: PLC0415
            MCoreTensorAwareStateDict,
        )

    return MCoreTensorAwareStateDict


def megatron_classes() -> list[Any]:
    """The classes that Megatron-Core allows to be unpickled."""
    return list(safe_globals.SAFE_GLOBALS)


def allow_in_common_state(allow: Sequence[Any]) -> None:
    """Let later releases' own ``load`` read the common state that our saves accept.

    They read ``common.pt`` with torch's list of allowed classes, to which they have added most.
    """
    if not has_registry():
        torch.serialization.add_safe_globals(list(allow))


def registered_strategy(action: StrategyAction, backend: str, version: int) -> Any | None:
    """Megatron-Core's strategy for a key; None if there is none, or no registry."""
    if not has_registry():
        return None
    return base.default_strategies[action.value].get((backend, version))


def register_strategy(action: StrategyAction, backend: str, version: int, strategy: Any) -> None:
    """Put a strategy into Megatron-Core's registry, in place of what is there; None removes it."""
    if strategy is None:
        base.default_strategies[action.value].pop((backend, version), None)
    else:
        base.register_default_strategy(action, backend, version, strategy)


def torch_dist_strategy(action: StrategyAction) -> Any:
    """Megatron-Core's own strategy for ``("torch_dist", 1)``.

    Raises a CheckpointingException if it has none for this action.
    """
    if has_registry():
        return base.get_default_strategy(action, *TORCH_DIST)
    with needs_megatron_core():
        from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: PLC0415 - slow
            TorchDistLoadShardedStrategy,
            TorchDistSaveShardedStrategy,
        )

    if action is StrategyAction.LOAD_SHARDED:
        return TorchDistLoadShardedStrategy()
    if action is not StrategyAction.SAVE_SHARDED:
        raise CheckpointingException(f"torch_dist has no strategy for {action.value}")
    return TorchDistSaveShardedStrategy(*TORCH_DIST)


def hash_folders() -> None:
    """Have ``verify_integrity=True`` of Megatron-Core's own ``save`` cover files in folders too.

    Its ``load`` compares whatever is listed. Folders of local checkpoints are each node's own.
    """
    theirs = getattr(serialization, "save_integrity_manifest", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):  # before 0.17.1; or done already
        return

    @wraps(theirs)
    def save_integrity_manifest(checkpoint_dir: str) -> None:
        theirs(checkpoint_dir)
        root, path = Path(checkpoint_dir), Path(checkpoint_dir, "integrity.json")
        if "local_replicated" in (root / "metadata.json").read_text():
            return
        manifest = json.loads(path.read_text())
        for file in (file for file in sorted(root.glob("*/**/*")) if file.is_file()):
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, manifest["algorithm"]).hexdigest()
            manifest["files"][str(file.relative_to(root))] = digest
        path.write_text(json.dumps(manifest, indent=2))

    serialization.save_integrity_manifest = save_integrity_manifest


def require_psutil(backend: str, version: int) -> None:
    """Raise a MissingDependencyError if this is torch_dist and its save would fail half-way."""
    if (backend, version) == TORCH_DIST and find_spec("psutil") is None:
        raise MissingDependencyError(
            "Megatron-Core's torch_dist save needs psutil; pip install psutil, or save packs"
        )
