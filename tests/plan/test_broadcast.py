"""Every wanted element is read once, evenly, and goes to those that want it and to nobody else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.plan.broadcast import (
    MAX_BUNDLE_NBYTES,
    MAX_PACKED_NBYTES,
    MAX_SMALL_NBYTES,
    BroadcastPlan,
    Delivery,
    Message,
    build_broadcast_plan,
)
from dist_ckpt_strategies.plan.inner_chunks import cut_chunk
from dist_ckpt_strategies.plan.spans import stored_nbytes
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.box import Box, BoxTable
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Region

BUDGET = 512 << 20

Case = tuple[list[ArraySpec], list[list[Box]]]


@st.composite
def some_arrays(draw: st.DrawFn) -> list[ArraySpec]:
    """A few arrays, from a scalar to megabytes, raw or not."""
    arrays = []
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 7, 64, 1000]), max_size=3).map(tuple))
        chunk = tuple(draw(st.integers(1, extent)) for extent in shape)
        dtype = draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.BOOL]))
        array = ArraySpec(f"a{number}", shape, dtype, chunk, is_raw=draw(st.booleans()))
        if draw(st.booleans()):
            parts = [draw(st.sampled_from([1, 2, 4])) for _ in chunk]
            inner = tuple(-(-extent // n) for extent, n in zip(chunk, parts, strict=True))
            padded = tuple(i * n for i, n in zip(inner, parts, strict=True))
            array = replace(array, chunk_shape=padded, inner_shape=inner, is_raw=True)
        arrays.append(array)
    return arrays


@st.composite
def some_wants(draw: st.DrawFn) -> Case:
    """Boxes of the arrays, equal, overlapping or not, wanted by any of several ranks."""
    arrays = draw(some_arrays())
    boxes = []
    for _ in range(draw(st.integers(0, 8))):
        number = draw(st.integers(0, len(arrays) - 1))
        array = arrays[number]
        offset = tuple(draw(st.integers(0, extent - 1)) for extent in array.shape)
        shape = tuple(
            draw(st.integers(1, extent - start))
            for extent, start in zip(array.shape, offset, strict=True)
        )
        boxes.append(Box(number, array.dtype.itemsize, Region(offset, shape)))
    ranks = range(draw(st.integers(1, 8)))
    wants = [draw(st.lists(st.sampled_from(boxes), max_size=6)) if boxes else [] for _ in ranks]
    return arrays, wants


def gpt(num_ranks: int, layers: int = 24) -> Case:
    """Every rank wants all of a model: many small vectors, some matrices, a large embedding."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (32_000, 1024)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.norm": (1024,),
            f"{layer}.qkv": (3072, 1024),
            f"{layer}.fc1": (4096, 1024),
            f"{layer}.fc2": (1024, 4096),
        }
    arrays = [ArraySpec(key, shape, DType.FLOAT32, shape) for key, shape in shapes.items()]
    boxes = [Box(number, 4, Region.whole(array.shape)) for number, array in enumerate(arrays)]
    return arrays, [list(boxes) for _ in range(num_ranks)]


def planned(
    case: Case, *, max_inflight_bytes: int = BUDGET, is_cut: bool = True
) -> tuple[BroadcastPlan, Sequence[ArraySpec]]:
    arrays, wants = case
    plan = build_broadcast_plan(
        [BoxTable.of(boxes) for boxes in wants],
        arrays,
        max_inflight_bytes=max_inflight_bytes,
        is_cut=is_cut,
    )
    return plan, arrays


def messages_of(plan: BroadcastPlan, arrays: Sequence[ArraySpec]) -> list[list[Message]]:
    """The messages of each round, as their readers see them."""
    views = [plan.rounds_of(rank, arrays) for rank in range(plan.num_ranks)]
    return [
        [m for rank, view in enumerate(views) for m in view[number] if m.reader == rank]
        for number in range(plan.num_rounds)
    ]


def deliveries_of(plan: BroadcastPlan, arrays: Sequence[ArraySpec]) -> list[Delivery]:
    rounds = messages_of(plan, arrays)
    return [d for messages in rounds for message in messages for d in message.deliveries]


def cells(region: Region) -> int:
    return math.prod(region.shape)


def num_covered(regions: Iterable[Region]) -> int:
    """Elements in at least one of the boxes."""
    parts: list[Region] = []
    for region in regions:
        rest = [region]
        for other in parts:
            rest = [left for piece in rest for left in piece.without(other)]
        parts.extend(rest)
    return sum(map(cells, parts))


@given(some_wants())
def test_each_wanted_element_is_read_exactly_once_and_no_other(case: Case) -> None:
    plan, arrays = planned(case)
    wanted = {box for boxes in case[1] for box in boxes}
    deliveries = deliveries_of(plan, arrays)
    for number in range(len(arrays)):
        read = [d.region for d in deliveries if d.box.array == number]
        regions = [box.region for box in wanted if box.array == number]

        assert sum(map(cells, read)) == num_covered(read) == num_covered(regions)
        assert all(any(region.contains(part) for region in regions) for part in read)


