"""Ranks that share the reading get what each would have read, and fail together."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch._C._distributed_c10d import FileStore

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import PeerError, PlanError, StrategyError
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy
from dist_ckpt_strategies.two_stage import load as two_stage_load
from tests.strategies.test_save_load import objects
from tests.support.entries import (
    FORMATS,
    PACKS,
    ZARR,
    Entry,
    Failure,
    load,
    outcome,
    prepare,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.ranks import allow_torch_dist, run_processes
from tests.support.sharding import (
    Cut,
    differences,
    held_by,
    no_data,
    on_grid,
    part_of,
    replicated,
    same_bits,
    sharded,
    state_of,
    zeros,
)
from tests.support.tensors import dense, transposed

pytestmark = pytest.mark.multiprocess


def replicas(rank: int, *, empty: bool) -> dict[str, Any]:
    """What ranks that are replicas of each other hold: a few megabytes in many tensors."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(700, 1000), *[(64, 50 + n) for n in range(20)], (5,), ()]
    state = {}
    for number, shape in enumerate(shapes):
        data = torch.randn(shape, generator=generator)
        if empty:
            data.zero_()
        state[f"w{number}"] = ShardedTensor.from_rank_offsets(f"w{number}", data, replica_id=rank)
    return state


def are_loaded(found: dict[str, Any]) -> bool:
    return all(torch.equal(found[k], v.data) for k, v in replicas(0, empty=False).items())


def count_reads(rank: int, root: Path, backend: tuple[str, int]) -> Any:
    prepare(60)
    vars(two_stage_load)["page_cache_of"] = lambda _: None
    save(Entry.OURS, replicas(rank, empty=False), root, sharded_strategy=backend)
    strategy = TwoStageDataParallelLoadShardedStrategy(dist.new_subgroups(4)[0])
    strategy.load(replicas(rank, empty=True), root)  # imports what is imported once
    dist.barrier()
    before = read_nbytes()
    loaded = strategy.load(replicas(rank, empty=True), root)
    counted = read_nbytes() - before
    assert are_loaded(loaded)
    return strategy.summarize_load_times(), counted


def read_nbytes() -> int:
    return int(Path("/proc/self/io").read_text(encoding="ascii").split()[1])


