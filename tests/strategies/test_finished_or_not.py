"""A directory holds one finished checkpoint, or counts as incomplete; never a mixture."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import (
    TorchCommonSaveStrategy as MegatronsCommonSaveStrategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import StrategyError, UnsafeObjectError
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy
from tests.support.entries import (
    Entry,
    Failure,
    load,
    outcome,
    prepare,
    require_failure_everywhere,
    save,
)
from tests.support.ranks import run_processes
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

SIZE = 2
PARTIAL_PREFIX = ".partial-"


def state_of(rank: int, value: float, key: str = "w", num_objects: int = SIZE) -> dict[str, Any]:
    rows = torch.full((2, 3), value)
    return {
        "w": ShardedTensor.from_rank_offsets(key, rows, (0, rank, SIZE)),
        "o": ShardedObject(
            "o",
            value,
            (num_objects,),
            (min(rank, num_objects - 1),),
            replica_id=rank // num_objects,
        ),
        "value": value,
    }


def with_a_gap(rank: int) -> dict[str, Any]:
    """Rank 1's half of the array is nobody's main replica."""
    rows = torch.zeros(2, 3)
    replica = rank
    return {"w": ShardedTensor("w", rows, rows.dtype, (2, 3), (4, 3), (2 * rank, 0), None, replica)}


def value_in(rank: int, root: Path, entry: Entry = Entry.OURS, key: str = "w") -> Any:
    """The one value that tensors, object and common state hold; a list where they differ."""
    found = outcome(partial(load, entry, state_of(rank, -1.0, key), root))
    if isinstance(found, Failure):
        return found
    values = {*found["w"].unique().tolist(), found["o"], found["value"]}
    return values.pop() if len(values) == 1 else sorted(values)


def files_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def scenario(rank: int, scratch: Path) -> dict[str, Any]:
    """Everything that one pair of ranks can show about one directory after the other."""
    prepare(60)
    os.chdir(scratch)
    seen: dict[str, Any] = {}
    root = scratch / "a" / "b"
    save(Entry.OURS, state_of(rank, 1.0), root)
    seen["made"] = value_in(rank, root)
    seen["again"] = outcome(partial(save, Entry.OURS, state_of(rank, 2.0), root))
    seen["kept"] = value_in(rank, root)
    seen["gap over it"] = outcome(partial(save, Entry.OURS, with_a_gap(rank), root, overwrite=True))
    seen["gap over it, unchecked"] = outcome(
        partial(
            save,
            Entry.OURS,
            with_a_gap(rank),
            root,
            overwrite=True,
            validate_access_integrity=False,
        )
    )
    seen["still kept"] = value_in(rank, root)
    seen["gap"] = outcome(partial(save, Entry.OURS, with_a_gap(rank), scratch / "gap"))
    seen["gap loaded"] = value_in(rank, scratch / "gap")

    save(Entry.OURS, state_of(rank, 3.0, "new", 1), root, overwrite=True)
    dist.barrier()
    seen["files"] = files_in(root)

    save(Entry.MEGATRON, state_of(rank, 4.0), root)
    seen["through megatron"] = value_in(rank, root, Entry.MEGATRON)
    seen["broken off"] = outcome(partial(save, Entry.MEGATRON, with_a_gap(rank), root))
    seen["not a mixture"] = value_in(rank, root)
    seen["half replaced"] = outcome(partial(save, Entry.OURS, state_of(rank, 6.0, "third"), root))
    save(Entry.MEGATRON, state_of(rank, 6.0, "third"), root)
    seen["replaced after all"] = value_in(rank, root, key="third")
    dist.barrier()
    seen["files after all"] = files_in(root)

    return seen | with_relative_paths(rank, scratch)


def with_relative_paths(rank: int, scratch: Path) -> dict[str, Any]:
    """A directory whose marker is damaged, and then gone; and places that are none."""
    seen: dict[str, Any] = {}
    relative = Path("relative")
    save(Entry.OURS, state_of(rank, 5.0), relative)
    around = scratch / "a" / ".." / relative
    seen["relative"] = tuple(
        value_in(rank, place, entry) for place in (relative, around) for entry in Entry
    )
    dist.barrier()
    if rank == 0:
        (scratch / relative / "metadata.json").write_text('{"sharded_backend": "zarr", "sha')
    dist.barrier()
    seen["half a marker"] = value_in(rank, relative)
    other = state_of(rank, 7.0, "new")
    seen["others over half a marker"] = outcome(partial(save, Entry.OURS, other, relative))
    dist.barrier()
    if rank == 0:
        (scratch / relative / "metadata.json").unlink()
    dist.barrier()
    seen["others"] = outcome(partial(save, Entry.OURS, other, relative))
    save(Entry.OURS, other, relative, overwrite=True)
    seen["others replaced"] = value_in(rank, relative, key="new")
    seen["url"] = outcome(
        partial(dist_ckpt_strategies.save, state_of(rank, 6.0), "s3://bucket/run", ("zarr", 1))
    )
    return seen


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run_processes(SIZE, scenario, tmp_path_factory.mktemp("finished"), timeout_s=100)
    for seen in found:
        assert isinstance(seen, dict), seen
    return found


def failures(ranks: list[dict[str, Any]], what: str, kind: str) -> list[Failure]:
    found = [seen[what] for seen in ranks]
    for failure in found:
        assert isinstance(failure, Failure), failure
        assert kind in failure.kinds
        assert failure.is_ours
        assert failure.is_megatrons
    return found


def values(ranks: list[dict[str, Any]], what: str) -> set[Any]:
    return {seen[what] for seen in ranks}


def test_a_save_makes_the_directory_above_it_and_relative_paths_work(ranks: list[Any]) -> None:
    assert values(ranks, "made") == {1.0}
    assert values(ranks, "relative") == {(5.0,) * 4}


def test_what_is_refused_leaves_the_finished_checkpoint_on_every_rank(ranks: list[Any]) -> None:
    for failure in failures(ranks, "again", "CheckpointExistsError"):
        assert "overwrite=True" in failure.text
    assert values(ranks, "kept") == {1.0}
    failures(ranks, "gap over it", "PlanError")
    for failure in failures(ranks, "gap over it, unchecked", "CoverageError"):
        assert failure.key == "w"
    assert values(ranks, "still kept") == {1.0}


def test_arrays_of_an_unfinished_save_are_replaced_and_others_are_refused(
    ranks: list[Any],
) -> None:
    for what in ("others", "others over half a marker", "half replaced"):
        for failure in failures(ranks, what, "CheckpointExistsError"):
            assert ": w;" in failure.text
            assert "overwrite=True" in failure.text
    assert values(ranks, "others replaced") == {7.0}


def test_overwriting_leaves_nothing_of_the_old_checkpoint(ranks: list[Any]) -> None:
    files = ["common.pt", "metadata.json", "new/.zarray", "new/0.0", "new/1.0", "o/shard_0_1.pt"]
    assert [seen["files"] for seen in ranks] == [files] * SIZE


def test_a_gap_is_refused_everywhere_and_leaves_no_finished_checkpoint(ranks: list[Any]) -> None:
    for failure in failures(ranks, "gap", "CoverageError"):
        assert failure.key == "w"
    failures(ranks, "gap loaded", "CheckpointNotFoundError")
    failures(ranks, "half a marker", "IncompleteCheckpointError")
    for failure in failures(ranks, "url", "StrategyError"):
        assert "s3://bucket/run" in failure.text


def test_megatrons_save_over_a_checkpoint_is_a_checkpoint_or_none(ranks: list[Any]) -> None:
    assert values(ranks, "through megatron") == {4.0}
    failures(ranks, "broken off", "CoverageError")
    for failure in failures(ranks, "not a mixture", "IncompleteCheckpointError"):
        assert "metadata.json" in failure.text
        assert "common.pt" in failure.text
    assert values(ranks, "replaced after all") == {6.0}  # though it has other keys
    objects = ["o/shard_0_2.pt", "o/shard_1_2.pt"]
    arrays = ["third/.zarray", "third/0.0", "third/1.0"]
    files = ["common.pt", "metadata.json", *objects, *arrays]
    assert [seen["files after all"] for seen in ranks] == [files] * SIZE


def break_off_with_our_common(rank: int, root: Path) -> Any:
    """Megatron-Core's save, which has our common strategy write first, then fails in planning."""
    prepare(60, replace_common=True)
    save(Entry.MEGATRON, state_of(rank, 1.0), root)
    dist.barrier()
    before = files_in(root)
    failure = outcome(partial(save, Entry.MEGATRON, with_a_gap(rank), root))
    dist.barrier()
    after = files_in(root)
    loaded = value_in(rank, root)
    save(Entry.MEGATRON, state_of(rank, 2.0, "new"), root)
    dist.barrier()
    return before, failure, after, loaded, value_in(rank, root, key="new"), files_in(root)


