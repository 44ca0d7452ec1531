"""This package's backends, and the one call that makes them known to Megatron-Core."""

from __future__ import annotations

from dist_ckpt_strategies.config import LocalOptions, Options, options_from_environment
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.megatron.bases import StrategyAction
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.strategies import common, local_directory, zarr, zarr_format2
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.registration import (
    Default,
    Made,
    register_defaults,
    register_here,
)
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from dist_ckpt_strategies.strategies.zarr_format2 import (
    Format2LoadShardedStrategy,
    Format2SaveShardedStrategy,
)

_SAVE, _LOAD = StrategyAction.SAVE_SHARDED, StrategyAction.LOAD_SHARDED
_ZARR1 = (zarr.BACKEND, zarr.VERSION)
_ZARR2 = (zarr_format2.BACKEND, zarr_format2.VERSION)
_LOCAL = (local_directory.BACKEND, local_directory.VERSION)
_COMMON = (common.BACKEND, common.VERSION)


@raises_megatron_errors
def register(
    *,
    replace_common: bool = False,
    replace: bool = False,
    allow: Allowed = (),
    options: Options | None = None,
    local: LocalOptions | None = None,
) -> None:
    """Make this package's backends known to ``megatron.core.dist_checkpointing``.

    From then on ``dist_checkpointing.save(state_dict, path, ("zarr", 1))`` and ``load`` find this
    package's strategies, by the tuple or by a checkpoint's ``metadata.json``. Not collective; call
    it once on every rank, at start-up. The same call again changes nothing.

    Args:
        replace_common: this package's own save and load use its common strategies in any case;
            with this they also take the place of Megatron's ``("torch", 1)``, which write
            ``common.pt`` beside a marker that may still be there, and leave the other ranks
            waiting when rank 0 cannot write.
        replace: replace strategies registered under the same keys, by others or by an earlier call
            with other arguments.
        allow: further classes that objects of a checkpoint may be unpickled to.
        options: timeouts and memory bounds; by default what the environment says.
        local: cliques and directories of ``("local_replicated", 1)``.

    Raises:
        StrategyExistsError: a key has another strategy, or one made with other arguments,
            and ``replace`` is not set.
        StrategyError: a variable of the environment makes no sense.
    """
    classes = tuple(allow)
    chosen = options or options_from_environment()
    keeping = {"local": local or LocalOptions(), "options": chosen, "allow": classes}
    others = {"options": chosen, "allow": classes}
    sharded: list[Default] = [
        (_SAVE, *_ZARR1, Made(ZarrSaveShardedStrategy, others)),
        (_LOAD, *_ZARR1, Made(ZarrLoadShardedStrategy, others)),
        (_SAVE, *_ZARR2, Made(Format2SaveShardedStrategy, others)),
        (_LOAD, *_ZARR2, Made(Format2LoadShardedStrategy, others)),
        (_SAVE, *_LOCAL, Made(LocalReplicatedSaveShardedStrategy, keeping)),
        (_LOAD, *_LOCAL, Made(LocalReplicatedLoadShardedStrategy, keeping)),
    ]
    register_defaults(sharded, replace=replace)
    commons: list[Default] = [
        (StrategyAction.SAVE_COMMON, *_COMMON, Made(TorchCommonSaveStrategy, others)),
        (StrategyAction.LOAD_COMMON, *_COMMON, Made(TorchCommonLoadStrategy, others)),
    ]
    if replace_common:
        register_defaults(commons, replace=True)
    else:
        register_here(commons, replace=replace)
