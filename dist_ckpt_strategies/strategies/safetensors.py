"""The format ("safetensors", 1): one pack per rank. Save and load strategies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.commit import require_own_place
from dist_ckpt_strategies.formats.locations import Location, OpenedSave, located, place_of
from dist_ckpt_strategies.formats.pack_commit import set_other_format_aside
from dist_ckpt_strategies.formats.pack_remove import remove_keys
from dist_ckpt_strategies.megatron.types import raises_megatron_errors
from dist_ckpt_strategies.sharded.pack_async import pack_job
from dist_ckpt_strategies.sharded.pack_save import Known, Started, finish_save, write_packs
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.common import open_packs
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy

BACKEND, VERSION = "safetensors", 1


class PackSaveShardedStrategy(OwnSaveShardedStrategy):
    """Save strategy for ("safetensors", 1), one pack per rank; see docs/packs.md.

    Arguments are those of OwnSaveShardedStrategy.
    """

    own_format = BACKEND, VERSION

    def take_over(self, store: Place) -> bytes | None:
        """See OwnSaveShardedStrategy. ``common.pt`` is read back, and flushed.

        A checkpoint that had another one counts no more, unless it is packs, which have a copy.
        """

        def read() -> bytes | None:
            try:
                content = store.read(COMMON_NAME)
            except IncompleteCheckpointError:
                return None
            if isinstance(store, Directory):
                store.sync(COMMON_NAME)
                set_other_format_aside(store)
            return content

        return run_within(Deadline.after(OPENING * self.options.timeout_s), store, read)

    write = staticmethod(write_packs)
    job = staticmethod(pack_job)

    def finish(self, started: Started, written: Callable[[], Any], marker: bytes | None) -> Known:
        """See OwnSaveShardedStrategy."""
        return finish_save(started, written, marker=marker, fence=require_own_place)


class PackLoadShardedStrategy(ZarrLoadShardedStrategy):
    """Load strategy for ("safetensors", 1)."""

    backend: ClassVar[str] = BACKEND
    versions: ClassVar[tuple[int, ...]] = (VERSION,)

    def open_checkpoint(
        self, root: Location, options: Options, save: OpenedSave | None = None
    ) -> Any:
        """See ``open_packs``."""
        return open_packs(root, options, save)

    @raises_megatron_errors
    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        """Remove the arrays and objects whose key starts with a prefix. One rank calls it.

        Only the index changes: their bytes stay, until ``convert`` leaves them out.
        """
        root = located(checkpoint_dir, self.options)
        deadline = Deadline.after(self.options.timeout_s)
        run_within(deadline, root, lambda: remove_keys(place_of(root), key_prefix))
