"""A disk that is full or read-only: an error on every rank, and the checkpoint before is intact."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject

import dist_ckpt_strategies
from tests.support.disks import fill_disk, read_only, tiny_ext4, tiny_tmpfs
from tests.support.entries import Entry, Failure, load, outcome, prepare
from tests.support.ranks import run_processes
from tests.support.sharding import differences, no_data, on_grid, state_of

pytestmark = pytest.mark.multiprocess

FORMAT2 = ("zarr", 2)
CUTS = [on_grid("w", (64, 64), (4, 1)), on_grid("b", (8,), (4,), dtype=torch.bfloat16)]
LEFT_NBYTES = (0, 40 << 10)
"""Of a full disk; the second is enough for some of the files."""


def whole_state(rank: int) -> dict[str, Any]:
    objects = {"o": ShardedObject("o", {"t": torch.arange(99) + rank}, (4,), (rank,))}
    return state_of(rank, CUTS) | objects | {"iteration": 7}


def save_behind(rank: int, root: Path) -> None:
    dist_ckpt_strategies.save_async(whole_state(rank), root, FORMAT2).wait()


def save_now(rank: int, root: Path) -> None:
    dist_ckpt_strategies.save(whole_state(rank), root, FORMAT2)


def save_twice(rank: int, root: Path, name: str) -> list[Any]:
    return [
        outcome(lambda: save_now(rank, root / f"{name}-now")),
        outcome(lambda: save_behind(rank, root / f"{name}-behind")),
    ]


def on_bad_disks(rank: int, root: Path) -> tuple[list[Any], list[str]]:
    """How saves to a full and a read-only disk end, and what is wrong with the one before."""
    prepare(60)
    save_now(rank, root / "good")
    ends: list[Any] = []
    for number, left_nbytes in enumerate(LEFT_NBYTES):
        if rank == 0:
            fill_disk(root, leaving_nbytes=left_nbytes)
        dist.barrier()
        ends += save_twice(rank, root, f"full{number}")
        if rank == 0:
            (root / ".ballast").unlink()
        dist.barrier()
    ends += _on_read_only(rank, root)
    wanted = state_of(rank, CUTS, no_data)
    wrong = differences(rank, CUTS, load(Entry.OURS, wanted, root / "good"))
    return ends, wrong


def _on_read_only(rank: int, root: Path) -> list[Any]:
    if rank != 0:
        dist.barrier()
        ends = save_twice(rank, root, "locked")
        dist.barrier()
        return ends
    with read_only(root):
        dist.barrier()
        ends = save_twice(rank, root, "locked")
        dist.barrier()
    return ends


@pytest.mark.parametrize("disk", [tiny_tmpfs, tiny_ext4])
def test_a_full_or_read_only_disk_fails_every_rank_and_leaves_the_checkpoint_before(
    disk: Any, tmp_path: Path
) -> None:
    mounted: AbstractContextManager[Path] = disk(tmp_path / "disk")
    with mounted as root:
        results = run_processes(4, on_bad_disks, root, timeout_s=100)
        published = sorted(path.parent.name for path in root.glob("*/metadata.json"))

    assert [wrong for _, wrong in results] == [[]] * 4
    reasons = ["no space left"] * 2 * len(LEFT_NBYTES) + ["read-only"] * 2
    for rank, (ends, _) in enumerate(results):
        assert len(ends) == len(reasons)
        for end, reason in zip(ends, reasons, strict=True):
            assert isinstance(end, Failure), (rank, reason, end)
            assert "StorageError" in end.kinds, (rank, end)
            assert reason in end.text, (rank, end)
            assert end.seconds < 50, (rank, end)
    assert published == ["good"]