@given(some_wants())
def test_each_rank_gets_all_it_wants_and_nothing_else(case: Case) -> None:
    plan, arrays = planned(case)
    deliveries = deliveries_of(plan, arrays)
    for rank, boxes in enumerate(case[1]):
        for box in boxes:
            parts = [d for d in deliveries if is_part(d, box)]
            assert sum(cells(d.region) for d in parts) == cells(box.region)
            assert all(rank == d.reader or rank in d.receivers for d in parts)
    for delivery in deliveries:
        for rank in delivery.receivers:
            assert any(is_part(delivery, box) for box in case[1][rank])
        assert delivery.reader not in delivery.receivers
        assert list(delivery.receivers) == sorted(delivery.receivers)


def is_part(delivery: Delivery, box: Box) -> bool:
    return delivery.box.array == box.array and box.region.contains(delivery.region)


@given(some_wants())
def test_sender_and_receivers_see_the_same_messages(case: Case) -> None:
    plan, arrays = planned(case)
    views = [plan.rounds_of(rank, arrays) for rank in range(plan.num_ranks)]
    for number in range(plan.num_rounds):
        for sender, view in enumerate(views):
            for receiver, other in enumerate(views):
                sent = [m for m in view[number] if m.reader == sender and receiver in m.receivers]
                seen = [m for m in other[number] if m.reader == sender and receiver in m.receivers]
                assert sent == seen


@given(some_wants())
def test_boxes_that_may_not_be_cut_are_read_whole(case: Case) -> None:
    plan, arrays = planned(case, is_cut=False)

    assert sorted(d.box for d in deliveries_of(plan, arrays)) == sorted(
        {box for boxes in case[1] for box in boxes}
    )


@given(some_wants())
def test_every_rank_makes_the_same_plan(case: Case) -> None:
    arrays, wants = case
    shuffled = [sorted(boxes, key=lambda box: str(box)[::-1]) for boxes in wants]
    (plan, _), (again, _) = planned(case), planned((arrays, shuffled))

    assert again == plan
    assert hash(again) == hash(plan)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 64])
def test_all_ranks_read_about_the_same(num_ranks: int) -> None:
    plan, arrays = planned(gpt(num_ranks))
    read = plan.read_nbytes()

    assert sum(read) == sum(array.nbytes for array in arrays)
    assert max(read) <= 1.1 * sum(read) / num_ranks


@pytest.mark.parametrize("shape", [(3, 700_000), (2, 3, 5, 60_000), (1, 1, 2_000_005)])
@pytest.mark.parametrize("num_columns", [1, 5])
def test_arrays_of_few_long_rows_are_read_evenly_too(
    shape: tuple[int, ...], num_columns: int
) -> None:
    """In columns of chunks, they may have rows too short to be read one by one."""
    array = ArraySpec("w", shape, DType.FLOAT32, (*shape[:-1], shape[-1] // num_columns))
    plan, arrays = planned(([array], [[Box(0, 4, Region.whole(shape))]] * 8))
    read = [0] * 8
    for delivery in deliveries_of(plan, arrays):
        read[delivery.reader] += stored_nbytes(delivery.array, delivery.region)

    assert sum(read) == array.nbytes
    assert max(read) <= 1.1 * sum(read) / 8


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 64])
def test_inner_chunks_are_read_once_and_evenly(num_ranks: int) -> None:
    """They are read whole, and compared with their digests, however little of them is asked for."""
    arrays, wants = gpt(num_ranks)
    plan, inner = planned((list(map(in_format_2, arrays)), wants))
    read = [0] * num_ranks
    for delivery in deliveries_of(plan, inner):
        read[delivery.reader] += stored_nbytes(delivery.array, delivery.region)

    assert sum(read) == sum(array.nbytes for array in arrays)
    assert max(read) <= 1.1 * sum(read) / num_ranks


def in_format_2(array: ArraySpec) -> ArraySpec:
    cut = cut_chunk(array.chunk_shape, array.shape, 4, is_movable=False)
    assert cut is not None
    return replace(array, chunk_shape=cut.chunk_shape, inner_shape=cut.inner_shape)


def test_what_leaves_storage_is_counted_as_it_is_read() -> None:
    whole = ArraySpec("w", (100, 64), DType.FLOAT32, (50, 64))
    inner = replace(whole, inner_shape=(25, 16), has_crc32c=True)
    column = Region((10, 3), (80, 5))

    assert stored_nbytes(whole, Region((10, 0), (80, 64))) == 80 * 64 * 4
    assert stored_nbytes(whole, column) == whole.nbytes
    assert stored_nbytes(inner, column) == 4 * (25 * 16 * 4 + 4)
    assert stored_nbytes(inner, Region((24, 0), (2, 17))) == 4 * (25 * 16 * 4 + 4)
    assert stored_nbytes(ArraySpec("s", (), DType.FLOAT32, ()), Region((), ())) == 4


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_one_rank_alone_wants_is_read_by_all(num_ranks: int) -> None:
    arrays, wants = gpt(num_ranks)
    plan, _ = planned((arrays, [wants[0], *([] for _ in range(num_ranks - 1))]))
    read = plan.read_nbytes()

    assert max(read) <= 1.1 * sum(read) / num_ranks
    assert all(d.receivers == (0,) for d in deliveries_of(plan, arrays) if d.reader != 0)


