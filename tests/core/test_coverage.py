"""Shards that do not make up an array exactly are always refused."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.chunk_grids import ShardPlacement, require_partition
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import CoverageError, DuplicateWriterError
from tests.support.boxes import Split, regions_in, shapes, splits, times_covered


def placements_of(split: Split) -> list[ShardPlacement]:
    return [ShardPlacement(box, rank) for rank, box in split.main]


@given(splits())
def test_every_partition_is_accepted(split: Split) -> None:
    require_partition("w", split.shape, placements_of(split))


@st.composite
def any_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Region]]:
    shape = draw(shapes(max_ndim=3, max_size=4))
    boxes = draw(st.lists(regions_in(shape), max_size=6))
    return shape, [box for box in boxes if box.numel]


@given(any_boxes())
def test_any_boxes_are_refused_unless_they_hold_each_element_once(
    case: tuple[tuple[int, ...], list[Region]],
) -> None:
    shape, boxes = case
    count = times_covered(shape, boxes)
    placements = [ShardPlacement(box, rank) for rank, box in enumerate(boxes)]

    if (count > 1).any():
        with pytest.raises(DuplicateWriterError):
            require_partition("w", shape, placements)
    elif (count == 0).any():
        with pytest.raises(CoverageError):
            require_partition("w", shape, placements)
    else:
        require_partition("w", shape, placements)


@given(splits().filter(lambda split: split.main), st.data())
def test_an_overlap_is_refused_naming_the_key_and_both_ranks(
    split: Split, data: st.DataObject
) -> None:
    box = data.draw(regions_in(split.shape))
    assume(box.numel)
    placements = [*placements_of(split), ShardPlacement(box, 77)]

    with pytest.raises(DuplicateWriterError, match=r"^layer\.w: ") as caught:
        require_partition("layer.w", split.shape, placements)

    owners = {rank for rank, held in split.main if held.intersect(box)}
    message = str(caught.value)
    assert "on rank 77" in message
    assert any(f"on rank {rank} " in message for rank in owners)
    assert caught.value.key == "layer.w"


@given(splits(max_ndim=3).filter(lambda split: split.shape and split.main), st.data())
def test_a_box_that_reaches_outside_is_refused_naming_its_rank(
    split: Split, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(split.shape) - 1))
    reach = data.draw(st.sampled_from([-1, split.shape[dim]]))
    offset = tuple(reach if d == dim else 0 for d in range(len(split.shape)))
    outside = ShardPlacement(Region(offset, (1,) * len(split.shape)), 5)

    with pytest.raises(CoverageError, match=r"^w: rank 5 holds .* outside"):
        require_partition("w", split.shape, [*placements_of(split), outside])


def test_a_gap_is_refused_naming_the_ranks_that_hold_copies_of_it() -> None:
    main = [ShardPlacement(Region((0,), (4,)), 3)]
    copies = [ShardPlacement(Region((4,), (2,)), rank) for rank in (7, 5)]
    beside = ShardPlacement(Region((5,), (3,)), 6)

    with pytest.raises(CoverageError, match=r"\(4,\), which only copies hold \(rank 5, 7\)"):
        require_partition("w", (8,), main, [*copies, beside])
    with pytest.raises(CoverageError, match=r"\(4,\), which no rank holds"):
        require_partition("w", (8,), main, [beside])
