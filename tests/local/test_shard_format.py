"""Ids and footers of shards: read back as they were written, and refused when they were not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError
from dist_ckpt_strategies.local.shard_format import (
    MAGIC,
    BufferSpec,
    LocalShard,
    LocalShardId,
    SaveId,
    decode_footer,
    encode_footer,
    footer_nbytes,
)

TEXTS = st.text(max_size=20)
BUFFERS = st.builds(
    BufferSpec,
    TEXTS,
    st.sampled_from(DType),
    st.lists(st.integers(0, 2000), max_size=3).map(tuple),
)
IDS = st.builds(
    LocalShardId,
    st.builds(SaveId, st.integers(0, 10**9), st.text("0123456789abcdef", min_size=1, max_size=64)),
    st.integers(0, 10**6),
)
SHARDS = st.builds(
    LocalShard,
    IDS,
    st.integers(1, 10**6),
    TEXTS,
    TEXTS,
    st.lists(BUFFERS, max_size=6).map(tuple),
)


def digests_of(shard: LocalShard) -> list[int]:
    """Some digests, the smallest and the largest among them."""
    return [(0, (1 << 64) - 1, 0xABC)[number % 3] for number in range(len(shard.buffers))]


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


@given(SHARDS)
def test_a_footer_is_read_back_as_it_was_written(shard: LocalShard) -> None:
    footer = encode_footer(shard, digests_of(shard))

    assert footer_nbytes(footer[-32:]) == len(footer)
    assert decode_footer(footer) == (shard, tuple(digests_of(shard)))


@given(SHARDS)
def test_buffers_lie_in_order_and_apart(shard: LocalShard) -> None:
    end = 0
    for buffer, start in zip(shard.buffers, shard.byte_offsets, strict=True):
        assert end <= start < end + 64
        assert start % 64 == 0
        end = start + buffer.nbytes
    assert shard.nbytes == end


def sample() -> LocalShard:
    buffers = (BufferSpec("w", DType.FLOAT32, (4, 3)), BufferSpec("b", DType.BFLOAT16, ()))
    return LocalShard(LocalShardId(SaveId(7, "a1"), 1), 2, "run", "basic", buffers)


def test_every_flipped_bit_of_a_footer_is_refused() -> None:
    content = encode_footer(sample(), [1, 2])
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                decode_footer(bytes(damaged))


def test_every_shorter_and_every_longer_footer_is_refused() -> None:
    content = encode_footer(sample(), [1, 2])
    for nbytes in range(len(content)):
        for cut in (content[:nbytes], content[nbytes + 1 :]):
            with pytest.raises(CorruptCheckpointError):
                decode_footer(cut)
    for more in (b"\0", b" ", content):
        with pytest.raises(CorruptCheckpointError):
            decode_footer(more + content)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for content in (noise, noise + MAGIC, with_digest(noise)):
        with pytest.raises(CorruptCheckpointError):
            decode_footer(content)


def with_digest(description: bytes) -> bytes:
    """A footer whose digest is right, whatever it describes."""
    size = len(description).to_bytes(8, "little")
    return description + xxhash.xxh3_128_digest(description + size) + size + MAGIC


def crafted(**changes: Any) -> bytes:
    """A footer with other fields."""
    fields = {**sample().to_message(), "digests": ["1", "2"]} | changes
    return with_digest(json.dumps(fields).encode())


def of_one_buffer(**changes: Any) -> dict[str, Any]:
    """The fields of one buffer, changed."""
    row = {"name": "w", "dtype": "float32", "shape": [4], "digest": "0"} | changes
    return {"buffers": [[row["name"], row["dtype"], row["shape"]]], "digests": [row["digest"]]}


def test_the_footer_that_the_crafted_ones_differ_from_is_good() -> None:
    assert decode_footer(crafted()) == (sample(), (1, 2))
    assert decode_footer(crafted(**of_one_buffer()))[0].buffers[0].shape == (4,)


@pytest.mark.parametrize(
    "changes",
    [
        {"id": "iter_7_1_local_a1"},
        {"id": "iter_0000007_1_local_../../etc"},
        {"id": None},
        {"world_size": -1},
        {"world_size": "2"},
        {"world_size": 10**12},
        {"buffers": [[]]},
        {"digests": ["1"]},
        of_one_buffer(dtype="object"),
        of_one_buffer(shape=5),
        of_one_buffer(shape=[-1]),
        of_one_buffer(shape=[0, 10**30]),
        of_one_buffer(digest="x"),
        of_one_buffer(digest=5),
    ],
)
def test_a_footer_that_makes_no_sense_is_refused_though_its_digest_is_right(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_footer(crafted(**changes))


@pytest.mark.parametrize(
    "description",
    [b"", b"null", b"[]", b"5", b'"text"', b"{}", b"\xff\xfe", b"{", b"[" * 100_000,
     b'{"id": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_description_that_is_none_is_refused(description: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_footer(with_digest(description))