SMALL_FILES_NBYTES = 100 << 10
"""Manifest, descriptions of arrays, and what travels over the ranks' sockets by way of ``read``."""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_each_byte_is_read_once_and_all_ranks_read_about_the_same(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    results = run_processes(4, count_reads, tmp_path / "c", backend)

    nbytes = sum(value.data.nbytes for value in replicas(0, empty=False).values())
    for report, counted in results:
        assert nbytes <= sum(share.read_nbytes for share in report.shares) <= 1.02 * nbytes
        assert report == results[0][0]
        # Slices of such small arrays are smaller than the ranges of packs, which are read whole.
        assert backend == PACKS or counted <= 1.1 * nbytes / 4 + SMALL_FILES_NBYTES / 4
    all_counted = sum(counted for _, counted in results)
    assert backend == PACKS or all_counted <= 1.02 * nbytes + SMALL_FILES_NBYTES


MIB = 1 << 20
LARGE = {"w0": (12, MIB), "w1": (8, MIB), "w2": (2, MIB)}
"""88 MiB of float32; the largest shard has 48, which is never in memory a second time."""


def large(rank: int, *, is_transposed: bool) -> dict[str, Any]:
    """Replicas of a few large arrays; transposed ones have to be put in place by a copy."""
    state = {}
    for number, (key, shape) in enumerate(LARGE.items()):
        data = torch.full(shape, float(number + 1))
        if is_transposed:
            data = torch.zeros(shape[::-1]).T
        state[key] = ShardedTensor.from_rank_offsets(key, data, replica_id=rank)
    return state


def memory_nbytes(name: str) -> int:
    """VmRSS: resident; VmHWM: the most of it since this process was last asked to forget."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def measure_memory(rank: int, root: Path) -> None:
    save(Entry.OURS, large(rank, is_transposed=False), root)
    for budget, is_transposed in ((8 * MIB, True), (32 * MIB, False)):
        strategy = TwoStageDataParallelLoadShardedStrategy(
            dist.group.WORLD, max_inflight_bytes=budget
        )
        strategy.load(large(rank, is_transposed=False), root)  # what a first load keeps
        limit = budget + 8 * MIB
        for _ in range(3):  # the allocator may return memory of before, or take some anew
            wanted = large(rank, is_transposed=is_transposed)
            before = memory_nbytes("VmRSS")
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            loaded = strategy.load(wanted, root)
            extra = torch.tensor(memory_nbytes("VmHWM") - before)
            dist.all_reduce(extra, dist.ReduceOp.MAX)
            if extra <= limit:
                break
        assert all(bool((loaded[key] == n + 1).all()) for n, key in enumerate(LARGE))
        assert extra <= limit, (budget, is_transposed)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("backend", [ZARR, PACKS], ids=str)
def test_memory_beside_the_tensors_is_bounded(backend: Any, tmp_path: Path) -> None:
    require_on_ranks(2, measure_memory, tmp_path / "c", default=backend)


def a_rank_outside_its_group_is_named(rank: int, root: Path) -> None:
    save(Entry.OURS, replicas(rank, empty=False), root)
    others = dist.new_group([0, 1, 2])
    for cpu_transfer in (True, False):
        strategy = TwoStageDataParallelLoadShardedStrategy(others, cpu_transfer)
        call = partial(strategy.load, replicas(rank, empty=True), root)
        require_refused(call, StrategyError, "rank 3 is not in the process group", global_rank=3)


@pytest.mark.parametrize("cpu_transfer", [True, False])
def test_a_process_alone_needs_no_process_group(cpu_transfer: bool, tmp_path: Path) -> None:
    save(Entry.OURS, replicas(0, empty=False), tmp_path / "c")
    strategy = TwoStageDataParallelLoadShardedStrategy(None, cpu_transfer)
    assert strategy.summarize_load_times() is None
    assert are_loaded(strategy.load(replicas(0, empty=True), tmp_path / "c"))
    summary = strategy.summarize_load_times()
    assert summary is not None
    assert [share.received_nbytes for share in summary.shares] == [0]


def load_in_two_worlds(rank: int, scratch: Path) -> None:
    """With one strategy over the world and one over a group, before and after a new beginning."""
    prepare(60)
    for attempt in range(2):
        store = FileStore(str(scratch / f"store{attempt}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        if not attempt:
            save(Entry.OURS, replicas(rank, empty=False), scratch / "c")
            over_world = TwoStageDataParallelLoadShardedStrategy(None)
            over_group = TwoStageDataParallelLoadShardedStrategy(dist.new_group())
        assert are_loaded(over_world.load(replicas(rank, empty=True), scratch / "c"))
        again = partial(over_group.load, replicas(rank, empty=True), scratch / "c")
        if attempt:
            require_refused(again, StrategyError, "has been destroyed")
        else:
            assert are_loaded(again())
        dist.destroy_process_group()


def test_a_strategy_outlives_its_world_and_a_group_does_not(tmp_path: Path) -> None:
    assert run_processes(2, load_in_two_worlds, tmp_path, makes_group=False) == [None, None]


# Over strategies that are not ours: each is called once, and its share distributed

TORCH_DIST = ("torch_dist", 1)


class Recorded:
    """A load strategy that keeps what it was asked for, and fails on the given ranks."""

    def __init__(self, inner: Any, fails_on: tuple[int, ...] = ()) -> None:
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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def regular_cuts() -> list[Cut]:
    """Arrays that every rank has whole, and arrays of which each has a part, or two."""
    everyone = [replicated(on_grid(f"e{n}", (40, 3 + n), (1, 1))) for n in range(7)]
    rows = on_grid("rows", (8, 6), (4, 1), dtype=torch.bfloat16)
    pairs = on_grid("pairs", (8, 6), (2, 1), num_replicas=2)
    stacked = on_grid("stacked", (8, 5), (8, 1), num_prepended=1)
    return [*everyone, rows, pairs, stacked, on_grid("one", (3, 3), (1, 1))]


def torch_dist_is_asked_once_per_group_for_each_shard_and_object(rank: int, root: Path) -> None:
    """Its tensors are converted by the strategy over it."""
    allow_torch_dist()
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        state = state_of(rank, regular_cuts()) | objects(rank, is_filled=True)
        save(Entry.MEGATRON, state, root, sharded_strategy=TORCH_DIST)
        for size, data in product((1, 2, 4), (zeros, no_data)):
            base = Recorded(TorchDistLoadShardedStrategy())
            strategy = TwoStageDataParallelLoadShardedStrategy(
                dist.new_subgroups(size)[0], base_strategy=base
            )
            wanted = state_of(rank, regular_cuts(), data) | objects(rank, is_filled=False)
            loaded = dist_checkpointing.load(wanted, str(root), sharded_strategy=strategy)
            assert differences(rank, regular_cuts(), loaded) == []
            assert (loaded["own"], loaded["all"]) == ([rank], {"of": "all"})
            everyones: list[Any] = [None] * 4
            dist.all_gather_object(everyones, base.asked)
            first = rank // size * size
            calls = [asked for (asked,) in everyones[first : first + size]]
            shards = [shard for asked in calls for shard in asked]
            assert len(shards) == len(set(shards))
            assert all(calls)
        some = held_by(rank, regular_cuts()[6:8])  # one that all ranks share, and one that none do
        for (_, cut, part), layout in product(some, (dense, transposed)):
            given = layout(torch.full(part.shape, 7.0, dtype=torch.float64))
            wanted = {"w": sharded(cut, part, given, dtype=given.dtype)}
            for how in (strategy, TORCH_DIST):
                strictly = partial(load, Entry.OURS, wanted, root, strict_dtype=True)
                require_refused(partial(strictly, sharded_strategy=how), PlanError, "dtype")
                assert (given == 7).all()
            assert load(Entry.OURS, wanted, root, sharded_strategy=strategy)["w"] is given
            assert same_bits(given, part_of(cut, part).double())


def a_failure_of_the_base_is_raised_on_all(rank: int, root: Path) -> None:
    """Any strategy will do; it must not be one of ours, which are not called this way."""
    save(Entry.OURS, state_of(rank, regular_cuts()), root)
    group = dist.new_subgroups(2)[0]

    def load_over(base: Any, state: dict[str, Any]) -> Any:
        strategy = TwoStageDataParallelLoadShardedStrategy(group, base_strategy=base)
        return strategy.load(state, str(root))

    wanted = partial(state_of, rank, regular_cuts(), zeros)
    alone = [dist.new_group([other]) for other in range(4)][rank]
    base = SimpleNamespace(load=ZarrLoadShardedStrategy(group=alone).load)
    failed = outcome(partial(load_over, Recorded(base, (2,)), wanted()))
    bad = partial(load_over, Recorded(base), wanted() | ({"bad": "no shard"} if rank == 3 else {}))
    refused = require_refused(bad, PlanError, global_rank=3)
    assert isinstance(failed, Failure)
    for failure, culprit in ((failed, 2), (refused, 3)):
        assert failure.seconds < 50
        assert (PeerError.__name__ in failure.kinds) == (rank != culprit)
    assert rank == 2 or (failed.global_rank == 2 and "no such luck" in failed.text)


@pytest.mark.parametrize(
    "act",
    [
        a_rank_outside_its_group_is_named,
        torch_dist_is_asked_once_per_group_for_each_shard_and_object,
        a_failure_of_the_base_is_raised_on_all,
    ],
)
def test_ranks_that_share_the_reading(act: Callable[[int, Path], None], tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    require_on_ranks(4, act, tmp_path / "c")


def test_a_base_that_is_no_strategy_is_refused() -> None:
    with pytest.raises(StrategyError, match="expected a sharded load strategy, found 'torch_dist'"):
        TwoStageDataParallelLoadShardedStrategy(None, base_strategy="torch_dist")
