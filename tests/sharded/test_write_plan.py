"""Four ranks save whatever they hold of an array, and it is read back whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Engine, Options
from dist_ckpt_strategies.core.array import DType, RankShards, ShardId
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.core.report import SaveReport
from dist_ckpt_strategies.device import host_view
from dist_ckpt_strategies.errors import CheckpointError, PeerError, StorageError
from dist_ckpt_strategies.sharded.plan_save import SavePlan, build_save_plan
from dist_ckpt_strategies.sharded.write_plan import report_of, write_plan
from dist_ckpt_strategies.storage.base import ArrayStore
from tests.support.boxes import NUM_RANKS, Split, merged, spec_of, splits
from tests.support.memory_store import MemoryArrays
from tests.support.stores import read_array, store_of
from tests.support.tensors import LAYOUTS, bits, transposed
from tests.support.thread_ranks import ThreadCommunicator, run_ranks

FRESH = itertools.count()
FEWER = settings(max_examples=25)
OPTIONS = Options(timeout_s=60.0)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """An array in which every element differs."""
    numel = int(torch.Size(shape).numel())
    return torch.arange(1, numel + 1, dtype=torch.int32).reshape(shape)


def run_save(
    plan: SavePlan,
    tensors: Mapping[ShardId, torch.Tensor],
    store: ArrayStore,
    comm: Communicator,
    options: Options,
) -> SaveReport:
    write_plan(plan, tensors, lambda: store, comm, options)
    return report_of(plan, comm.global_rank(comm.rank), 0.0)


def save(
    requests: list[RankShards],
    values: dict[str, torch.Tensor],
    store: ArrayStore,
    options: Options = OPTIONS,
    layout: Callable[[torch.Tensor], torch.Tensor] = transposed,
) -> list[SaveReport | CheckpointError]:
    """Each rank saves its part of the arrays; reports or errors by rank."""

    def on_rank(comm: ThreadCommunicator) -> SaveReport | CheckpointError:
        plan = build_save_plan(requests, max_inflight_bytes=options.max_inflight_bytes)
        tensors = {
            shard.id: layout(part_of(values[shard.key], shard.region))
            for shard in requests[comm.rank].shards
            if shard.is_main
        }
        try:
            return run_save(plan, tensors, store, comm, options)
        except CheckpointError as error:
            return error

    return run_ranks(len(requests), on_rank, timeout_s=60.0)


def part_of(values: torch.Tensor, region: Region) -> torch.Tensor:
    """The region's elements; -1 where it reaches past the end of the array."""
    found = torch.full(region.shape, -1, dtype=values.dtype)
    inside = region.intersect(Region.whole(tuple(values.shape)))
    if inside is not None:
        found[inside.within(region).slices()] = values[inside.slices()]
    return found


def new_root(tmp_path: Path) -> Path:
    root = tmp_path / f"ckpt{next(FRESH)}"
    root.mkdir()
    return root


@pytest.mark.parametrize("engine", Engine)
@FEWER
@given(data=st.data())
def test_however_an_array_is_cut_and_spread_it_is_stored_whole(
    data: st.DataObject, engine: Engine, tmp_path: Path
) -> None:
    cases = data.draw(
        st.lists(st.booleans().flatmap(lambda r: splits(regular=r)), min_size=1, max_size=3)
    )
    cases = [split for split in cases if split.main or split.copies]
    requests = merged(
        *(split.requests(f"w{n}", DType.INT32) for n, split in enumerate(cases)),
        [RankShards(rank, ()) for rank in range(NUM_RANKS)],
    )
    values = {f"w{n}": numbered(split.shape) for n, split in enumerate(cases)}
    root = new_root(tmp_path)
    budget = data.draw(st.sampled_from([1, 100, 1 << 20]))
    layout = data.draw(st.sampled_from([LAYOUTS["dense"], LAYOUTS["at an offset"], transposed]))
    reports = save(
        requests, values, store_of(root, engine), Options(max_inflight_bytes=budget), layout
    )

    assert all(isinstance(report, SaveReport) for report in reports)
    for key, expected in values.items():
        found = read_array(root, engine, key)
        assert found.tobytes() == host_view(expected).tobytes()


@pytest.mark.parametrize("engine", Engine)
def test_padded_shards_are_stored_up_to_the_end_of_the_array(
    engine: Engine, tmp_path: Path
) -> None:
    boxes = [Region((row, 0), (6, 2)) for row in (0, 6, 12)]
    requests = [
        RankShards(rank, (spec_of(box, (8, 2), dtype=DType.INT32, may_mismatch=True),))
        for rank, box in enumerate(boxes)
    ]
    values = numbered((8, 2))
    root = new_root(tmp_path)
    reports = save(requests, {"w": values}, store_of(root, engine))

    assert all(isinstance(report, SaveReport) for report in reports)
    assert read_array(root, engine).tobytes() == host_view(values).tobytes()


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_slices_that_move_between_ranks_keep_every_bit(dtype: DType, tmp_path: Path) -> None:
    from tests.sharded.test_transfer import tensor_of  # noqa: PLC0415

    boxes = [Region((a,), (b - a,)) for a, b in ((0, 3), (3, 4), (4, 9), (9, 11))]
    split = Split((11,), tuple((n % 3, box) for n, box in enumerate(boxes)))
    values = tensor_of((11,), dtype)
    requests = split.requests("w", dtype)
    root = new_root(tmp_path)
    plan = build_save_plan(requests)
    assert any(write.moves for write in plan.writes)
    save(requests, {"w": values}, store_of(root, Engine.TENSORSTORE))

    assert read_array(root, Engine.TENSORSTORE).tobytes() == bits(values)


