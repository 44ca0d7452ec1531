"""A disk that is full or read-only: an error on every rank, and the checkpoint before is intact."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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


def on_bad_disks(rank: int, root: Path, backend: tuple[str, int]) -> tuple[list[Any], list[str]]:
    """How saves to a full and a read-only disk end, and what is wrong with the one before."""
    prepare(60)
    save, save_async = dist_ckpt_strategies.save, dist_ckpt_strategies.save_async
    save(whole_state(rank), root / "good", backend)
    ends: list[Any] = []

    def fail(name: str) -> None:
        state = whole_state(rank)
        ends.append(outcome(lambda: save(state, root / f"{name} now", backend)))
        ends.append(outcome(lambda: save_async(state, root / f"{name} async", backend).wait()))

    def together(step: Callable[[], Any]) -> None:
        if rank == 0:
            step()
        dist.barrier()

    for left_nbytes in LEFT_NBYTES:
        together(lambda: fill_disk(root, leaving_nbytes=left_nbytes))  # noqa: B023
        fail(f"full {left_nbytes}")
        together((root / ".ballast").unlink)
    with read_only(root) if rank == 0 else nullcontext():
        dist.barrier()
        fail("locked")
        dist.barrier()
    wanted = state_of(rank, CUTS, no_data)
    return ends, differences(rank, CUTS, load(Entry.OURS, wanted, root / "good"))


@pytest.mark.parametrize(
    ("disk", "backend"),
    [(tiny_ext4, ("zarr", 1)), (tiny_tmpfs, ("zarr", 2))],
    ids=["ext4", "tmpfs"],
)
def test_a_full_or_read_only_disk_fails_every_rank_and_leaves_the_checkpoint_before(
    disk: Any, backend: tuple[str, int], tmp_path: Path
) -> None:
    mounted: AbstractContextManager[Path] = disk(tmp_path / "disk")
    with mounted as root:
        results = run_processes(4, on_bad_disks, root, backend, timeout_s=100)
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