def test_a_save_that_breaks_off_in_planning_removes_no_arrays_with_our_common_strategy_either(
    tmp_path: Path,
) -> None:
    for found in run_processes(SIZE, break_off_with_our_common, tmp_path / "c"):
        assert isinstance(found, tuple), found
        before, failure, after, loaded, new, replaced = found
        assert "CoverageError" in failure.kinds, failure
        assert set(before).difference(after) == {"metadata.json"}
        assert "IncompleteCheckpointError" in loaded.kinds, loaded
        assert new == 2.0
        assert replaced == sorted(name.replace("w/", "new/") for name in before)


def megatron_after_an_interrupted_commit(rank: int, root: Path) -> list[Any]:
    """Our save breaks off while it moves its files into place; Megatron-Core's comes after it."""
    prepare(60)
    save(Entry.OURS, state_of(rank, 1.0), root)
    with before_calls(break_off, ["rename", "replace"]):
        failure = outcome(partial(save, Entry.OURS, state_of(rank, 2.0), root, overwrite=True))
    dist.barrier()
    staged = len(list(root.glob(f"{PARTIAL_PREFIX}*/metadata.json")))
    save(Entry.MEGATRON, state_of(rank, 3.0), root)
    return [failure, staged, value_in(rank, root)]


def break_off(_: str, path: str) -> None:
    """Of the moves from the staged place to the final one, the first fails."""
    if PARTIAL_PREFIX in path and (Path(path).parent / "metadata.json").exists():
        raise OSError("on purpose")


