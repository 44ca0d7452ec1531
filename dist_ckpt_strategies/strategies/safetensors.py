"""The format ("safetensors", 1): one pack per rank. Save and load strategies."""

from dist_ckpt_strategies.errors import IncompleteCheckpointError
from dist_ckpt_strategies.formats.pack_commit import set_other_format_aside
from dist_ckpt_strategies.sharded.pack_async import pack_job
from dist_ckpt_strategies.sharded.pack_save import finish_save, write_packs
from dist_ckpt_strategies.storage.bucket import Place
from dist_ckpt_strategies.storage.files import COMMON_NAME, Directory
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, run_within
from dist_ckpt_strategies.strategies.own_load import PACK, OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.own_save import OwnSaveShardedStrategy, SaveSteps


class PackSaveShardedStrategy(OwnSaveShardedStrategy):
    """Save strategy for ("safetensors", 1), one pack per rank; see docs/packs.md.

    Arguments are those of OwnSaveShardedStrategy.
    """

    own_format = PACK
    steps = SaveSteps(write_packs, pack_job, finish_save)

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


class PackLoadShardedStrategy(OwnLoadShardedStrategy):
    """Load strategy for ("safetensors", 1); arguments are those of OwnLoadShardedStrategy."""

    formats = (PACK,)
