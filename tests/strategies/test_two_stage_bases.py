"""The two-stage loader over strategies that are not ours: each is called once, and shared out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import PeerError, PlanError, StrategyError
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import (
    ZarrLoadShardedStrategy,
)
from tests.support.entries import (
    Entry,
    Failure,
    outcome,
    prepare,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.groups import group_of_size
from tests.support.ranks import allow_torch_dist, run_processes
from tests.support.sharding import (
    Cut,
    differences,
    no_data,
    on_grid,
    replicated,
    state_of,
    zeros,
)

pytestmark = pytest.mark.multiprocess

TORCH_DIST = ("torch_dist", 1)


class Recorded(LoadShardedStrategy):  # type: ignore[misc]
    """A load strategy that keeps what it was asked for, and fails on the ranks that it is told."""

    can_handle_sharded_objects = True

    def __init__(self, inner: Any, fails_on: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.inner = inner
        self.fails_on = fails_on
        self.asked: list[list[Any]] = []

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """See LoadShardedStrategy."""
        shards = sharded_state_dict.values()
        self.asked.append([(shard.key, tuple(shard.global_offset)) for shard in shards])
        if dist.get_rank() in self.fails_on:
            raise OSError("no such luck")
        return self.inner.load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: Path) -> Any:
        """See LoadShardedStrategy."""
        return self.inner.load_tensors_metadata(checkpoint_dir)

    def load_sharded_metadata(self, checkpoint_dir: Path) -> Any:
        """See LoadShardedStrategy."""
        return self.inner.load_sharded_metadata(checkpoint_dir)

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """See LoadShardedStrategy."""

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """See LoadShardedStrategy."""


def cuts() -> list[Cut]:
    """Arrays that every rank has whole, and arrays of which each has a part, or two."""
    everyone = [replicated(on_grid(f"e{n}", (40, 3 + n), (1, 1))) for n in range(7)]
    rows = on_grid("rows", (8, 6), (4, 1), dtype=torch.bfloat16)
    pairs = on_grid("pairs", (8, 6), (2, 1), num_replicas=2)
    stacked = on_grid("stacked", (8, 5), (8, 1), num_prepended=1)
    return [*everyone, rows, pairs, stacked, on_grid("one", (3, 3), (1, 1))]


def objects(rank: int, *, empty: bool = False) -> dict[str, Any]:
    """One object that all ranks want, and one of each rank's own."""
    tensor = {"of": torch.arange(3)}
    return {
        "shared": ShardedObject("shared", None if empty else tensor, (1,), (0,), replica_id=rank),
        "own": ShardedObject("own.state", None if empty else [rank], (4,), (rank,)),
    }


def load_through_torch_dist(rank: int, root: Path) -> dict[str, Any]:
    allow_torch_dist()
    prepare(60)
    seen: dict[str, Any] = {}
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        state = state_of(rank, cuts()) | objects(rank)
        save(Entry.MEGATRON, state, root, sharded_strategy=TORCH_DIST)
        for size in (1, 2, 4):
            for data in (zeros, no_data):
                base = Recorded(TorchDistLoadShardedStrategy())
                group = group_of_size(size)
                strategy = TwoStageDataParallelLoadShardedStrategy(group, base_strategy=base)
                wanted = state_of(rank, cuts(), data) | objects(rank, empty=True)
                loaded = dist_checkpointing.load(wanted, str(root), sharded_strategy=strategy)
                name = f"{size} {data.__name__}"
                right = torch.equal(loaded["shared"]["of"], torch.arange(3))
                seen[name] = differences(rank, cuts(), loaded), right, loaded["own"] == [rank]
                seen[f"{name} calls"] = base.asked
    return seen


def test_each_shard_and_object_is_requested_from_torch_dist_once_per_group(
    tmp_path: Path,
) -> None:
    pytest.importorskip("psutil", reason="without it torch_dist of Megatron-Core 0.16.1 hangs")
    (tmp_path / "c").mkdir()
    results = run_processes(4, load_through_torch_dist, tmp_path / "c", timeout_s=150)
    for seen in results:
        assert isinstance(seen, dict), seen
        assert all(len(value) == 1 for name, value in seen.items() if "calls" in name)
        assert all(v == ([], True, True) for k, v in seen.items() if "calls" not in k), seen
    for data in ("zeros", "no_data"):
        of_four = [shard for seen in results for shard in seen[f"4 {data} calls"][0]]
        assert len(of_four) == len(set(of_four))
        counts = [len(seen[f"4 {data} calls"][0]) for seen in results]
        assert min(counts) > 0
        for pair in (results[:2], results[2:]):
            of_two = [shard for seen in pair for shard in seen[f"2 {data} calls"][0]]
            assert len(of_two) == len(set(of_two))


class Alone:
    """A base that needs no peers."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Path) -> Any:
        """See LoadShardedStrategy."""
        return ZarrLoadShardedStrategy().load_by(Communicator(), sharded_state_dict, checkpoint_dir)


def a_failure_of_the_base_is_raised_on_all(rank: int, root: Path) -> None:
    """Any strategy will do; it must not be one of ours, which are not called this way."""
    save(Entry.OURS, state_of(rank, cuts()) | objects(rank), root)
    group = group_of_size(2)

    def load(base: Any, state: dict[str, Any]) -> Any:
        strategy = TwoStageDataParallelLoadShardedStrategy(group, base_strategy=base)
        return strategy.load(state, str(root))

    wanted = partial(state_of, rank, cuts(), zeros)
    found = load(Recorded(ZarrLoadShardedStrategy()), wanted() | objects(rank, empty=True))
    assert differences(rank, cuts(), found) == []
    failed = outcome(partial(load, Recorded(Alone(), (2,)), wanted()))
    bad = {"bad": "no ShardedTensor"} if rank == 3 else {}
    refused = require_refused(
        partial(load, Recorded(Alone()), wanted() | bad), PlanError, global_rank=3
    )
    assert isinstance(failed, Failure)
    for failure, culprit in ((failed, 2), (refused, 3)):
        assert failure.seconds < 50
        assert (PeerError.__name__ in failure.kinds) == (rank != culprit)
    assert rank == 2 or (failed.global_rank == 2 and "no such luck" in failed.text)


def test_a_failure_of_the_base_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    require_on_ranks(4, a_failure_of_the_base_is_raised_on_all, tmp_path / "c")


def test_a_base_that_is_no_strategy_is_refused() -> None:
    with pytest.raises(StrategyError, match="expected a sharded load strategy, found 'torch_dist'"):
        TwoStageDataParallelLoadShardedStrategy(None, base_strategy="torch_dist")
