"""Tables hold every box once, in order, and survive the way to another rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.spec.box import Box, BoxTable, concatenated
from dist_ckpt_strategies.spec.region import Region


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = tuple(draw(st.lists(st.integers(1, 1 << 40), max_size=4)))
    offset = tuple(draw(st.integers(0, 1 << 40)) for _ in shape)
    return Box(
        draw(st.integers(0, 5)), draw(st.sampled_from([1, 2, 4, 8, 16])), Region(offset, shape)
    )


@given(st.lists(boxes()))
def test_a_table_lists_every_box_once(found: list[Box]) -> None:
    table = BoxTable.of(found)

    assert set(table) == set(found)
    assert len(table) == len(set(found))


@given(st.lists(boxes()))
def test_a_table_is_the_same_after_a_journey(found: list[Box]) -> None:
    table = BoxTable.of(found)
    again = BoxTable.from_bytes(table.to_bytes())

    assert list(again) == list(table)
    assert again.to_bytes() == table.to_bytes() == BoxTable.of(reversed(found)).to_bytes()


@given(st.lists(boxes()), st.lists(boxes()))
def test_tables_of_other_dims_go_into_one(some: list[Box], others: list[Box]) -> None:
    tables = [BoxTable.of(some), BoxTable.of(others)]

    assert list(concatenated(tables)) == [*tables[0], *tables[1]]


def test_bytes_of_a_box_are_counted_from_its_elements() -> None:
    region = Region((5, 6), (3, 4))
    assert BoxTable.of([Box(0, 8, region), Box(1, 2, Region((), ()))]).nbytes.tolist() == [96, 2]
    assert Box(0, 8, region).nbytes == 96


@pytest.mark.parametrize("content", [b"", b"\x02" + b"x" * 30], ids=["nothing", "half a row"])
def test_what_is_no_table_is_refused(content: bytes) -> None:
    with pytest.raises(PlanError, match="expected a table of boxes"):
        BoxTable.from_bytes(content)
