"""Names of object shards, in the present and in the older form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import UNKNOWN, ObjectId

keys = st.text(st.characters(exclude_characters="/\0"), min_size=1).map(lambda s: f"{s}/{s}")
extents = st.lists(st.integers(0, 1 << 31), min_size=1, max_size=4).map(tuple)


@st.composite
def ids(draw: st.DrawFn) -> ObjectId:
    offset = draw(extents)
    return ObjectId(draw(keys), offset, tuple(at + draw(st.integers(1, 9)) for at in offset))


@given(ids())
def test_the_name_of_a_shard_is_parsed_back(name: ObjectId) -> None:
    assert ObjectId.parse(name.unique_key) == name


@given(ids().filter(lambda name: len(name.offset) > 1))
def test_the_older_name_lacks_the_last_number_of_the_shape(name: ObjectId) -> None:
    found = ObjectId.parse(name.older_key)

    assert found == ObjectId(name.key, name.offset, (*name.shape[:-1], UNKNOWN))


def test_names_are_those_that_megatron_writes() -> None:
    assert ObjectId("rng_state", (0, 1), (2, 2)).unique_key == "rng_state/shard_0.1_2.2"
    assert ObjectId("layer._extra_state", (2,), (4,)).unique_key == "layer._extra_state/shard_2_4"
    assert ObjectId("rng_state", (0, 1), (2, 2)).older_key == "rng_state/shard_0.1_2"


@pytest.mark.parametrize(
    "name",
    [
        "shard_0_1",
        "/shard_0_1",
        "a/shard_0",
        "a/shard_0_1_2",
        "a/shard_0.1_2.2.2",
        "a/shard_0.1.2_3",
        "a/shard_-1_2",
        "a/shard_0._2.2",
        "a/shard_0_1\n",
        "a/shard_\u0661_\u0662",
        "a/chunk_0_1",
        "common",
        "",
    ],
)
def test_other_names_are_no_shards(name: str) -> None:
    assert ObjectId.parse(name) is None
