"""Headers of shards: read back as they were written, and refused when they were not."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.local.shard_format import (
    MAGIC,
    PREFIX_NBYTES,
    BufferSpec,
    LocalShard,
    LocalShardId,
    SaveId,
    decode_header,
    description_nbytes,
    encode_header,
    shard_from_fields,
    shard_layout,
    shard_to_fields,
)

TEXTS = st.text(max_size=20)
BUFFERS = st.builds(
    BufferSpec,
    TEXTS,
    st.sampled_from(DType),
    st.lists(st.integers(0, 2000), max_size=3).map(tuple),
    st.sampled_from(["cpu", "cuda", ""]),
)
TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), 1 << 63)
    | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=10,
)
PARTS = st.builds(
    LocalShard,
    st.builds(
        LocalShardId,
        st.builds(SaveId, st.integers(0, 10**9), st.text("0123456789abcdef", min_size=1)),
        st.integers(0, 10**5),
    ).filter(lambda shard_id: len(shard_id.save.token) <= 64),
    st.integers(1, 10**6),
    TEXTS,
    TEXTS,
    TREES,
    st.lists(BUFFERS, max_size=6).map(tuple),
)


def digests_of(shard: LocalShard) -> list[int]:
    """Some digests, the smallest and the largest among them."""
    return [(0, (1 << 64) - 1, 0xABC)[number % 3] for number in range(len(shard.buffers))]


def header_of(shard: LocalShard, digests: list[int]) -> bytes:
    """The header without the zeros at its end."""
    found = encode_header(shard, digests)
    return found[: PREFIX_NBYTES + description_nbytes(found)]


@given(PARTS)
def test_a_header_is_read_back_as_it_was_written(shard: LocalShard) -> None:
    stored = decode_header(header_of(shard, digests_of(shard)))

    assert stored.shard == shard
    assert list(stored.digests) == digests_of(shard)
    assert stored.layout == shard_layout(shard)


@given(PARTS)
def test_a_peer_reads_the_same_part_and_lays_it_out_alike(shard: LocalShard) -> None:
    found = shard_from_fields(json.loads(json.dumps(shard_to_fields(shard))))

    assert found == shard
    assert shard_layout(found) == shard_layout(shard)


@given(PARTS)
def test_buffers_lie_behind_the_header_in_order_and_apart(shard: LocalShard) -> None:
    layout = shard_layout(shard)
    header = encode_header(shard, digests_of(shard))
    end = layout.header_nbytes

    assert len(header) == layout.header_nbytes
    assert layout.header_nbytes % 4096 == 0
    for buffer, start in zip(shard.buffers, layout.byte_offsets, strict=True):
        assert start >= end
        assert start % (4096 if buffer.nbytes >= 64 << 10 else 64) == 0
        end = start + buffer.nbytes
    assert layout.nbytes == end


def sample() -> LocalShard:
    buffers = (BufferSpec("w", DType.FLOAT32, (4, 3)), BufferSpec("b", DType.BFLOAT16, ()))
    tree = {"w": {"$": "tensor", "buffer": 0}, "b": {"$": "tensor", "buffer": 1}}
    return LocalShard(LocalShardId(SaveId(7, "a1"), 1), 2, "run", "basic", tree, buffers)


def test_every_flipped_bit_of_a_header_is_refused() -> None:
    content = header_of(sample(), [1, 2])
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            with pytest.raises(CorruptCheckpointError):
                decode_header(bytes(damaged))


def test_every_shorter_and_every_longer_header_is_refused() -> None:
    content = header_of(sample(), [1, 2])
    for nbytes in range(len(content)):
        with pytest.raises(CorruptCheckpointError):
            decode_header(content[:nbytes])
    for more in (b"\0", b" ", content):
        with pytest.raises(CorruptCheckpointError):
            decode_header(content + more)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise: bytes) -> None:
    for content in (noise, MAGIC + noise, with_digest(noise)):
        with pytest.raises(CorruptCheckpointError):
            decode_header(content)


def with_digest(description: bytes) -> bytes:
    """A header whose digest is right, whatever it describes."""
    start = MAGIC + struct.pack("<Q", len(description))
    return start + xxhash.xxh3_128_digest(start + description) + description


def crafted(**changes: Any) -> bytes:
    """A header with other fields."""
    fields = json.loads(json.dumps(shard_to_fields(sample()))) | changes
    return with_digest(json.dumps(fields).encode())


def buffer_row(**changes: Any) -> list[list[Any]]:
    """The row of one buffer, changed."""
    row = {"name": "w", "dtype": "float32", "shape": [4], "device": "cpu", "digest": "0" * 16}
    return [list((row | changes).values())]


def test_the_header_that_the_crafted_ones_differ_from_is_good() -> None:
    assert decode_header(crafted()).shard == sample()
    assert decode_header(crafted(buffers=buffer_row())).shard.buffers[0].shape == (4,)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another"},
        {"version": 1},
        {"id": "iter_7_1_local_a1"},
        {"id": "iter_0000007_1_local_../../etc"},
        {"id": None},
        {"world_size": -1},
        {"world_size": "2"},
        {"world_size": 10**12},
        {"buffers": [[]]},
        {"buffers": buffer_row(dtype="object")},
        {"buffers": buffer_row(shape=5)},
        {"buffers": buffer_row(shape=[-1])},
        {"buffers": buffer_row(shape=[0, 10**30])},
        {"buffers": buffer_row(digest="x")},
        {"buffers": buffer_row(digest=5)},
    ],
)
def test_a_header_that_makes_no_sense_is_refused_though_its_digest_is_right(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_header(crafted(**changes))


@pytest.mark.parametrize(
    "description",
    [b"", b"null", b"[]", b"5", b'"text"', b"{}", b"\xff\xfe", b"{", b"[" * 100_000,
     b'{"format": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_a_description_that_is_none_is_refused(description: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        decode_header(with_digest(description))


@pytest.mark.parametrize("missing", ["format", "version", "id", "world_size", "session", "kind",
                                     "buffers", "content"])  # fmt: skip
def test_a_header_without_one_of_its_fields_is_refused(missing: str) -> None:
    fields = dict(shard_to_fields(sample()))
    del fields[missing]
    with pytest.raises(CorruptCheckpointError):
        decode_header(with_digest(json.dumps(fields).encode()))


@pytest.mark.parametrize("nbytes", [1 << 31, 1 << 63, (1 << 64) - 1])
def test_an_absurd_size_of_the_description_is_refused_before_it_is_read(nbytes: int) -> None:
    with pytest.raises(CorruptCheckpointError, match="states a description of"):
        description_nbytes(MAGIC + struct.pack("<Q", nbytes) + bytes(16))
    assert PREFIX_NBYTES == 32
