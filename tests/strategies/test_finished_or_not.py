"""A directory holds one finished checkpoint, or counts as incomplete; never a mixture."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CoverageError,
    IncompleteCheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy
from tests.support.entries import (
    Entry,
    Failure,
    load,
    outcome,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

SIZE = 2
PARTIAL_PREFIX = ".partial-"
UNCHECKED = {"validate_access_integrity": False}


def state_of(rank: int, value: float, key: str = "w", num_objects: int = SIZE) -> dict[str, Any]:
    rows = torch.full((2, 3), value)
    at, replica = min(rank, num_objects - 1), rank // num_objects
    return {
        "w": ShardedTensor.from_rank_offsets(key, rows, (0, rank, SIZE)),
        "o": ShardedObject("o", value, (num_objects,), (at,), replica_id=replica),
        "value": value,
    }


def with_a_gap(rank: int) -> dict[str, Any]:
    """Rank 1's half of the array is nobody's main replica."""
    rows = torch.zeros(2, 3)
    return {"w": ShardedTensor("w", rows, rows.dtype, (2, 3), (4, 3), (2 * rank, 0), None, rank)}


def value_in(rank: int, root: Path, entry: Entry = Entry.OURS, key: str = "w") -> Any:
    """The one value that tensors, object and common state hold; a list where they differ."""
    found = load(entry, state_of(rank, -1.0, key), root)
    values = {*found["w"].unique().tolist(), found["o"], found["value"]}
    return values.pop() if len(values) == 1 else sorted(values)


def files_in(root: Path) -> list[str]:
    """Once all ranks are here; they wait until each has looked."""
    dist.barrier()
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    dist.barrier()
    return found


def on_rank_0(rank: int, act: Callable[[], Any]) -> None:
    """Between two barriers."""
    dist.barrier()
    if rank == 0:
        act()
    dist.barrier()


def saves_of_ours_and_megatrons(rank: int, scratch: Path) -> None:
    """In one directory, which is made, one after the other."""
    root = scratch / "a" / "b"
    ours, theirs = partial(save, Entry.OURS), partial(save, Entry.MEGATRON)
    ours(state_of(rank, 1.0), root)
    assert value_in(rank, root) == 1.0
    gap, over = with_a_gap(rank), partial(ours, root=root, overwrite=True)
    again = partial(ours, state_of(rank, 2.0), root)
    require_refused(again, CheckpointExistsError, "overwrite=True")
    require_refused(partial(over, gap), PlanError)
    require_refused(partial(over, gap, **UNCHECKED), CoverageError, key="w")
    assert value_in(rank, root) == 1.0
    require_refused(partial(ours, gap, scratch / "gap"), CoverageError, key="w")
    require_refused(partial(value_in, rank, scratch / "gap"), CheckpointNotFoundError)

    over(state_of(rank, 3.0, "new", 1))
    arrays = ["new/.zarray", "new/0.0", "new/1.0"]
    assert files_in(root) == ["common.pt", "metadata.json", *arrays, "o/shard_0_1.pt"]

    theirs(state_of(rank, 4.0), root)
    assert value_in(rank, root, Entry.MEGATRON) == 4.0
    require_refused(partial(theirs, with_a_gap(rank), root), CoverageError)
    broken_off = partial(value_in, rank, root)
    require_refused(broken_off, IncompleteCheckpointError, "metadata.json", "common.pt")
    other = state_of(rank, 6.0, "third")
    require_refused(partial(ours, other, root), CheckpointExistsError, ": w;", "overwrite=True")
    theirs(state_of(rank, 6.0, "third"), root)
    assert value_in(rank, root, key="third") == 6.0
    objects = ["o/shard_0_2.pt", "o/shard_1_2.pt"]
    arrays = ["third/.zarray", "third/0.0", "third/1.0"]
    assert files_in(root) == ["common.pt", "metadata.json", *objects, *arrays]


def relative_paths_and_damaged_markers(rank: int, scratch: Path) -> None:
    """A directory whose marker is damaged, and then gone; and a place that is none."""
    os.chdir(scratch)
    relative = Path("relative")
    save(Entry.OURS, state_of(rank, 5.0), relative)
    (scratch / "a").mkdir(exist_ok=True)
    for place in (relative, scratch / "a" / ".." / relative):
        assert [value_in(rank, place, entry) for entry in Entry] == [5.0, 5.0]
    marker = scratch / relative / "metadata.json"
    other = partial(save, Entry.OURS, state_of(rank, 7.0, "new"))
    on_rank_0(rank, lambda: marker.write_text('{"sharded_backend": "zarr", "sha'))
    require_refused(partial(value_in, rank, relative), IncompleteCheckpointError)
    require_refused(partial(other, relative), CheckpointExistsError, ": w;", "overwrite=True")
    on_rank_0(rank, marker.unlink)
    require_refused(partial(other, relative), CheckpointExistsError, ": w;", "overwrite=True")
    other(relative, overwrite=True)
    assert value_in(rank, relative, key="new") == 7.0
    url: Any = "s3://bucket/run"
    require_refused(partial(other, url, sharded_strategy=("zarr", 1)), StrategyError, url)


class Foreign(SaveShardedStrategy):  # type: ignore[misc]
    """A strategy of a user's own, which leaves one file."""

    def __init__(self) -> None:
        super().__init__("foreign", 1)

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        del sharded_state_dict
        Path(checkpoint_dir, "foreign").touch()


