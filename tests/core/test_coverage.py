"""Blocks that make up arrays, or do not, checked against counting elements one by one."""

import math
import re
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable
from dist_ckpt_strategies.core.coverage import Copies, require_coverage
from dist_ckpt_strategies.errors import CheckpointError, CoverageError
from tests.support.regions import (
    NUM_RANKS,
    grid_regions,
    irregular_regions,
    regions_in,
    shapes,
    times_covered,
)

Held = tuple[str, Region, int]
"""A block: its key, its region, the rank that holds it."""

Arrays = dict[str, Shape]


def table_of(arrays: Arrays, held: list[Held]) -> BlockTable:
    """The table as another rank receives it."""
    facts = {key: ArrayFacts("float32", shape) for key, shape in arrays.items()}
    blocks = [(key, region) for key, region, _ in held]
    table = BlockTable.of(facts, blocks, [(0, 0, 0)] * len(held))
    received = BlockTable.from_bytes(table.to_bytes())
    assert (received.keys, received.facts) == (table.keys, table.facts)
    return received


def copies_of(arrays: Arrays, held: list[Held]) -> list[Copies]:
    """One table for each rank, of the keys that it holds."""
    copies: list[Copies] = []
    for rank in {rank for _, _, rank in held}:
        of_rank = [block for block in held if block[2] == rank]
        shapes_of_rank = {key: arrays[key] for key, _, _ in of_rank}
        copies.append(((rank,), table_of(shapes_of_rank, of_rank)))
    return copies


def require(arrays: Arrays, held: list[Held], copies: list[Copies] | None = None) -> None:
    ranks = np.array([rank for _, _, rank in held], np.int64)
    require_coverage(table_of(arrays, held), ranks, copies or ())


Fault = tuple[type[CheckpointError], list[str]]
"""The error's class, and the texts of which its message has one."""


def fault_of(shape: Shape, main: list[Held], copies: list[Held]) -> Fault | None:
    """What is wrong with one array."""
    blocks = sorted((region.offset, region.shape, rank) for _, region, rank in main if region.numel)
    regions = [(Region(offset, extent), rank) for offset, extent, rank in blocks]
    whole = Region.whole(shape)
    for region, rank in regions:
        if not whole.contains(region):
            return CoverageError, [f"rank {rank} holds {region}, outside the array's shape {shape}"]
    count = times_covered(shape, [region for region, _ in regions])
    if (count > 1).any():
        texts = [
            f"{one} on rank {rank} and {other} on rank {other_rank} are both main replicas "
            "and overlap; give one of them another replica_id"
            for (one, rank), (other, other_rank) in combinations(regions, 2)
            if one.intersect(other)
        ]
        return CoverageError, texts
    if (count == 1).all():
        return None
    gap = tuple(map(int, np.argwhere(count == 0)[0]))
    element = Region(gap, (1,) * len(gap))
    ranks = sorted({rank for _, region, rank in copies if region.contains(element)})
    held = f"only copies hold (rank {', '.join(map(str, ranks))}); one of them needs replica_id 0"
    who = held if ranks else "no rank holds"
    covered = f"main replicas cover {count.sum()} of {count.size} elements of shape {shape}; "
    return CoverageError, [f"{covered}first element not covered: {gap}, which {who}"]


@st.composite
def moved(draw: st.DrawFn, region: Region) -> Region:
    """A region one element off, or one element longer at either end, along one dim."""
    dim = draw(st.integers(0, region.ndim - 1))
    offset, extent = list(region.offset), list(region.shape)
    step, length = draw(st.sampled_from([(-1, 0), (1, 0), (-1, 1), (0, 1)]))
    offset[dim] += step
    extent[dim] += length
    return Region(tuple(offset), tuple(extent))


@st.composite
def blocks_of(draw: st.DrawFn, key: str, shape: Shape) -> tuple[list[Held], list[Held]]:
    """Main replicas, a partition or nearly, and copies of one array."""
    regions = draw(irregular_regions(shape) | grid_regions(shape))
    copied = draw(st.lists(st.sampled_from(regions), max_size=4)) if regions else []
    change = draw(
        st.sampled_from(
            ["none", "none", "none", "removed", "doubled", "moved", "other", "all removed"]
        )
    )
    if change == "all removed":
        regions = []
    if regions and change != "none":
        region = regions.pop(draw(st.integers(0, len(regions) - 1)))
        if change == "doubled":
            regions += [region, region]
        elif change == "moved" and shape:
            regions.append(draw(moved(region)))
        elif change == "other":
            regions.append(draw(regions_in(shape)))
    has_empty = draw(st.booleans())
    if shape and has_empty:
        regions.append(Region(shape, (0,) * len(shape)))
    rank = st.integers(0, NUM_RANKS - 1)
    main = [(key, region, draw(rank)) for region in regions]
    return main, [(key, region, draw(rank)) for region in copied]


