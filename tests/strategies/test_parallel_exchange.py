"""How Megatron-Core's parallel loader exchanges what our strategy read, in each of its ways."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import UnsafeObjectError
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from tests.support.entries import (
    Entry,
    load,
    outcome,
    prepare,
    require_failure_everywhere,
    save,
)
from tests.support.ranks import run_processes
from tests.support.sharding import (
    Cut,
    at_random,
    differences,
    no_data,
    on_grid,
    replicated,
    sharded,
    state_of,
    whole,
    zeros,
)

pytestmark = pytest.mark.multiprocess

both_entries = pytest.mark.parametrize("entry", list(Entry))

ALGORITHMS = ("broadcast", "gather_object", "gather_rounds")


def cuts(algorithm: str = "broadcast") -> list[Cut]:
    """Arrays that all ranks want, that some want, and that one wants; regular and not.

    gather_rounds gathers tensors of several sizes at once, which NCCL does and gloo does not: for
    it, as many arrays of one size as four ranks can share evenly.
    """
    if algorithm == "gather_rounds":
        return [on_grid(f"all.{n}", (8, 4), (1, 1), num_replicas=4) for n in range(12)]
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.int64)
    return [
        *(on_grid(f"all.{d}", (8, 4), (2, 1), dtype=d, num_replicas=4) for d in dtypes),
        on_grid("layers", (4, 6), (4, 1), num_replicas=2, num_prepended=1),
        on_grid("own", (4, 3), (4, 1)),
        replicated(at_random("boxes", (12, 9), 5)),
    ]


def objects(rank: int, *, data: bool) -> dict[str, Any]:
    """An object that all hold alike, and one for each rank."""
    return {
        "own": ShardedObject("o.own", {"rank": rank} if data else None, (4,), (rank,)),
        "all": ShardedObject("o.all", {"x": 1} if data else None, (1,), (0,), replica_id=rank),
    }


def save_and_exchange(rank: int, entry: Entry, scratch: Path) -> dict[str, Any]:
    prepare(60)
    saver = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy())
    seen: dict[str, Any] = {}
    for algorithm in ALGORITHMS:
        arrays, root = cuts(algorithm), scratch / algorithm
        state = {"tensors": state_of(rank, arrays), "objects": objects(rank, data=True)}
        save(entry, state, root, sharded_strategy=saver)
        loader = FullyParallelLoadStrategyWrapper(
            ZarrLoadShardedStrategy(), do_cache_distribution=True, exchange_algo=algorithm
        )
        for target in (zeros, no_data):
            wanted = {
                "tensors": state_of(rank, arrays, target),
                "objects": objects(rank, data=False),
            }
            # The wrapper moves what it exchanges to CUDA and synchronises the device.
            with cpu_stand_ins():
                loaded = load(entry, wanted, root, sharded_strategy=loader)
            wrong = differences(rank, arrays, loaded["tensors"])
            right = {"own": {"rank": rank}, "all": {"x": 1}}
            seen.setdefault(algorithm, []).append((wrong, loaded["objects"] == right))
    return seen


@both_entries
def test_every_algorithm_gives_every_rank_what_it_wants(entry: Entry, tmp_path: Path) -> None:
    results = run_processes(4, save_and_exchange, entry, tmp_path)

    for result in results:
        assert result == {algorithm: [([], True)] * 2 for algorithm in ALGORITHMS}, result


def exchange_other_dtype(rank: int, entry: Entry, root: Path) -> Any:
    """Stored in bfloat16, wanted in float32 by every rank; one reads each and sends it."""
    prepare(60)
    stored = [
        on_grid(f"w.{n}", (8, 4), (1, 1), dtype=torch.bfloat16, num_replicas=4) for n in range(4)
    ]
    save(entry, state_of(rank, stored), root)
    wrong = []
    for algorithm in ALGORITHMS:
        loader = FullyParallelLoadStrategyWrapper(
            ZarrLoadShardedStrategy(), exchange_algo=algorithm
        )
        for data in (None, torch.zeros(8, 4)):
            wanted = {
                cut.key: sharded(cut, cut.parts[rank], copy(data), dtype=torch.float32)
                for cut in stored
            }
            with cpu_stand_ins():
                loaded = load(entry, wanted, root, sharded_strategy=loader)
            for cut in stored:
                found, right = loaded[cut.key], whole(cut).float()
                if found.dtype != right.dtype or not torch.equal(
                    *map(torch.nan_to_num, (found, right))
                ):
                    wrong.append((algorithm, data is None, cut.key))
    return wrong


def copy(data: torch.Tensor | None) -> torch.Tensor | None:
    return None if data is None else data.clone()


@both_entries
def test_arrays_stored_in_another_dtype_are_exchanged_in_the_dtype_that_is_wanted(
    entry: Entry, tmp_path: Path
) -> None:
    assert run_processes(4, exchange_other_dtype, entry, tmp_path / "c") == [[]] * 4


class NotAllowed:
    """A class that no list of classes allows."""


def exchange_with_bad_object(rank: int, entry: Entry, root: Path) -> Any:
    prepare(60)
    state = {"tensors": state_of(rank, cuts()), "objects": objects(rank, data=True)}
    save(entry, state, root)
    if rank == 0:
        torch.save(NotAllowed(), root / "o.own" / "shard_3_4.pt")
    dist.barrier()
    wanted = {
        "tensors": state_of(rank, cuts(), no_data),
        "objects": objects(rank, data=False),
    }
    loader = FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy())
    with cpu_stand_ins():
        return outcome(partial(load, entry, wanted, root, sharded_strategy=loader))


@both_entries
def test_an_object_that_one_rank_may_not_load_fails_on_every_rank(
    entry: Entry, tmp_path: Path
) -> None:
    results = run_processes(4, exchange_with_bad_object, entry, tmp_path / "c")

    names = ("NotAllowed", str(tmp_path / "c" / "o.own" / "shard_3_4.pt"))
    require_failure_everywhere(results, kind=UnsafeObjectError, culprit=3, names=names)
    assert all(failure.seconds < 50 for failure in results)
