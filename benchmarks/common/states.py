"""A state like a GPT's: small vectors and matrices, half of the layers float32, half bfloat16."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

GB = 10**9
_GRANULE = 32


@dataclass(frozen=True, slots=True)
class GptSize:
    """Dimensions of the model; a layer has twelve arrays of about 12 * hidden**2 elements."""

    num_layers: int
    hidden: int
    vocabulary: int

    def arrays(self) -> Iterator[tuple[str, tuple[int, ...], int, torch.dtype]]:
        """Key, shape, tensor-parallel axis and dtype of every array."""
        h = self.hidden
        yield "embedding.word_embeddings.weight", (self.vocabulary, h), 0, torch.float32
        for layer in range(self.num_layers):
            dtype = torch.bfloat16 if layer % 2 else torch.float32
            for name, shape, axis in (
                ("input_layernorm.weight", (h,), 0),
                ("input_layernorm.bias", (h,), 0),
                ("self_attention.linear_qkv.weight", (3 * h, h), 0),
                ("self_attention.linear_qkv.bias", (3 * h,), 0),
                ("self_attention.linear_proj.weight", (h, h), 1),
                ("self_attention.linear_proj.bias", (h,), 0),
                ("pre_mlp_layernorm.weight", (h,), 0),
                ("pre_mlp_layernorm.bias", (h,), 0),
                ("mlp.linear_fc1.weight", (4 * h, h), 0),
                ("mlp.linear_fc1.bias", (4 * h,), 0),
                ("mlp.linear_fc2.weight", (h, 4 * h), 1),
                ("mlp.linear_fc2.bias", (h,), 0),
            ):
                yield f"decoder.layers.{layer}.{name}", shape, axis, dtype
        yield "decoder.final_layernorm.weight", (h,), 0, torch.float32
        yield "decoder.final_layernorm.bias", (h,), 0, torch.float32

    @property
    def nbytes(self) -> int:
        """Of the whole state."""
        return sum(math.prod(shape) * dtype.itemsize for _, shape, _, dtype in self.arrays())

    @property
    def num_arrays(self) -> int:
        """Of the whole state."""
        return sum(1 for _ in self.arrays())


TOY = GptSize(num_layers=2, hidden=32, vocabulary=64)


def gpt_size(nbytes: int) -> GptSize:
    """A model of 24 layers, 291 arrays, whose whole state takes about ``nbytes``."""
    sizes = [GptSize(24, hidden, 8192) for hidden in range(_GRANULE, 8192, _GRANULE)]
    return min(sizes, key=lambda size: abs(size.nbytes - nbytes))


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``num_parts`` equal parts of an array along ``axis``."""

    key: str
    axis: int
    part: int
    num_parts: int
    tensor: torch.Tensor


Split = Literal["TP", "rows", "columns"]
"""How arrays are divided: as tensor parallelism does, or all along the first or the last axis."""


def build_shards(
    size: GptSize, part: int, num_parts: int, split: Split = "TP"
) -> tuple[Shard, ...]:
    """One part of every array; the values of the whole are the same for every division.

    Takes the memory of one whole array beside the parts.
    """
    generator = torch.Generator().manual_seed(0)
    shards = []
    for key, shape, tensor_parallel_axis, dtype in size.arrays():
        axis = {"rows": 0, "columns": len(shape) - 1}.get(split, tensor_parallel_axis)
        whole = torch.empty(shape, dtype=dtype).normal_(generator=generator)
        own = whole.chunk(num_parts, axis)[part].clone(memory_format=torch.contiguous_format)
        shards.append(Shard(key, axis, part, num_parts, own))
    return tuple(shards)
