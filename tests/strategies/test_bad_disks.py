"""A disk that is full or read-only: an error on every rank, and the checkpoint before is intact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StorageError
from tests.support.disks import fill_disk, read_only, tiny_ext4, tiny_tmpfs
from tests.support.entries import Entry, load, require_on_ranks, require_refused
from tests.support.sharding import at_random, differences, no_data, on_grid, state_of

pytestmark = pytest.mark.multiprocess

CUTS = [
    on_grid("w", (64, 64), (4, 1)),
    on_grid("b", (8,), (4,), dtype=torch.bfloat16),
    at_random("assembled from several ranks", (60, 20), 7),
]
LEFT_NBYTES = (0, 40 << 10)
"""Of a full disk; the second is enough for some of the files."""


def whole_state(rank: int) -> dict[str, Any]:
    objects = {"o": ShardedObject("o", {"t": torch.arange(99) + rank}, (4,), (rank,))}
    return state_of(rank, CUTS) | objects | {"iteration": 7}


def on_bad_disks(rank: int, root: Path, backend: tuple[str, int]) -> None:
    save, save_async = dist_ckpt_strategies.save, dist_ckpt_strategies.save_async
    state = whole_state(rank)
    save(state, root / "good", backend)

    def require_failures(name: str, reason: str) -> None:
        for call in (
            lambda: save(state, root / f"{name} now", backend),
            lambda: save_async(state, root / f"{name} async", backend).wait(),
        ):
            assert require_refused(call, StorageError, reason).seconds < 50

    def on_rank_0(step: Callable[[], Any]) -> None:
        if rank == 0:
            step()
        dist.barrier()

    for left_nbytes in LEFT_NBYTES:
        on_rank_0(partial(fill_disk, root, leaving_nbytes=left_nbytes))
        require_failures(f"full {left_nbytes}", "no space left")
        on_rank_0((root / ".ballast").unlink)
    with read_only(root) if rank == 0 else nullcontext():
        dist.barrier()
        require_failures("locked", "read-only")
        dist.barrier()
    wanted = state_of(rank, CUTS, no_data)
    assert differences(rank, CUTS, load(Entry.OURS, wanted, root / "good")) == []


@pytest.mark.parametrize(
    ("disk", "backend"),
    [(tiny_ext4, ("zarr", 1)), (tiny_tmpfs, ("zarr", 2))],
    ids=["ext4", "tmpfs"],
)
def test_a_full_or_read_only_disk_fails_every_rank_and_leaves_the_checkpoint_before(
    disk: Any, backend: tuple[str, int], tmp_path: Path
) -> None:
    with disk(tmp_path / "disk") as root:
        require_on_ranks(4, on_bad_disks, root, backend)
        assert [path.parent.name for path in root.glob("*/metadata.json")] == ["good"]
