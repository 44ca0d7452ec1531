"""Checkpoint strategies for Megatron-Core.

``register()`` at start-up makes this package's backends known to
``megatron.core.dist_checkpointing``; ``save`` and ``load`` have the same signatures and promise
more. Names are imported on first use, so that importing the package costs next to nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_ckpt_strategies.config import LocalOptions, Options, StoreOptions
    from dist_ckpt_strategies.core.report import SaveMetrics
    from dist_ckpt_strategies.manager.candidates import Attempt, Loaded, Tier
    from dist_ckpt_strategies.manager.latest import load_latest
    from dist_ckpt_strategies.manager.manager import TieredCheckpointManager
    from dist_ckpt_strategies.manager.policy import ManagerOptions, SavePolicy
    from dist_ckpt_strategies.strategies.compare import compare
    from dist_ckpt_strategies.strategies.compare_report import CompareReport
    from dist_ckpt_strategies.strategies.install import install, installed, uninstall
    from dist_ckpt_strategies.strategies.load import load
    from dist_ckpt_strategies.strategies.local_replicated import prepare_local_load
    from dist_ckpt_strategies.strategies.registry import (
        StrategyAction,
        get_default_strategy,
        register,
        register_default_strategy,
        register_default_tensorstore_strategies,
        register_default_zarr_strategies,
    )
    from dist_ckpt_strategies.strategies.save import SaveHandle, save, save_async
    from dist_ckpt_strategies.tools.convert import convert, copy, upgrade
    from dist_ckpt_strategies.tools.diff import diff
    from dist_ckpt_strategies.tools.opened import open  # noqa: A004
    from dist_ckpt_strategies.tools.options import ConvertOptions
    from dist_ckpt_strategies.tools.prune import PruneReport, prune

__version__ = "0.2.0"

_NAMES = {
    "config": ("LocalOptions", "Options", "StoreOptions"),
    "core.report": ("SaveMetrics",),
    "manager.candidates": ("Attempt", "Loaded", "Tier"),
    "manager.latest": ("load_latest",),
    "manager.manager": ("TieredCheckpointManager",),
    "manager.policy": ("ManagerOptions", "SavePolicy"),
    "strategies.compare": ("compare",),
    "strategies.compare_report": ("CompareReport",),
    "strategies.install": ("install", "installed", "uninstall"),
    "strategies.load": ("load",),
    "strategies.save": ("SaveHandle", "save", "save_async"),
    "strategies.local_replicated": ("prepare_local_load",),
    "strategies.registry": (
        "StrategyAction",
        "get_default_strategy",
        "register",
        "register_default_strategy",
        "register_default_tensorstore_strategies",
        "register_default_zarr_strategies",
    ),
    "tools.convert": ("convert", "copy", "upgrade"),
    "tools.diff": ("diff",),
    "tools.opened": ("open",),
    "tools.options": ("ConvertOptions",),
    "tools.prune": ("PruneReport", "prune"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Attempt",
    "CompareReport",
    "ConvertOptions",
    "Loaded",
    "LocalOptions",
    "ManagerOptions",
    "Options",
    "PruneReport",
    "SaveHandle",
    "SaveMetrics",
    "SavePolicy",
    "StoreOptions",
    "StrategyAction",
    "Tier",
    "TieredCheckpointManager",
    "compare",
    "convert",
    "copy",
    "diff",
    "get_default_strategy",
    "install",
    "installed",
    "load",
    "load_latest",
    "open",
    "prepare_local_load",
    "prune",
    "register",
    "register_default_strategy",
    "register_default_tensorstore_strategies",
    "register_default_zarr_strategies",
    "save",
    "save_async",
    "uninstall",
    "upgrade",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module the first time it is asked for."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return sorted([*globals(), *__all__])
