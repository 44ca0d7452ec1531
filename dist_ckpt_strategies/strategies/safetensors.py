"""The format ("safetensors", 1): one pack per rank. Save and load strategies."""

from dist_ckpt_strategies.formats.pack_commit import set_other_format_aside
from dist_ckpt_strategies.sharded.save import PACKS
from dist_ckpt_strategies.storage.bucket import Place, content_of
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import OPENING
from dist_ckpt_strategies.strategies.own_load import PACK, OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy


class PackSaveShardedStrategy(OwnSaveShardedStrategy):
    """Save strategy for ("safetensors", 1), one pack per rank; see docs/packs.md.

    Arguments are those of ConfiguredSaver.
    """

    formats = (PACK,)
    save_format = PACKS

    def take_over(self, store: Place) -> bytes | None:
        """See OwnSaveShardedStrategy. ``common.pt`` is read back, and flushed.

        A checkpoint that had another one counts no more, unless it is packs, which have a copy.
        """

        def read() -> bytes | None:
            content = content_of(store, COMMON_NAME)
            if content is not None and isinstance(store, Directory):
                store.sync(COMMON_NAME)
                set_other_format_aside(store)
            return content

        return self.within(OPENING, store, read)


class PackLoadShardedStrategy(OwnLoadShardedStrategy):
    """Load strategy for ("safetensors", 1); arguments are those of OwnLoadShardedStrategy."""

    formats = (PACK,)
