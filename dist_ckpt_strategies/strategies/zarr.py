"""The Zarr backend, format ("zarr", 1): save and load strategies.

Names that Megatron-Core 0.15 gave to strategies are importable from here.
"""

from typing import Any

from dist_ckpt_strategies.formats.locations import located, require_path
from dist_ckpt_strategies.formats.zarr2 import require_on_grid
from dist_ckpt_strategies.sharded.chunk_save import CHUNKS
from dist_ckpt_strategies.sharded.save import Contents
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import MARKER_NAME, Directory, set_aside
from dist_ckpt_strategies.storage.io_pool import OPENING
from dist_ckpt_strategies.strategies.own_load import ZARR, OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy
from dist_ckpt_strategies.strategies.registry import register_default_zarr_strategies

__all__ = [
    "ZarrLoadShardedStrategy",
    "ZarrSaveShardedStrategy",
    "register_default_zarr_strategies",
]


class ZarrSaveShardedStrategy(OwnSaveShardedStrategy):
    """Save strategy for ("zarr", 1): one Zarr v2 array per key, one chunk per shard.

    All shards of an array have one shape, and lie on a regular grid. Arguments are those of
    ConfiguredSaver.

    Source: format 1 is the layout of Megatron-Core <= 0.15.3, which loads what this saves.
    """

    formats = (ZARR,)
    save_format = CHUNKS

    def place(self, checkpoint_dir: Any) -> Directory:
        """See OwnSaveShardedStrategy."""
        return Directory(require_path(located(checkpoint_dir, self.options), f"format {ZARR}"))

    def contents(self, *args: Any, **kwargs: Any) -> Contents:
        """See OwnSaveShardedStrategy; a PlanError where shards are on no regular grid."""
        contents = super().contents(*args, **kwargs)
        require_on_grid(contents.shards, [name for name, _ in contents.objects])
        return contents

    def take_over(self, store: Place) -> None:
        """See OwnSaveShardedStrategy. A checkpoint that is there counts no more."""
        if isinstance(store, Directory):
            self.within(OPENING, store, lambda: set_aside(store.root, MARKER_NAME))


class ZarrLoadShardedStrategy(OwnLoadShardedStrategy):
    """Load strategy for ("zarr", 1); arguments are those of OwnLoadShardedStrategy."""

    formats = (ZARR,)
