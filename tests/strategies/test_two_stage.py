"""Ranks that share the reading get what each would have read, and fail together."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch._C._distributed_c10d import FileStore

from dist_ckpt_strategies.errors import (
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PeerError,
    ShapeMismatchError,
    StrategyError,
)
from dist_ckpt_strategies.storage.file_systems import page_cache_of
from dist_ckpt_strategies.strategies.two_stage import (
    TwoStageDataParallelLoadShardedStrategy,
    _ShardedTensorMetadata,
    sharded_tensor_chunk_id,
    timed,
)
from dist_ckpt_strategies.two_stage import load as two_stage_load
from tests.support.entries import (
    Entry,
    Failure,
    outcome,
    prepare,
    require_failure_everywhere,
    save,
)
from tests.support.groups import group_of_size
from tests.support.ranks import RankDiedError, run_processes
from tests.support.sharding import (
    Cut,
    at_random,
    differences,
    no_data,
    on_grid,
    state_of,
    zeros,
)

pytestmark = pytest.mark.multiprocess

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool)


def cuts() -> list[Cut]:
    """Arrays on grids, irregular ones, replicated ones, and one large enough to be cut."""
    some = [at_random(f"r{n}", (17, 9), n, dtype=dtype) for n, dtype in enumerate(DTYPES)]
    return [
        *some,
        on_grid("grid", (8, 6), (2, 2)),
        on_grid("rows", (8, 6), (4, 1)),
        on_grid("everyone", (600, 1000), (1, 1), num_replicas=4),
        on_grid("vector", (4,), (1,), num_replicas=4),
    ]


def objects(rank: int, *, empty: bool = False) -> dict[str, Any]:
    """One object that all ranks want, and one of each rank's own."""
    return {
        "shared": ShardedObject(
            "shared", None if empty else {"of": "all"}, (1,), (0,), replica_id=rank
        ),
        "own": ShardedObject("own/state", None if empty else [rank], (4,), (rank,)),
    }


def load_shared(state: dict[str, Any], root: Path, strategy: Any) -> Any:
    return dist_checkpointing.load(state, str(root), sharded_strategy=strategy)


def load_everything(rank: int, size: int, root: Path) -> dict[str, Any]:
    prepare(60)
    save(Entry.OURS, state_of(rank, cuts()) | objects(rank), root)
    strategy = TwoStageDataParallelLoadShardedStrategy(group_of_size(size))
    seen: dict[str, Any] = {}
    for name, data in {"new": no_data, "in place": zeros}.items():
        wanted = state_of(rank, cuts(), data)
        loaded = load_shared(wanted | objects(rank, empty=True), root, strategy)
        seen[name] = differences(rank, cuts(), loaded)
        seen[f"{name}, objects"] = loaded["shared"] == {"of": "all"}, loaded["own"] == [rank]
    seen["metadata"] = sorted(strategy.load_sharded_metadata(str(root))) == sorted(
        [
            *(cut.key for cut in cuts()),
            "shared/shard_0_1",
            *(f"own/state/shard_{n}_4" for n in range(4)),
        ]
    )
    return seen


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_gets_what_it_requests_in_groups_of_any_size(size: int, tmp_path: Path) -> None:
    for result in run_processes(4, load_everything, size, tmp_path / "c"):
        assert isinstance(result, dict), result
        for found in result.values():
            assert found in ([], (True, True), True), result


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


def count_reads(rank: int, root: Path, backend: tuple[str, int], way: str) -> Any:
    prepare(60)
    is_one_host = way == "page cache"
    if way == "network storage":
        vars(two_stage_load)["page_cache_of"] = lambda _: None
    if way == "little memory":
        vars(two_stage_load)["available_nbytes"] = lambda: 0
    save(Entry.OURS, replicas(rank, empty=False), root, sharded_strategy=backend)
    strategy = TwoStageDataParallelLoadShardedStrategy(group_of_size(4))
    strategy.load(replicas(rank, empty=True), root)  # imports what is imported once
    dist.barrier()
    if rank == 0 and is_one_host:
        forget(root)
    dist.barrier()
    before = io_nbytes("read_bytes" if is_one_host else "rchar")
    loaded = strategy.load(replicas(rank, empty=True), root)
    counted = io_nbytes("read_bytes" if is_one_host else "rchar") - before
    expected = replicas(rank, empty=False)
    same = all(torch.equal(loaded[key], value.data) for key, value in expected.items())
    nbytes = sum(value.data.nbytes for value in expected.values())
    return same, nbytes, strategy.summarize_load_times(), counted


