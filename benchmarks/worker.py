"""What a rank does in the comparison of saves and loads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from benchmarks.contenders import MAKERS, Tensors
from benchmarks.disks import flush_share
from benchmarks.gpt_state import GptSize, build_shards
from benchmarks.harness import RankContext, join_gloo


class Worker:
    """One rank: holds the shards, and every contender over these same shards."""

    def __init__(self, size: GptSize, names: Sequence[str], context: RankContext) -> None:
        join_gloo(context)
        torch.set_num_threads(1)
        self._context = context
        self._shards = build_shards(size, context.global_rank, context.num_ranks)
        self._digests = {shard.key: _digest(shard.tensor) for shard in self._shards}
        self._contenders = {name: MAKERS[name](self._shards) for name in names}

    def nbytes(self) -> int:
        """Of this rank's shards."""
        return sum(shard.tensor.nbytes for shard in self._shards)

    def save(self, name: str, directory: Path) -> None:
        """Let the contender save. Timed."""
        self._contenders[name].save(directory)

    def flush(self, directory: Path) -> None:
        """Flush this rank's share of the files in ``directory``. Timed."""
        flush_share(directory, self._context.global_rank, self._context.num_ranks)

    def clear(self) -> None:
        """Overwrite the shards, so that a load that does nothing is found out."""
        for shard in self._shards:
            shard.tensor.zero_()

    def load(self, name: str, directory: Path) -> None:
        """Let the contender load, and see to it that the data is in the shards. Timed."""
        loaded: Tensors = self._contenders[name].load(directory)
        for shard in self._shards:
            tensor = loaded[shard.key]
            if tensor.data_ptr() != shard.tensor.data_ptr():
                shard.tensor.copy_(tensor)

    def check(self, name: str) -> None:
        """Compare the shards with what was saved.

        Raises:
            ValueError: a shard differs.
        """
        for shard in self._shards:
            if _digest(shard.tensor) != self._digests[shard.key]:
                raise ValueError(f"{shard.key}: {name} loaded other values than were saved")


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.view(-1).view(torch.uint8).numpy().data)
