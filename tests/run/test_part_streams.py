"""Memory that parts land in."""

from __future__ import annotations

import torch

from dist_ckpt_strategies.run.part_streams import MemorySink
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