def forget(root: Path) -> None:
    """Drop the files from the page cache."""
    for path in (path for path in root.rglob("*") if path.is_file()):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def io_nbytes(name: str) -> int:
    """Bytes that this process has asked the system for (rchar) or had it get from a disk."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


SMALL_FILES_NBYTES = 100 << 10
"""Manifest, descriptions of arrays, and what travels over the ranks' sockets by way of ``read``."""


def is_in_memory(directory: Path) -> bool:
    cache = page_cache_of(directory)
    return cache is not None and cache.is_storage


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("backend", "way"),
    [
        (("zarr", 1), "network storage"),
        (("zarr", 2), "network storage"),
        (("zarr", 1), "little memory"),
    ],
)
def test_each_byte_is_read_once_and_all_ranks_read_about_the_same(
    backend: tuple[str, int], way: str, tmp_path: Path
) -> None:
    if way == "little memory" and is_in_memory(tmp_path):
        pytest.skip("needs a temporary directory that is not in memory")
    results = run_processes(4, count_reads, tmp_path / "c", backend, way)

    nbytes = results[0][1]
    for same, _, report, _ in results:
        assert same
        assert nbytes <= sum(share.read_nbytes for share in report.shares) <= 1.02 * nbytes
        assert max(share.read_nbytes for share in report.shares) <= 1.1 * nbytes / 4
        assert report == results[0][2]
    asked = [counted for _, _, _, counted in results]
    assert sum(asked) <= 1.02 * nbytes + SMALL_FILES_NBYTES
    assert max(asked) <= 1.1 * nbytes / 4 + SMALL_FILES_NBYTES / 4


MAX_BLOCKS_NBYTES = 1 << 20
"""What the system reads beside the content of small files: whole blocks, directories, inodes."""