@pytest.mark.slow
@given(st.data())
def test_blocks_are_refused_where_counting_elements_finds_a_fault(data: st.DataObject) -> None:
    arrays: Arrays = {}
    main: list[Held] = []
    copied: list[Held] = []
    faults: dict[str, Fault] = {}
    unlisted = set()
    for key in data.draw(st.permutations("abc")):
        shape: Shape = data.draw(st.one_of(shapes(6, 4), shapes(2, 40)))
        of_key, copies = data.draw(blocks_of(key, shape))
        arrays[key] = shape
        main += of_key
        copied += copies
        if not of_key and data.draw(st.booleans()):
            unlisted.add(key)  # only copies tell of it
        fault = fault_of(shape, of_key, copies)
        if fault is not None and (copies or key not in unlisted):
            faults[key] = fault
    listed = {key: shape for key, shape in arrays.items() if key not in unlisted}
    copies_of_all = copies_of(arrays, copied)
    main = data.draw(st.permutations(main))

    if not faults:
        require(listed, main, copies_of_all)
        return
    first = min(faults)
    kind, texts = faults[first]
    with pytest.raises(CheckpointError) as caught:
        require(listed, main, copies_of_all)
    assert (type(caught.value), caught.value.key) == (kind, first)
    assert any(f"{first}: {text}" in str(caught.value) for text in texts), caught.value


def test_messages_name_key_ranks_regions_and_what_to_do() -> None:
    arrays: Arrays = {"w": (4, 6), "b": ()}
    top, bottom = Region((0, 0), (2, 6)), Region((2, 0), (2, 6))
    main = [("b", Region((), ()), 0), ("w", top, 7)]
    copies = copies_of(arrays, [("w", bottom, 12), ("w", bottom, 3)])

    with pytest.raises(CoverageError) as gap:
        require(arrays, main, copies + copies_of({"w": (8, 6)}, [("w", bottom, 4)]))
    assert str(gap.value) == (
        "w: main replicas cover 12 of 24 elements of shape (4, 6); first element not covered: "
        "(2, 0), which only copies hold (rank 3, 12); one of them needs replica_id 0"
    )
    with pytest.raises(CoverageError, match=r"^rank 9: w: rank 9 holds \[3:5, 0:6\]") as out:
        require(arrays, [*main, ("w", Region((3, 0), (2, 6)), 9)])
    assert out.value.global_rank == 9


@pytest.mark.slow
def test_blocks_of_a_large_array_are_proved_and_each_fault_among_them_is_found() -> None:
    arrays: Arrays = {"experts": (58, 256, 2048, 64)}
    grid = product(range(58), range(256), range(4))
    main = [
        ("experts", Region((layer, expert, 512 * tp, 0), (1, 1, 512, 64)), expert)
        for layer, expert, tp in grid
    ]
    require(arrays, main)

    gone, (_, region, _) = main[:30_000] + main[30_001:], main[30_000]
    with pytest.raises(CoverageError) as gap:
        require(arrays, gone)
    total = math.prod(arrays["experts"])
    assert f"cover {total - region.numel} of {total} elements" in str(gap.value)
    assert f"first element not covered: {region.offset}, which no rank" in str(gap.value)
    with pytest.raises(CoverageError, match=r"on rank 5 and .* on rank 77 are both"):
        require(arrays, [*main, ("experts", Region((9, 5, 1000, 0), (1, 1, 1, 1)), 77)])


def spirals(turns: int) -> list[Region]:
    """Blocks around each other: no line leaves all of them whole, except along the edges."""
    size = 2 * turns + 1
    regions = [Region((turns, turns), (1, 1))]
    for at in range(turns):
        end = size - 1 - at
        length = end - at
        regions += [
            Region((at, at), (1, length)),
            Region((at, end), (length, 1)),
            Region((end, at + 1), (1, length)),
            Region((at + 1, at), (length, 1)),
        ]
    return regions


@pytest.mark.slow
def test_blocks_that_no_plane_separates_are_compared_all_the_same() -> None:
    arrays: Arrays = {"w": (21, 21)}
    main = [("w", region, number) for number, region in enumerate(spirals(10))]
    require(arrays, main)
    for at, (_, region, _) in enumerate(main):
        with pytest.raises(CoverageError) as gap:
            require(arrays, main[:at] + main[at + 1 :])
        assert f"cover {441 - region.numel} of 441 elements" in str(gap.value)
        assert f"first element not covered: {region.offset}, which" in str(gap.value)
    for element in product(range(21), repeat=2):
        extra = Region(element, (1, 1))
        with pytest.raises(CoverageError, match=re.escape(f"{extra} on rank 77 ")):
            require(arrays, [*main, ("w", extra, 77)])


@pytest.mark.parametrize("size", [2**20, 2**40, 2**63 - 1, 2**64])
def test_numbers_of_elements_have_no_limit(size: int) -> None:
    arrays: Arrays = {"w": (size, 4, size)}
    half = min(size // 2, 2**62)
    spans = ((0, half), (half, min(size, 2**63 - 1) - half))
    main = [
        ("w", Region((one[0], 0, other[0]), (one[1], 4, other[1])), rank)
        for rank, (one, other) in enumerate(product(spans, spans))
    ]
    if size < 2**63:
        require(arrays, main)
        held = 4 * (size**2 - (size - half) ** 2)
        main, gap = main[:3], (half, 0, half)
    else:
        held, gap = 4 * (2**63 - 1) ** 2, (0, 0, 2**63 - 1)
    with pytest.raises(CoverageError) as caught:
        require(arrays, main)
    assert f"cover {held} of {4 * size**2} elements" in str(caught.value)
    assert f"not covered: {gap}, which no rank holds" in str(caught.value)
    most = 2**63 - 1
    with pytest.raises(CoverageError, match=rf"cover {most} of {2**64} .* covered: \({most},\)"):
        require({"v": (2**64,)}, [("v", Region.whole((most,)), 0)])
