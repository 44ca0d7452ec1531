"""This package's backends, and the one call that makes them known to Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_ckpt_strategies.config import LocalOptions, Options, options_from_environment
from dist_ckpt_strategies.megatron.bases import StrategyAction
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.storage.objects.pickled import Allowed
from dist_ckpt_strategies.strategies import common, local_directory, zarr, zarr_format2
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
    lazy_cliques,
)
from dist_ckpt_strategies.strategies.registration import Default, register_defaults, register_here
from dist_ckpt_strategies.strategies.save_planning import SaveMemory
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from dist_ckpt_strategies.strategies.zarr_format2 import (
    Format2LoadShardedStrategy,
    Format2SaveShardedStrategy,
)


@dataclass(frozen=True, slots=True)
class _Made:
    """Makes strategies of one class with the options that ``register`` was given."""

    cls: Any
    arguments: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.cls(**self.arguments)


@raises_megatron_errors
def register(
    *,
    replace_common: bool = False,
    replace: bool = False,
    allow: Allowed = (),
    options: Options | None = None,
    local: LocalOptions | None = None,
) -> None:
    """Make this package's backends known to ``megatron.core.dist_checkpointing``. Idempotent.

    From then on ``dist_checkpointing.save(state_dict, path, ("zarr", 1))`` and ``load`` find this
    package's strategies, by the tuple or by a checkpoint's ``metadata.json``. Not collective; call
    it once on every rank, at start-up.

    Args:
        replace_common: this package's own save and load use its common strategies in any case;
            with this they also take the place of Megatron's ``("torch", 1)``, which write
            ``common.pt`` beside a marker that may still be there, and leave the other ranks
            waiting when rank 0 cannot write.
        replace: replace strategies that somebody else registered under the same keys.
        allow: further classes that objects of a checkpoint may be unpickled to.
        options: timeouts and memory bounds; by default what the environment says.
        local: cliques and directories of ``("local_replicated", 1)``.

    Raises:
        StrategyExistsError: a key is taken by somebody else, and ``replace`` is not set.
    """
    classes = tuple(allow)
    format1, format2 = (zarr.BACKEND, zarr.VERSION), (zarr_format2.BACKEND, zarr_format2.VERSION)
    sharded = [
        *_zarr_defaults(
            format1, ZarrSaveShardedStrategy, ZarrLoadShardedStrategy, options, classes
        ),
        *_zarr_defaults(
            format2, Format2SaveShardedStrategy, Format2LoadShardedStrategy, options, classes
        ),
        *local_defaults(local or LocalOptions(), options, classes),
    ]
    register_defaults(sharded, replace=replace)
    commons = common_defaults(options, classes)
    if replace_common:
        register_defaults(commons, replace=True)
    else:
        register_here(commons, replace=replace)


def _zarr_defaults(
    key: tuple[str, int], saver: Any, loader: Any, options: Options | None, allow: tuple[Any, ...]
) -> list[Default]:
    """The strategies of one format; those that save it share what they keep from save to save."""
    saving = {"options": options, "memory": SaveMemory()}
    loading = {"options": options, "allow": allow}
    return [
        (StrategyAction.SAVE_SHARDED, *key, _Made(saver, saving)),
        (StrategyAction.LOAD_SHARDED, *key, _Made(loader, loading)),
    ]


def local_defaults(
    local: LocalOptions, options: Options | None, allow: tuple[Any, ...]
) -> list[Default]:
    """The strategies of ``("local_replicated", 1)``; those that save share their cliques."""
    limits = options or options_from_environment()
    key = (local_directory.BACKEND, local_directory.VERSION)
    arguments = {"local": local, "options": options, "allow": allow}
    cliques = {"cliques": lazy_cliques(local, limits)}
    return [
        (
            StrategyAction.SAVE_SHARDED,
            *key,
            _Made(LocalReplicatedSaveShardedStrategy, arguments | cliques),
        ),
        (StrategyAction.LOAD_SHARDED, *key, _Made(LocalReplicatedLoadShardedStrategy, arguments)),
    ]


def common_defaults(options: Options | None, allow: tuple[Any, ...]) -> list[Default]:
    """The common strategies under Megatron's own key."""
    key = (common.BACKEND, common.VERSION)
    return [
        (StrategyAction.SAVE_COMMON, *key, _Made(TorchCommonSaveStrategy, {"options": options})),
        (
            StrategyAction.LOAD_COMMON,
            *key,
            _Made(TorchCommonLoadStrategy, {"options": options, "allow": allow}),
        ),
    ]
