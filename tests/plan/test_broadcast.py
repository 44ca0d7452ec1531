"""Every wanted box is read once, evenly, and goes to those that want it and to nobody else."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.plan.broadcast import (
    MAX_PACKED_NBYTES,
    MAX_PIECE_NBYTES,
    MAX_SMALL_NBYTES,
    Box,
    BroadcastPlan,
    build_broadcast_plan,
)
from dist_ckpt_strategies.spec.array import ArraySpec
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.region import Region

BUDGET = 512 << 20


@st.composite
def some_arrays(draw: st.DrawFn) -> dict[str, ArraySpec]:
    """A few arrays, from a scalar to megabytes, raw or not."""
    arrays = {}
    for number in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.sampled_from([1, 2, 3, 7, 64, 1000]), max_size=3).map(tuple))
        chunk = tuple(draw(st.integers(1, extent)) for extent in shape)
        dtype = draw(st.sampled_from([DType.FLOAT32, DType.BFLOAT16, DType.BOOL]))
        array = ArraySpec(f"a{number}", shape, dtype, chunk, is_raw=draw(st.booleans()))
        arrays[array.key] = array
    return arrays


@st.composite
def some_wants(draw: st.DrawFn) -> tuple[dict[str, ArraySpec], list[list[Box]]]:
    """Boxes of the arrays, equal, overlapping or not, wanted by any of several ranks."""
    arrays = draw(some_arrays())
    boxes = []
    for _ in range(draw(st.integers(0, 8))):
        array = arrays[draw(st.sampled_from(sorted(arrays)))]
        offset = tuple(draw(st.integers(0, extent - 1)) for extent in array.shape)
        shape = tuple(
            draw(st.integers(1, extent - start))
            for extent, start in zip(array.shape, offset, strict=True)
        )
        boxes.append(Box(array.key, Region(offset, shape)))
    ranks = range(draw(st.integers(1, 8)))
    wants = [draw(st.lists(st.sampled_from(boxes), max_size=6)) if boxes else [] for _ in ranks]
    return arrays, wants


def gpt(num_ranks: int, layers: int = 24) -> tuple[dict[str, ArraySpec], list[list[Box]]]:
    """Every rank wants all of a model: many small vectors, some matrices, a large embedding."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (32_000, 1024)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.norm": (1024,),
            f"{layer}.qkv": (3072, 1024),
            f"{layer}.fc1": (4096, 1024),
            f"{layer}.fc2": (1024, 4096),
        }
    arrays = {key: ArraySpec(key, shape, DType.FLOAT32, shape) for key, shape in shapes.items()}
    boxes = [Box(key, Region.whole(array.shape)) for key, array in arrays.items()]
    return arrays, [list(boxes) for _ in range(num_ranks)]


def cells(region: Region) -> int:
    return math.prod(region.shape)


@given(some_wants())
def test_each_wanted_box_is_read_exactly_once_and_whole(
    case: tuple[dict[str, ArraySpec], list[list[Box]]],
) -> None:
    arrays, wants = case
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET)
    parts: dict[Box, list[Region]] = {}
    for delivery in plan.deliveries:
        assert delivery.box.region.contains(delivery.region)
        parts.setdefault(delivery.box, []).append(delivery.region)

    assert set(parts) == {box for boxes in wants for box in boxes}
    for box, regions in parts.items():
        assert sum(map(cells, regions)) == cells(box.region)
        for number, region in enumerate(regions):
            assert all(region.intersect(other) is None for other in regions[:number])


@given(some_wants())
def test_a_box_goes_to_those_that_want_it_and_to_nobody_else(
    case: tuple[dict[str, ArraySpec], list[list[Box]]],
) -> None:
    arrays, wants = case
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET)
    for delivery in plan.deliveries:
        wanting = {rank for rank, boxes in enumerate(wants) if delivery.box in boxes}

        assert set(delivery.receivers) == wanting - {delivery.reader}
        assert list(delivery.receivers) == sorted(delivery.receivers)
        assert 0 <= delivery.reader < len(wants)


@given(some_wants(), st.randoms(use_true_random=False))
def test_every_rank_makes_the_same_plan(
    case: tuple[dict[str, ArraySpec], list[list[Box]]], order: object
) -> None:
    arrays, wants = case
    shuffled = [sorted(boxes, key=lambda box: str(box)[::-1]) for boxes in wants]
    again = build_broadcast_plan(
        shuffled, dict(reversed(arrays.items())), max_inflight_bytes=BUDGET
    )

    assert again == build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET)
    assert hash(again) == hash(build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8, 64])
