"""Cut a file of many buffers into messages of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MESSAGE_NBYTES = 8 << 20
"""A message that is larger gains nothing, and has left the processor's cache before its digest is
taken and it is written."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes of one buffer.

    Attributes:
        buffer: its number.
        start: first byte, counted within the buffer.
        nbytes: how many.
    """

    buffer: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """A piece of a file.

    Attributes:
        byte_offset: where it begins in the file.
        nbytes: its size; it holds the gaps between its slices too.
        slices: what it is made of, in order.
    """

    byte_offset: int
    nbytes: int
    slices: tuple[Slice, ...]


def build_messages(
    byte_offsets: Sequence[int], sizes: Sequence[int], max_nbytes: int
) -> tuple[Message, ...]:
    """The messages that carry every byte of every buffer once, in the order of the file.

    A buffer of a quarter of ``max_nbytes`` or more travels by itself, in several messages where it
    is larger than one, so that it can be sent from where it is; smaller neighbours share one.

    Args:
        byte_offsets: where each buffer begins in the file, ascending.
        sizes: bytes of each buffer.
        max_nbytes: bound on a message.
    """
    messages: list[Message] = []
    shared: list[Slice] = []

    def close() -> None:
        if shared:
            messages.append(_shared(byte_offsets, shared))
            shared.clear()

    for buffer, (offset, size) in enumerate(zip(byte_offsets, sizes, strict=True)):
        if size == 0:
            continue
        if shared and offset + size - byte_offsets[shared[0].buffer] > max_nbytes:
            close()
        if 4 * size < max_nbytes:
            shared.append(Slice(buffer, 0, size))
            continue
        close()
        for start in range(0, size, max_nbytes):
            nbytes = min(max_nbytes, size - start)
            messages.append(Message(offset + start, nbytes, (Slice(buffer, start, nbytes),)))
    close()
    return tuple(messages)


def build_stretches(messages: Sequence[Message]) -> tuple[tuple[Message, ...], ...]:
    """The messages, those together that carry one buffer: the digest of each is taken in order.

    Args:
        messages: as ``build_messages`` makes them.
    """
    stretches: list[list[Message]] = []
    for message in messages:
        if message.slices[0].start == 0:
            stretches.append([])
        stretches[-1].append(message)
    return tuple(map(tuple, stretches))


def _shared(byte_offsets: Sequence[int], slices: Sequence[Slice]) -> Message:
    start = byte_offsets[slices[0].buffer]
    end = byte_offsets[slices[-1].buffer] + slices[-1].nbytes
    return Message(start, end - start, tuple(slices))