def test_the_reports_add_up(tmp_path: Path) -> None:
    boxes = [Region((a,), (b - a,)) for a, b in ((0, 3), (3, 4), (4, 9), (9, 11))]
    split = Split((11,), tuple((n % 3, box) for n, box in enumerate(boxes)))
    requests = merged(split.requests("w", DType.INT32), split.requests("v", DType.INT32))
    values = {"w": numbered((11,)), "v": numbered((11,))}
    found = save(requests, values, store_of(new_root(tmp_path), Engine.TENSORSTORE))
    reports = [report for report in found if isinstance(report, SaveReport)]
    plan = build_save_plan(requests)

    assert len(reports) == NUM_RANKS
    assert sum(report.num_arrays for report in reports) == 2
    assert sum(report.num_chunks for report in reports) == len(plan.writes)
    assert sum(report.nbytes for report in reports) == 2 * 11 * 4
    moved = sum(w.nbytes_of(move) for w in plan.writes for move in w.moves)
    assert sum(report.moved_nbytes for report in reports) == moved > 0


def test_a_parameter_that_needs_a_gradient_is_saved(tmp_path: Path) -> None:
    split = Split((5,), ((0, Region((0,), (2,))), (1, Region((2,), (3,)))))
    values = torch.arange(5.0)
    root = new_root(tmp_path)
    reports = save(
        split.requests("w", DType.FLOAT32),
        {"w": values},
        store_of(root, Engine.TENSORSTORE),
        layout=lambda t: torch.nn.Parameter(t.clone()),
    )

    assert all(isinstance(report, SaveReport) for report in reports)
    found = read_array(root, Engine.TENSORSTORE)
    assert found.tobytes() == values.numpy().tobytes()


# Failures


def two_arrays() -> tuple[list[RankShards], dict[str, torch.Tensor]]:
    """One whose shards are its chunks, one that is put together from slices."""
    regular = Split((4, 2), tuple((n, Region((n, 0), (1, 2))) for n in range(NUM_RANKS)))
    bounds = ((0, 3), (3, 4), (4, 9), (9, 11))
    slices = Split((11,), tuple((n, Region((a,), (b - a,))) for n, (a, b) in enumerate(bounds)))
    requests = merged(
        regular.requests("regular", DType.INT32), slices.requests("slices", DType.INT32)
    )
    return requests, {"regular": numbered((4, 2)), "slices": numbered((11,))}


@pytest.mark.parametrize("failing_rank", range(NUM_RANKS))
def test_a_store_that_fails_on_one_rank_fails_on_all_naming_rank_and_key(
    failing_rank: int, tmp_path: Path
) -> None:
    requests, values = two_arrays()
    plan = build_save_plan(requests)

    def on_rank(comm: ThreadCommunicator) -> CheckpointError | None:
        fails = {"regular"} if comm.rank == failing_rank else set()
        return error_of_save(comm, MemoryArrays(fails=fails))

    def error_of_save(comm: Communicator, store: ArrayStore) -> CheckpointError | None:
        tensors: dict[ShardId, torch.Tensor] = {
            shard.id: values[shard.key][shard.region.slices()]
            for shard in requests[comm.rank].shards
        }
        try:
            run_save(plan, tensors, store, comm, OPTIONS)
        except CheckpointError as error:
            return error
        return None

    errors = run_ranks(NUM_RANKS, on_rank)
    for rank, error in enumerate(errors):
        assert isinstance(error, StorageError)
        assert isinstance(error, PeerError) == (rank != failing_rank)
        assert str(error) == f"rank {failing_rank}: regular: told to fail"
        assert error.key == "regular"


def test_a_writer_of_slices_that_fails_fails_on_all(tmp_path: Path) -> None:
    requests, values = two_arrays()
    errors = save(requests, values, MemoryArrays(fails={"slices"}), layout=LAYOUTS["dense"])

    assert all(isinstance(error, StorageError) for error in errors)
    assert len({str(error) for error in errors if isinstance(error, PeerError)}) <= 1


def test_a_tensor_that_is_not_there_fails_on_all(tmp_path: Path) -> None:
    requests, values = two_arrays()
    root = new_root(tmp_path)

    def on_rank(comm: ThreadCommunicator) -> Exception | None:
        tensors = {
            shard.id: values[shard.key][shard.region.slices()]
            for shard in requests[comm.rank].shards
            if not (comm.rank == 2 and shard.key == "slices")
        }
        try:
            run_save(
                build_save_plan(requests),
                tensors,
                store_of(root, Engine.TENSORSTORE),
                comm,
                OPTIONS,
            )
        except (CheckpointError, KeyError) as error:
            return error
        return None

    errors = run_ranks(NUM_RANKS, on_rank)
    assert all(errors)
    assert {str(error) for error in errors if isinstance(error, PeerError)} == {
        str(errors[0]),
    }
    assert str(errors[0]).startswith("rank 2: KeyError")
