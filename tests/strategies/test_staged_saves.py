"""A save writes where nothing else writes: late calls, kills and refusals harm no checkpoint."""

import errno
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointExistsError,
    CoverageError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from tests.strategies.test_kill_table import state_of, value_in
from tests.support.entries import (
    FORMATS,
    PACKS,
    ZARR,
    Entry,
    default_format,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

TORCH_DIST = ("torch_dist", 1)


# Commits of format 1 that break off; kills are in test_kill_table


def fails_in_commit(rank: int, root: Path) -> None:
    """One rename fails once the old files are moved aside: neither they nor the new ones go."""
    dist_ckpt_strategies.save(state_of(1.0), root, ZARR)
    old = {path.stat().st_ino for path in root.rglob("*") if path.name == "0.0"}
    failed: list[str] = []

    def fail_once(_name: str, path: str) -> None:
        if not failed and ".partial-" in path and any(root.glob(".*/.removed-old/*")):
            failed.append(path)
            raise OSError(errno.EIO, "injected")

    with before_calls(fail_once, ["replace", "rename"]), pytest.raises(StorageError):
        dist_ckpt_strategies.save(state_of(2.0), root, ZARR, overwrite=True)
    left = {path.stat().st_ino for path in root.rglob("*")}
    assert failed
    assert Path(failed[0]).exists()
    assert old
    assert old <= left
    dist_ckpt_strategies.save(state_of(3.0), root, ZARR, overwrite=True)
    assert value_in(root) == 3.0


def test_a_commit_that_fails_half_way_keeps_the_files_of_both(tmp_path: Path) -> None:
    require_on_ranks(1, fails_in_commit, tmp_path / "c")


# A directory never holds a mixture of checkpoints

SIZE = 2
UNCHECKED = {"validate_access_integrity": False}


def with_a_gap(rank: int) -> dict[str, Any]:
    """Rank 1's half of the array has no main replica."""
    rows = torch.zeros(2, 3)
    return {"w": ShardedTensor("w", rows, rows.dtype, (2, 3), (4, 3), (2 * rank, 0), None, rank)}


def relative_paths(rank: int, scratch: Path) -> None:
    os.chdir(scratch)
    relative = Path("relative")
    save(Entry.OURS, state_of(5.0, rank, SIZE), relative)
    (scratch / "a").mkdir(exist_ok=True)
    for place in (relative, scratch / "a" / ".." / relative):
        assert [value_in(place, entry, rank, SIZE) for entry in Entry] == [5.0, 5.0]
    save(Entry.OURS, state_of(7.0, rank, SIZE, "new"), relative, overwrite=True)
    assert value_in(relative, Entry.OURS, rank, SIZE, "new") == 7.0


def wrapped_strategies(rank: int, scratch: Path) -> None:
    """They remove nothing unasked."""
    wrapped, root = FullyParallelSaveStrategyWrapper(PackSaveShardedStrategy()), scratch / "c"
    save(Entry.OURS, state_of(1.0, rank, SIZE), root)
    over = partial(save, Entry.OURS, root=root, sharded_strategy=wrapped, overwrite=True)
    require_refused(partial(over, with_a_gap(rank), **UNCHECKED), CoverageError)
    assert value_in(root, Entry.OURS, rank, SIZE) == 1.0
    over(state_of(2.0, rank, SIZE, "new"))
    assert value_in(root, Entry.OURS, rank, SIZE, "new") == 2.0
    dist.barrier()
    (root / "metadata.json").unlink(missing_ok=True)
    dist.barrier()
    over = partial(over, overwrite=False)
    require_refused(partial(over, state_of(3.0, rank, SIZE)), CheckpointExistsError)


def megatron_after_an_interrupted_commit(rank: int, scratch: Path) -> None:
    """Our save breaks off while it moves its files into place; Megatron-Core's comes after it."""
    root = scratch / "c"
    save(Entry.OURS, state_of(1.0, rank, SIZE), root)
    broken = partial(save, Entry.OURS, state_of(2.0, rank, SIZE), root, overwrite=True)
    with before_calls(break_off, ["rename", "replace"]):
        require_refused(broken, StorageError, "on purpose")
    dist.barrier()
    if default_format() == PACKS:
        assert value_in(root, Entry.OURS, rank, SIZE) == 1.0
        assert len(list(root.glob("packs/*/*"))) == SIZE
        dist.barrier()
    save(Entry.MEGATRON, state_of(3.0, rank, SIZE), root)
    assert value_in(root, Entry.OURS, rank, SIZE) == 3.0


def break_off(_: str, path: str) -> None:
    """Of the moves from the staged place to the final one, the first fails."""
    is_moved = not Path(path).name.startswith(".") or (Path(path).parent / "metadata.json").exists()
    if "/.partial-" in path and is_moved:
        raise OSError("on purpose")


class Foreign:
    """A class that no list of classes allows."""


def what_is_refused_leaves_the_finished_checkpoint(rank: int, scratch: Path) -> None:
    """Saves that cannot be carried out, over a checkpoint that may be replaced."""
    root, local = scratch / "c", ("local_replicated", 1)
    gap = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))}
    new = state_of(2.0, rank, SIZE)
    dist_ckpt_strategies.save(state_of(1.0, rank, SIZE), root, default_format())
    unsafe = new | {"common": Foreign()}
    unsafe_object = new | {"o": ShardedObject("o", Foreign(), (SIZE,), (rank,))}
    saves = partial(dist_ckpt_strategies.save, overwrite=True)
    behind = partial(dist_ckpt_strategies.save_async, overwrite=True)
    for call in (
        partial(behind, new, root, TORCH_DIST),
        partial(behind, new, root, local),
        partial(saves, new, root, TORCH_DIST, async_sharded_save=True),
    ):
        require_refused(call, StrategyError, "in the background")
        assert value_in(root, Entry.OURS, rank, SIZE) == 1.0
    tries = [
        (saves, ("nothing", 1), new),
        *product([saves], [*FORMATS, TORCH_DIST, local], [unsafe, gap]),
        *product([saves], [*FORMATS, local], [unsafe_object]),
        *product([behind], FORMATS, [unsafe, unsafe_object, gap]),
    ]
    for act, backend, state in tries:
        require_refused(partial(act, state, root, backend), CheckpointError)
        assert value_in(root, Entry.OURS, rank, SIZE) == 1.0, (act, backend)
    assert len(list(root.glob("packs/*/*"))) == SIZE


@pytest.mark.parametrize(
    ("act", "backend"),
    [
        (relative_paths, PACKS),
        (wrapped_strategies, PACKS),
        (megatron_after_an_interrupted_commit, ZARR),
        (megatron_after_an_interrupted_commit, PACKS),
        (what_is_refused_leaves_the_finished_checkpoint, PACKS),
    ],
)
def test_a_load_sees_one_finished_checkpoint(
    act: Callable[[int, Path], None], backend: tuple[str, int], tmp_path: Path
) -> None:
    require_on_ranks(SIZE, act, tmp_path, default=backend)
