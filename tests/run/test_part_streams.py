"""Memory that parts land in."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from dist_ckpt_strategies.plan.messages import Message, build_messages
from dist_ckpt_strategies.run.part_streams import MemorySink, MemorySource
from dist_ckpt_strategies.spec.dtype import DType
from dist_ckpt_strategies.spec.part import BufferSpec, Part, PartId, SaveId
from dist_ckpt_strategies.storage.part_format import part_layout


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
