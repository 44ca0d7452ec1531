"""What regions share with blocks, checked against comparing each with each."""

import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import Region, Shape
from dist_ckpt_strategies.core.blocks import ArrayFacts, BlockTable, merged, overlaps
from dist_ckpt_strategies.formats.index import array_segments
from tests.support.regions import irregular_regions, shapes


@st.composite
def boxes(draw: st.DrawFn, experts: tuple[int, int], inner: Shape) -> list[Region]:
    """An array cut at random; or all of its experts, one by one, each cut at random."""
    if draw(st.booleans()):
        return draw(irregular_regions((*experts, *inner)))
    found = []
    for layer in range(experts[0]):
        for expert in range(experts[1]):
            parts = draw(irregular_regions(inner))
            found += [Region((layer, expert, *p.offset), (1, 1, *p.shape)) for p in parts]
    return found


@pytest.mark.slow
@given(st.data())
def test_regions_share_with_stored_blocks_what_comparing_each_with_each_finds(
    data: st.DataObject,
) -> None:
    experts = st.tuples(st.integers(1, 3), st.integers(1, 3))
    arrays = {
        key: (data.draw(experts), data.draw(shapes(max_ndim=2, max_size=4)))
        for key in ("a", "b", "c")[: data.draw(st.integers(1, 3))]
    }
    facts = {key: ArrayFacts("int8", (*grid, *inner)) for key, (grid, inner) in arrays.items()}
    blocks = [(key, box) for key, cuts in arrays.items() for box in data.draw(boxes(*cuts))]
    table = BlockTable.of(facts, data.draw(st.permutations(blocks)), [(0, 0, 0)] * len(blocks))
    segments = [zlib.decompress(content) for content, _ in array_segments(table)]
    stored, _, _ = merged(map(BlockTable.from_bytes, segments))
    wanted = [
        (number, region)
        for number, key in enumerate(stored.keys)
        for region in data.draw(boxes(*arrays[key]))
    ]
    wanted = data.draw(st.permutations(wanted))

    row_of, region_of, origin, extent = overlaps(
        stored, [number for number, _ in wanted], [region for _, region in wanted]
    )

    expected = set()
    for row, array in enumerate(stored.array.tolist()):
        for number, (of_array, region) in enumerate(wanted):
            shared = stored.region(row).intersect(region) if of_array == array else None
            if shared is not None:
                expected.add((row, number, shared))
    columns = zip(row_of.tolist(), region_of.tolist(), strict=True)
    ndims = [len(stored.facts[array].shape) for array in stored.array[row_of].tolist()]
    assert len(ndims) == len(expected)
    assert expected == {
        (*pair, Region(tuple(low[:ndim]), tuple(size[:ndim])))
        for pair, ndim, low, size in zip(
            columns, ndims, origin.tolist(), extent.tolist(), strict=True
        )
    }
