"""Ids of shards are text that reads back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local.shard_format import BufferSpec, LocalShardId, SaveId

IDS = st.builds(
    LocalShardId,
    st.builds(SaveId, st.integers(0, 10**9), st.text("0123456789abcdef", min_size=1, max_size=64)),
    st.integers(0, 10**6),
)


@given(IDS)
def test_an_id_is_read_back_from_its_text(shard_id: LocalShardId) -> None:
    assert LocalShardId.parse(str(shard_id)) == shard_id


@pytest.mark.parametrize(
    "text",
    ["", "iter_5_3_local_a", "iter_0000005_03_local_a", "iter_0000005_3_local_", "x",
     "iter_0000005_3_local_a.part", "iter_00000005_3_local_a"],
)  # fmt: skip
def test_other_text_is_no_id(text: str) -> None:
    assert LocalShardId.parse(text) is None
    with pytest.raises(PlanError, match="expected the id of a shard"):
        LocalShardId.require(text)


def test_the_newest_save_sorts_last() -> None:
    assert SaveId(5, "b") < SaveId(9, "a") < SaveId(9, "b")


def test_a_buffer_knows_its_size() -> None:
    assert BufferSpec("w", DType.BFLOAT16, (3, 5)).nbytes == 30
    assert BufferSpec("w", DType.INT64, ()).nbytes == 8
    assert BufferSpec("w", DType.INT64, (0, 9)).nbytes == 0