def wrapped_and_foreign_strategies(rank: int, scratch: Path) -> None:
    """Strategies that are not ours, or wrapped, remove nothing unasked."""
    wrapped, root = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy()), scratch / "c"
    save(Entry.OURS, state_of(rank, 1.0), root)
    over = partial(save, Entry.OURS, root=root, sharded_strategy=wrapped, overwrite=True)
    require_refused(partial(over, with_a_gap(rank), **UNCHECKED), CoverageError)
    assert value_in(rank, root) == 1.0
    over(state_of(rank, 2.0, "new"))
    assert value_in(rank, root, key="new") == 2.0
    on_rank_0(rank, (root / "metadata.json").unlink)
    before = files_in(root)
    without = partial(save, Entry.OURS, state_of(rank, 3.0), root)
    require_refused(partial(without, sharded_strategy=wrapped), CheckpointExistsError)
    without(sharded_strategy=Foreign())
    assert set(before) <= set(files_in(root))


def megatron_after_an_interrupted_commit(rank: int, scratch: Path) -> None:
    """Our save breaks off while it moves its files into place; Megatron-Core's comes after it."""
    root = scratch / "c"
    save(Entry.OURS, state_of(rank, 1.0), root)
    with before_calls(break_off, ["rename", "replace"]):
        broken = outcome(partial(save, Entry.OURS, state_of(rank, 2.0), root, overwrite=True))
    assert isinstance(broken, Failure)
    dist.barrier()
    assert len(list(root.glob(f"{PARTIAL_PREFIX}*/metadata.json"))) == 1
    save(Entry.MEGATRON, state_of(rank, 3.0), root)
    assert value_in(rank, root) == 3.0


def break_off(_: str, path: str) -> None:
    """Of the moves from the staged place to the final one, the first fails."""
    if PARTIAL_PREFIX in path and (Path(path).parent / "metadata.json").exists():
        raise OSError("on purpose")


@pytest.mark.parametrize(
    "act",
    [
        saves_of_ours_and_megatrons,
        relative_paths_and_damaged_markers,
        wrapped_and_foreign_strategies,
        megatron_after_an_interrupted_commit,
    ],
)
def test_what_is_loaded_is_one_finished_checkpoint(
    act: Callable[[int, Path], None], tmp_path: Path
) -> None:
    require_on_ranks(SIZE, act, tmp_path)
