"""Memory that parts land in."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import xxhash

from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.core.messages import Message, build_messages
from dist_ckpt_strategies.local.part_format import BufferSpec, Part, PartId, SaveId, part_layout
from dist_ckpt_strategies.local.part_streams import (
    BufferDigests,
    MemorySink,
    MemorySource,
    TensorSource,
)


def test_tensors_that_land_in_one_piece_of_memory_have_storages_of_their_own() -> None:
    buffers = tuple(BufferSpec(name, DType.FLOAT32, (50,), "cpu") for name in "abc")
    part = Part(PartId(SaveId(1, "a"), 0), 1, "", "basic", None, buffers)
    sink = MemorySink(part, part_layout(part))
    for number, tensor in enumerate(sink.tensors):
        tensor.fill_(number)

    assert [tensor.untyped_storage().nbytes() for tensor in sink.tensors] == [200] * 3
    assert [set(tensor.tolist()) for tensor in sink.tensors] == [{0}, {1}, {2}]


def test_a_part_without_bytes_lands_too() -> None:
    buffers = (BufferSpec("a", DType.INT8, (0, 3), "cpu"), BufferSpec("b", DType.BFLOAT16, (0,)))
    part = Part(PartId(SaveId(1, "a"), 0), 1, "", "basic", None, buffers)

    assert [(t.shape, t.dtype) for t in MemorySink(part, part_layout(part)).tensors] == [
        (torch.Size([0, 3]), torch.int8),
        (torch.Size([0]), torch.bfloat16),
    ]


def test_threads_may_share_tensors_that_are_not_in_order() -> None:
    buffers = tuple(BufferSpec(name, DType.FLOAT32, (16, 8), "cpu") for name in "abcdef")
    part = Part(PartId(SaveId(1, "a"), 0), 1, "", "basic", None, buffers)
    tensors = [torch.full((8, 16), float(n)).t() for n in range(6)]
    source = MemorySource(part, tensors)
    layout = part_layout(part)
    messages = build_messages(layout.byte_offsets, [b.nbytes for b in buffers], 64)

    def is_right(message: Message) -> bool:
        target = np.empty(message.nbytes, np.uint8)
        source.read_into(message, target)
        (piece,) = message.slices
        return bool((target.view(np.float32) == piece.buffer).all())

    shuffled = random.Random(7).sample(messages * 200, 200 * len(messages))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(is_right, shuffled))
    finally:
        sys.setswitchinterval(interval)


def test_digests_are_those_of_the_buffers_however_the_messages_are_cut() -> None:
    sizes = (0, 3, 700, 64, 5000)
    buffers = tuple(BufferSpec(str(n), DType.UINT8, (n,), "cpu") for n in sizes)
    part = Part(PartId(SaveId(1, "a"), 0), 1, "", "basic", None, buffers)
    content = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in sizes]
    source = TensorSource(part, list(map(torch.from_numpy, content)))
    for max_nbytes in (1, 64, 999, 1 << 20):
        digests = BufferDigests(part, source.layout)
        for message in build_messages(source.layout.byte_offsets, sizes, max_nbytes):
            digests.take(message, source.content(message))
        assert digests.values() == [xxhash.xxh3_64_intdigest(one.data) for one in content]


@pytest.mark.gpu
def test_another_thread_reads_what_this_ones_stream_has_still_to_write() -> None:
    count = 1 << 26
    part = Part(
        PartId(SaveId(1, "a"), 0), 1, "", "basic", None,
        (BufferSpec("a", DType.FLOAT32, (count,), "cuda"),),
    )  # fmt: skip
    tensor = torch.zeros(count, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(100):
            tensor.add_(1.0)
        source = TensorSource(part, [tensor])
    (message,) = build_messages(source.layout.byte_offsets, [4 * count], 4 * count)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(source.content, message).result()

    assert bool((found.view(np.float32) == 100.0).all())
