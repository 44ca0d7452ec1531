"""Messages carry every byte of every buffer once, and are not too large."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_ckpt_strategies.core.messages import build_messages, build_stretches

SIZES = st.lists(st.integers(0, 200), max_size=30)


def offsets_of(sizes: list[int], gap: int) -> list[int]:
    found, end = [], 16
    for size in sizes:
        found.append(end)
        end += size + gap
    return found


@given(SIZES, st.integers(0, 9), st.integers(1, 120))
def test_every_byte_is_in_one_message(sizes: list[int], gap: int, max_nbytes: int) -> None:
    offsets = offsets_of(sizes, gap)
    messages = build_messages(offsets, sizes, max_nbytes)

    seen = [
        (piece.buffer, byte)
        for message in messages
        for piece in message.slices
        for byte in range(piece.start, piece.start + piece.nbytes)
    ]
    assert seen == [(buffer, byte) for buffer, size in enumerate(sizes) for byte in range(size)]


@given(SIZES, st.integers(0, 9), st.integers(1, 120))
def test_messages_are_bounded_and_lie_where_their_slices_do(
    sizes: list[int], gap: int, max_nbytes: int
) -> None:
    offsets = offsets_of(sizes, gap)
    for message in build_messages(offsets, sizes, max_nbytes):
        first, last = message.slices[0], message.slices[-1]
        assert 0 < message.nbytes <= max_nbytes
        assert message.byte_offset == offsets[first.buffer] + first.start
        end = offsets[last.buffer] + last.start + last.nbytes
        assert message.byte_offset + message.nbytes == end


def test_large_buffers_travel_alone_and_small_ones_together() -> None:
    messages = build_messages([0, 10, 20, 130], [10, 10, 100, 10], 64)

    assert [[piece.buffer for piece in m.slices] for m in messages] == [[0, 1], [2], [2], [3]]


@given(SIZES, st.integers(0, 9), st.integers(1, 120))
def test_stretches_are_the_messages_and_no_buffer_is_in_two(
    sizes: list[int], gap: int, max_nbytes: int
) -> None:
    messages = build_messages(offsets_of(sizes, gap), sizes, max_nbytes)
    stretches = build_stretches(messages)

    assert [message for stretch in stretches for message in stretch] == list(messages)
    buffers = [{p.buffer for m in stretch for p in m.slices} for stretch in stretches]
    assert sum(map(len, buffers)) == len(set().union(*buffers))
    pairs = zip(stretches, buffers, strict=True)
    assert all(len(stretch) == 1 or len(found) == 1 for stretch, found in pairs)
