"""What ranks tell each other of their local shards."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.comm.base import Communicator, Message, Receive, Send
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.local.inventory import gather_inventory
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from dist_ckpt_strategies.local.shard_format import (
    BufferSpec,
    FilledShard,
    LocalShard,
    LocalShardId,
    SaveId,
)
from dist_ckpt_strategies.local.transfer import run_replicate
from tests.support.thread_ranks import run_ranks

SAVES = [SaveId(100, "18f2a3b4c5d6e7f80a1b"), SaveId(200, "18f2a3b4c5d6e7f80a1c")]


@dataclass
class Counting:
    """A communicator that counts the bytes which this rank sends."""

    inner: Communicator
    sent_nbytes: int = 0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the other communicator's."""
        return getattr(self.inner, name)

    def all_gather(self, item: Message) -> list[Message]:
        """See Communicator."""
        self.sent_nbytes += len(json.dumps(item))
        return self.inner.all_gather(item)

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See Communicator."""
        self.sent_nbytes += sum(len(send.data) for send in sends)
        self.inner.exchange(sends, receives)


def write(directory: ShardDirectory, holder: int, owner: int, world_size: int) -> None:
    for save in SAVES:
        buffers = (BufferSpec("w", DType.UINT8, (3,)),)
        shard = LocalShard(LocalShardId(save, owner), world_size, "", "basic", buffers)
        filled = FilledShard(shard, (torch.zeros(3, dtype=torch.uint8),))
        run_replicate(
            Communicator([holder]), filled,
            lambda one: directory.create(one, holder), max_bucket_nbytes=1 << 20,
        )  # fmt: skip


def nodes_of(root: Path, old_size: int, ranks_per_node: int) -> list[ShardDirectory]:
    """The directory of each rank; two ranks of different nodes keep each shard."""
    nodes = [ShardDirectory(root / f"node{rank // ranks_per_node}") for rank in range(old_size)]
    for rank in range(old_size):
        for owner in (rank, (rank + old_size // 2) % old_size):
            write(nodes[rank], rank, owner, old_size)
    return nodes


@pytest.mark.parametrize(("old_size", "size"), [(4, 4), (16, 16), (16, 8)])
def test_a_rank_sends_few_bytes_however_many_ranks_and_shards_there_are(
    old_size: int, size: int, tmp_path: Path
) -> None:
    """With fewer ranks than before, those of a node share what the others have left."""
    nodes = nodes_of(tmp_path, old_size, ranks_per_node=2 * old_size // size)
    here = nodes[:: old_size // size]

    def count(comm: Any) -> tuple[int, Any]:
        counting: Any = Counting(comm)
        found = gather_inventory(counting, here[comm.rank], "")
        return counting.sent_nbytes, found

    results = run_ranks(size, count)

    for sent_nbytes, found in results:
        assert sent_nbytes < 200 * old_size // size + 100
        assert found == results[0][1]
        assert [(one.save, one.missing) for one in found.saves()] == [
            (save, ()) for save in reversed(SAVES)
        ]
        assert found.newest().save == SAVES[1]
        for rank, copies in found.of_save(found.newest()).items():
            assert len(copies) == 4 * old_size // size, rank