def test_megatrons_save_over_an_interrupted_commit_is_no_mixture(tmp_path: Path) -> None:
    for failure, staged, value in run_processes(
        SIZE, megatron_after_an_interrupted_commit, tmp_path / "c"
    ):
        assert isinstance(failure, Failure), failure
        assert staged == 1
        assert value == 3.0


class Homemade:
    """A class that no load may make."""


def refused_saves(rank: int, scratch: Path) -> list[Any]:
    """Saves over a finished checkpoint that one rank cannot make, and what is loaded then."""
    prepare(60)
    root = scratch / "c"
    save(Entry.MEGATRON, state_of(rank, 1.0), root)
    common = partial(
        save,
        Entry.OURS,
        {**state_of(rank, 2.0), "more": Homemade()},
        root,
        overwrite=True,
        common_strategy=MegatronsCommonSaveStrategy("torch", 1),
    )
    allow = partial(
        save, Entry.OURS, state_of(rank, 2.0), root, overwrite=True, allow=[3] if rank else ()
    )
    found = [outcome(common), value_in(rank, root), outcome(allow), value_in(rank, root)]
    found.append(outcome(partial(load, Entry.OURS, {}, root, allow=[3] if rank else ())))
    dist.barrier()

    state = state_of(rank, 2.0)
    if rank == 0:
        state["o"].data = Homemade()
    return [*found, outcome(partial(save, Entry.MEGATRON, state, root)), value_in(rank, root)]


def test_an_object_or_option_that_is_refused_on_one_rank_never_leaves_a_mixture(
    tmp_path: Path,
) -> None:
    ranks = run_processes(SIZE, refused_saves, tmp_path)

    commons, kept, allows, still_kept, loads, objects, loaded = zip(*ranks, strict=True)
    require_failure_everywhere(commons, kind=UnsafeObjectError, culprit=0, names=["Homemade"])
    require_failure_everywhere(allows, kind=StrategyError, culprit=1, names=["allow: expected"])
    require_failure_everywhere(loads, kind=StrategyError, culprit=1, names=["allow: expected"])
    assert (*kept, *still_kept) == (1.0,) * 2 * SIZE
    # Megatron-Core has replaced the common state by then.
    require_failure_everywhere(objects, kind=UnsafeObjectError, culprit=0, names=["Homemade"])
    assert all("IncompleteCheckpointError" in failure.kinds for failure in loaded), loaded


class Foreign(SaveShardedStrategy):  # type: ignore[misc]
    """A strategy of a user's own, which leaves one file."""

    def __init__(self) -> None:
        super().__init__("foreign", 1)

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        del sharded_state_dict
        Path(checkpoint_dir, "foreign").touch()


def save_with_others(rank: int, scratch: Path) -> dict[str, Any]:
    """Strategies that are not ours, or wrapped, where arrays of somebody lie."""
    prepare(60)
    wrapped = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy())
    root = scratch / "c"
    save(Entry.OURS, state_of(rank, 1.0), root)
    over = partial(save, Entry.OURS, root=root, sharded_strategy=wrapped, overwrite=True)
    seen = {
        "gap": outcome(partial(over, with_a_gap(rank), validate_access_integrity=False)),
        "kept": value_in(rank, root),
        "over": outcome(partial(over, state_of(rank, 2.0, "new"))),
        "replaced": value_in(rank, root, key="new"),
    }
    dist.barrier()
    if rank == 0:
        (root / "metadata.json").unlink()
    dist.barrier()
    before = files_in(root)
    dist.barrier()
    without = partial(save, Entry.OURS, state_of(rank, 3.0), root)
    seen["wrapped"] = outcome(partial(without, sharded_strategy=wrapped))
    seen["foreign"] = outcome(partial(without, sharded_strategy=Foreign()))
    dist.barrier()
    seen["lost"] = sorted(set(before).difference(files_in(root)))
    return seen


def test_strategies_of_others_and_wrapped_ones_remove_nothing_unasked(tmp_path: Path) -> None:
    ranks = run_processes(SIZE, save_with_others, tmp_path)

    failures(ranks, "gap", "CoverageError")
    failures(ranks, "wrapped", "CheckpointExistsError")
    for seen in ranks:
        assert (seen["kept"], seen["over"], seen["replaced"]) == (1.0, None, 2.0)
        assert seen["foreign"] is None
        assert seen["lost"] == []