@pytest.mark.parametrize("backend", [("zarr", 1), ("zarr", 2)], ids=["format1", "format2"])
def test_on_one_host_each_byte_leaves_the_disk_once(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    if page_cache_of(tmp_path) is None or is_in_memory(tmp_path):
        pytest.skip("needs a temporary directory on a local disk")
    results = run_processes(4, count_reads, tmp_path / "c", backend, "page cache")

    nbytes = results[0][1]
    for same, _, report, _ in results:
        assert same
        assert sum(share.read_nbytes for share in report.shares) <= 1.02 * nbytes
    assert 0.9 * nbytes <= sum(r[3] for r in results) <= 1.02 * nbytes + MAX_BLOCKS_NBYTES


def chunk_of(root: Path, key: str) -> Path:
    return next(path for path in sorted((root / key).iterdir()) if path.name[0].isdigit())


def load_damaged(rank: int, scratch: Path) -> dict[str, Any]:
    prepare(60)
    strategy = TwoStageDataParallelLoadShardedStrategy(group_of_size(2), timeout_s=60)
    seen = {}
    for name in ("missing", "short", "shape", "object"):
        root = scratch / name
        save(Entry.OURS, replicas(rank, empty=False) | objects(rank), root)
        dist.barrier()
        wanted = replicas(rank, empty=True) | objects(rank, empty=True)
        if rank == 0 and name == "missing":
            chunk_of(root, "w3").unlink()
        if rank == 0 and name == "short":
            os.truncate(chunk_of(root, "w0"), 4096)
        if rank == 0 and name == "object":
            next((root / "own" / "state").glob("shard_3_*")).write_bytes(b"broken")
        if rank == 2 and name == "shape":
            wrong = torch.zeros(3, 3)
            wanted["w2"] = ShardedTensor.from_rank_offsets("w2", wrong, replica_id=rank)
        dist.barrier()
        seen[name] = outcome(partial(_load_sharded, strategy, wanted, root))
    return seen


def _load_sharded(strategy: Any, wanted: dict[str, Any], root: Path) -> Any:
    """Past Megatron-Core's own checks, which would find the wrong shape first."""
    return strategy.load(wanted, str(root))


@pytest.mark.parametrize(
    ("name", "kind", "names"),
    [
        ("missing", IncompleteCheckpointError, ("w3", "0.0")),
        ("short", CorruptCheckpointError, ("w0", "0.0", "4096")),
        ("object", CorruptCheckpointError, ("own/state",)),
        ("shape", ShapeMismatchError, ("w2", "(3, 3)")),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_every_rank(
    name: str, kind: type[Exception], names: Sequence[str], damaged: list[dict[str, Any]]
) -> None:
    results = [seen[name] for seen in damaged]
    culprits = {failure.global_rank for failure in results}
    for failure in results:
        assert isinstance(failure, Failure), results
        assert kind.__name__ in failure.kinds
        assert failure.is_megatrons
        assert failure.seconds < 50
        assert all(text in failure.text for text in names), failure
    if name == "shape":
        assert culprits == {2}
        require_failure_everywhere(results, kind=kind, culprit=2, names=names)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = run_processes(4, load_damaged, tmp_path_factory.mktemp("damaged"), timeout_s=120)
    for seen in found:
        assert isinstance(seen, dict), seen
    return found


def lose_rank(rank: int, root: Path) -> Any:
    prepare(60)
    save(Entry.OURS, replicas(rank, empty=False), root)
    prepare(4)
    strategy = TwoStageDataParallelLoadShardedStrategy(group_of_size(4))
    strategy.maybe_init_gloo_group()
    dist.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome(partial(strategy.load, replicas(rank, empty=True), str(root)))


def test_a_rank_that_dies_is_a_peer_error_in_time(tmp_path: Path) -> None:
    *survivors, lost = run_processes(4, lose_rank, tmp_path / "c")

    assert isinstance(lost, RankDiedError)
    for failure in survivors:
        assert isinstance(failure, Failure), failure
        assert PeerError.__name__ in failure.kinds
        assert failure.seconds < 50


MIB = 1 << 20
LARGE = {"w0": (24, MIB), "w1": (16, MIB), "w2": (4, MIB)}
"""176 MiB of float32; the largest shard has 96, which is never in memory a second time."""


def large(rank: int, *, is_transposed: bool) -> dict[str, Any]:
    """Replicas of a few large arrays; transposed ones have to be put in place by a copy."""
    state = {}
    for number, (key, shape) in enumerate(LARGE.items()):
        data = torch.full(shape, float(number + 1))
        if is_transposed:
            data = torch.zeros(shape[::-1]).T
        state[key] = ShardedTensor.from_rank_offsets(key, data, replica_id=rank)
    return state


def peak_nbytes() -> int:
    """The most resident memory that this process has had since it was last asked to forget."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def resident_nbytes() -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(text.split("VmRSS:")[1].split()[0]) * 1024


def measure_memory(rank: int, root: Path) -> dict[str, Any]:
    prepare(60)
    save(Entry.OURS, large(rank, is_transposed=False), root)
    seen = {}
    for budget in (8 * MIB, 96 * MIB):
        strategy = TwoStageDataParallelLoadShardedStrategy(
            dist.group.WORLD, max_inflight_bytes=budget
        )
        for is_transposed in (False, True):
            strategy.load(large(rank, is_transposed=False), root)  # what a first load keeps
            extras = []
            for _ in range(3):  # the allocator may return memory of before, or take some anew
                wanted = large(rank, is_transposed=is_transposed)
                before = resident_nbytes()
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
                loaded = strategy.load(wanted, root)
                extras.append(peak_nbytes() - before)
                dist.barrier()
            right = [bool((loaded[key] == n + 1).all()) for n, key in enumerate(LARGE)]
            seen[f"{budget} {is_transposed}"] = budget, all(right), min(extras)
    return seen


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_beside_the_tensors_is_bounded(tmp_path: Path) -> None:
    for seen in run_processes(2, measure_memory, tmp_path / "c", timeout_s=120):
        assert isinstance(seen, dict), seen
        for budget, is_right, extra in seen.values():
            assert is_right
            assert extra <= budget + 8 * MIB, seen


def use_kept_names(rank: int, root: Path) -> Any:
    prepare(60)
    state = replicas(rank, empty=False)
    save(Entry.OURS, state, root)
    strategy = TwoStageDataParallelLoadShardedStrategy(group_of_size(2))
    metas = [
        _ShardedTensorMetadata(rank, state[key].without_data(), other, (0, 1))
        for key in ("w3", "w1")
        for other in (1, 0)
    ]
    lowest = [
        (m.sharded_tensor_no_data.key, m.dist_group_rank)
        for m in strategy.deduplicate_chunks(metas)
    ]
    loaded = strategy.load_tensor_from_storage(str(root), metas[0])
    assert timed(verbose=False)(lambda: 7)() == 7
    return lowest, torch.equal(loaded, state["w3"].data), list(strategy.call_times)


def test_the_functions_of_megatron_core_0_15_work(tmp_path: Path) -> None:
    chunk = sharded_tensor_chunk_id(ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2)))
    assert chunk == ("w", (2,))
    expected = [("w1", 0), ("w3", 0)], True, ["load_tensor_from_storage"]
    assert run_processes(4, use_kept_names, tmp_path / "c") == [expected] * 4


@pytest.mark.parametrize("cpu_transfer", [True, False])
def test_a_process_alone_needs_no_process_group(cpu_transfer: bool, tmp_path: Path) -> None:
    save(Entry.OURS, replicas(0, empty=False), tmp_path / "c")
    strategy = TwoStageDataParallelLoadShardedStrategy(None, cpu_transfer)
    assert strategy.summarize_load_times() is None
    loaded = strategy.load(replicas(0, empty=True), tmp_path / "c")
    summary = strategy.summarize_load_times()

    assert all(torch.equal(loaded[k], v.data) for k, v in replicas(0, empty=False).items())
    assert summary is not None
    assert [share.received_nbytes for share in summary.shares] == [0]


def give_a_group_of_others(rank: int, root: Path) -> list[Any]:
    prepare(60)
    save(Entry.OURS, replicas(rank, empty=False), root)
    others = dist.new_group([0, 1])
    found = []
    for cpu_transfer in (True, False):
        strategy = TwoStageDataParallelLoadShardedStrategy(others, cpu_transfer)
        found.append(outcome(partial(strategy.load, replicas(rank, empty=True), root)))
    return found


def test_a_rank_outside_its_group_is_named_on_every_rank(tmp_path: Path) -> None:
    results = run_processes(3, give_a_group_of_others, tmp_path / "c")

    for attempt in range(2):
        require_failure_everywhere(
            [found[attempt] for found in results],
            kind=StrategyError,
            culprit=2,
            names=["rank 2 is not in the process group"],
        )
        assert all(found[attempt].seconds < 50 for found in results)


def load_in_two_worlds(rank: int, scratch: Path) -> list[Any]:
    """With one strategy over the world and one over a group, before and after a new beginning."""
    prepare(60)
    found: list[Any] = []
    strategies = []
    for attempt in range(2):
        store = FileStore(str(scratch / f"store{attempt}"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        if not attempt:
            save(Entry.OURS, replicas(rank, empty=False), scratch / "c")
            strategies = [
                TwoStageDataParallelLoadShardedStrategy(g) for g in (None, dist.new_group())
            ]
        for strategy in strategies:
            wanted = replicas(rank, empty=True)
            loaded = outcome(partial(strategy.load, wanted, scratch / "c"))
            if not isinstance(loaded, Failure):
                expected = replicas(rank, empty=False)
                loaded = all(torch.equal(loaded[k], v.data) for k, v in expected.items())
            found.append(loaded)
        dist.destroy_process_group()
    return found


def test_a_strategy_outlives_its_world_and_a_group_does_not(tmp_path: Path) -> None:
    for *loaded, failure in run_processes(2, load_in_two_worlds, tmp_path, makes_group=False):
        assert loaded == [True, True, True]
        assert StrategyError.__name__ in failure.kinds, failure
        assert "has been destroyed" in failure.text