def test_ranks_that_share_nothing_send_nothing_where_they_want_the_same_amount() -> None:
    arrays = [ArraySpec(str(n), (1024, 512), DType.FLOAT32, (1024, 512)) for n in range(4)]
    wants = [[Box(number, 4, Region.whole((1024, 512)))] for number in range(4)]
    plan, _ = planned((arrays, wants))

    assert all(delivery.receivers == () for delivery in deliveries_of(plan, arrays))


def test_what_two_ranks_want_of_an_array_is_read_once_where_it_overlaps() -> None:
    array = ArraySpec("w", (100, 8), DType.FLOAT32, (100, 8))
    boxes = [Box(0, 4, Region((0, 0), (60, 8))), Box(0, 4, Region((40, 0), (60, 8)))]
    plan, arrays = planned(([array], [[boxes[0]], [boxes[1]]]))
    shared = [d for d in deliveries_of(plan, arrays) if d.receivers]

    assert sum(plan.read_nbytes()) == array.nbytes
    assert sum(cells(d.region) for d in shared) == 20 * 8


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
@pytest.mark.parametrize("budget", [1 << 20, 64 << 20, 512 << 20])
def test_rounds_bound_the_memory_of_each_rank(num_ranks: int, budget: int) -> None:
    plan, arrays = planned(gpt(num_ranks), max_inflight_bytes=budget)
    largest = max(bundle.nbytes for bundle in plan.bundles)
    for messages in messages_of(plan, arrays):
        for rank in range(num_ranks):
            held = sum(m.nbytes for m in messages if rank == m.reader or rank in m.receivers)
            assert held <= max(budget // 3, largest) * 1.01


def test_small_boxes_travel_together_and_large_ones_alone() -> None:
    plan, arrays = planned(gpt(4))
    packed = 0
    for messages in messages_of(plan, arrays):
        for message in messages:
            sizes = [delivery.nbytes for delivery in message.deliveries]
            assert message.nbytes <= max(MAX_PACKED_NBYTES, sizes[0])
            assert len(sizes) == 1 or max(sizes) < MAX_SMALL_NBYTES
            assert all(start % 16 == 0 for start in message.starts)
            assert max(sizes) <= MAX_BUNDLE_NBYTES
            packed += len(sizes) > 1
    assert packed


def test_many_small_arrays_take_few_messages() -> None:
    arrays = [ArraySpec(f"n{n:03}", (1024,), DType.FLOAT32, (1024,)) for n in range(900)]
    boxes = [Box(number, 4, Region.whole((1024,))) for number in range(900)]
    plan, _ = planned((arrays, [boxes] * 4))

    assert sum(map(len, messages_of(plan, arrays))) <= 4 * 30


def test_a_box_of_compressed_chunks_is_cut_only_where_they_begin() -> None:
    array = ArraySpec("w", (4096, 4096), DType.FLOAT32, (512, 4096), is_raw=False)
    plan, arrays = planned(([array], [[Box(0, 4, Region.whole(array.shape))]] * 4))
    regions = sorted(d.region.offset for d in deliveries_of(plan, arrays))

    assert regions == [(row, 0) for row in range(0, 4096, 512)]


def test_nobody_wants_anything() -> None:
    plan, arrays = planned(([], [[], []]), max_inflight_bytes=1)

    assert plan.num_rounds == 0
    assert plan.rounds_of(0, arrays) == ()
    assert plan.read_nbytes() == (0, 0)


@pytest.mark.parametrize(
    "region", [Region((0,), (5,)), Region((3,), (2,)), Region((0,), (0,)), Region((), ())], ids=str
)
def test_a_box_outside_its_array_is_refused_by_whoever_reads_it(region: Region) -> None:
    array = ArraySpec("w", (4,), DType.BOOL, (4,))
    plan, arrays = planned(([array], [[Box(0, 1, region)]]), max_inflight_bytes=1)
    with pytest.raises(PlanError, match=r"^w: .* is not a part of an array of shape"):
        plan.rounds_of(0, arrays)


def test_each_box_is_counted_once_however_often_a_rank_wants_it() -> None:
    array = ArraySpec("w", (4,), DType.FLOAT32, (4,))
    box = Box(0, 4, Region.whole((4,)))
    plan, arrays = planned(([array], [[box, box], [box]]))

    assert [d.box for d in deliveries_of(plan, arrays)] == [box]


def test_where_hundreds_of_boxes_overlap_each_is_read_on_its_own() -> None:
    array = ArraySpec("w", (1000,), DType.FLOAT32, (1000,))
    wants = [[Box(0, 4, Region((start,), (100,)))] for start in range(0, 900, 7)]
    plan, arrays = planned(([array], wants))

    assert sorted(d.box for d in deliveries_of(plan, arrays)) == sorted(w[0] for w in wants)