def test_all_ranks_read_about_the_same(num_ranks: int) -> None:
    arrays, wants = gpt(num_ranks)
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET)
    read = [plan.read_nbytes(rank) for rank in range(num_ranks)]

    assert sum(read) == sum(array.nbytes for array in arrays.values())
    assert max(read) <= 1.1 * sum(read) / num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_one_rank_alone_wants_is_read_by_all(num_ranks: int) -> None:
    arrays, wants = gpt(num_ranks)
    wants = [wants[0], *([] for _ in range(num_ranks - 1))]
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET)
    read = [plan.read_nbytes(rank) for rank in range(num_ranks)]

    assert max(read) <= 1.1 * sum(read) / num_ranks
    assert all(d.receivers == (0,) for d in plan.deliveries if d.reader != 0)


def test_ranks_that_share_nothing_send_nothing_where_they_want_the_same_amount() -> None:
    arrays = {
        key: ArraySpec(key, (1024, 512), DType.FLOAT32, (1024, 512)) for key in map(str, range(4))
    }
    wants = [[Box(key, Region.whole((1024, 512)))] for key in arrays]
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET)

    assert all(delivery.receivers == () for delivery in plan.deliveries)


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
@pytest.mark.parametrize("budget", [1 << 20, 64 << 20, 512 << 20])
def test_rounds_bound_the_memory_of_each_rank(num_ranks: int, budget: int) -> None:
    arrays, wants = gpt(num_ranks)
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=budget)
    largest = max(message.nbytes for messages in plan.rounds for message in messages)
    for messages in plan.rounds:
        assert sum(message.nbytes for message in messages) <= max(budget // 3, num_ranks * largest)


def test_small_boxes_travel_together_and_large_ones_alone() -> None:
    arrays, wants = gpt(4)
    plan = build_broadcast_plan(wants, arrays, max_inflight_bytes=BUDGET)
    for messages in plan.rounds:
        for message in messages:
            sizes = [delivery.nbytes for delivery in message.deliveries]
            assert message.nbytes <= max(MAX_PACKED_NBYTES, sizes[0])
            assert len(sizes) == 1 or max(sizes) < MAX_SMALL_NBYTES
            assert all(start % 16 == 0 for start in message.starts)
            assert max(sizes) <= MAX_PIECE_NBYTES
    norms = [message for messages in plan.rounds for message in messages if _is_norm(message)]
    assert len(norms) <= 4


def _is_norm(message: object) -> bool:
    return any("norm" in d.box.key for d in message.deliveries)  # type: ignore[attr-defined]


def test_a_box_of_compressed_chunks_is_not_cut() -> None:
    array = ArraySpec("w", (4096, 4096), DType.FLOAT32, (512, 4096), is_raw=False)
    plan = build_broadcast_plan(
        [[Box("w", Region.whole(array.shape))]] * 4, {"w": array}, max_inflight_bytes=BUDGET
    )

    assert [delivery.region for delivery in plan.deliveries] == [Region.whole(array.shape)]


def test_nobody_wants_anything() -> None:
    assert build_broadcast_plan([[], []], {}, max_inflight_bytes=1) == BroadcastPlan(())


@pytest.mark.parametrize(
    "region", [Region((0,), (5,)), Region((3,), (2,)), Region((0,), (0,))], ids=str
)
def test_a_box_outside_its_array_is_refused(region: Region) -> None:
    array = ArraySpec("w", (4,), DType.BOOL, (4,))
    with pytest.raises(PlanError, match=r"^w: .* is not a part of the array's shape"):
        build_broadcast_plan([[Box("w", region)]], {"w": array}, max_inflight_bytes=1)


def test_an_array_that_was_not_looked_up_is_refused() -> None:
    with pytest.raises(PlanError, match="w: no array"):
        build_broadcast_plan([[Box("w", Region((), ()))]], {}, max_inflight_bytes=1)


def test_each_box_is_counted_once_however_often_a_rank_wants_it() -> None:
    array = ArraySpec("w", (4,), DType.FLOAT32, (4,))
    box = Box("w", Region.whole((4,)))
    plan = build_broadcast_plan([[box, box], [box]], {"w": array}, max_inflight_bytes=1)

    assert Counter(d.box for d in plan.deliveries) == {box: 1}
