"""States to save: like a GPT's (small vectors, matrices, two dtypes), or arrays of equal size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

GB = 10**9
_NUM_ARRAYS_PER_LAYER = 12
_GRANULE = 32
_NUM_COLUMNS = 256
_ITEMSIZE = 4


@dataclass(frozen=True, slots=True)
class GptSize:
    """Dimensions of the model.

    Attributes:
        num_layers: transformer layers, of twelve arrays each.
        hidden: width; the matrices of a layer have 12 * hidden**2 elements.
        vocabulary: rows of the embedding.
    """

    num_layers: int
    hidden: int
    vocabulary: int

    @property
    def num_arrays(self) -> int:
        """How many arrays the state has."""
        return self.num_layers * _NUM_ARRAYS_PER_LAYER + 3


@dataclass(frozen=True, slots=True)
class Shard:
    """One part of an array, or all of it.

    Attributes:
        key: name of the array.
        axis: dim along which the array is divided evenly.
        part: which part this is; counting starts at 0.
        num_parts: how many there are.
        tensor: the part.
    """

    key: str
    axis: int
    part: int
    num_parts: int
    tensor: torch.Tensor


class Split(StrEnum):
    """Along which dim the arrays are divided."""

    TENSOR_PARALLEL = "TP"
    ROWS = "rows"
    COLUMNS = "columns"

    def axis(self, num_dims: int, tensor_parallel_axis: int) -> int:
        """The dim; a vector has but one."""
        match self:
            case Split.TENSOR_PARALLEL:
                return tensor_parallel_axis
            case Split.ROWS:
                return 0
            case Split.COLUMNS:
                return num_dims - 1


@dataclass(frozen=True, slots=True)
class Division:
    """How the state is divided among ranks: along which dim, into how many equal parts."""

    split: Split
    num_parts: int


def gpt_size(nbytes: int) -> GptSize:
    """A model of 24 layers, 291 arrays, whose state takes about ``nbytes``, all parts together."""
    sizes = [GptSize(24, hidden, 8192) for hidden in range(_GRANULE, 8192, _GRANULE)]
    return min(sizes, key=lambda size: abs(_matrix_nbytes(size) - nbytes))


def build_shards(size: GptSize, part: int, num_parts: int) -> tuple[Shard, ...]:
    """One part of every array, with values of its own, the same in every process.

    Half of the layers are float32 and half bfloat16, as main parameters and weights would be.
    """
    generator = torch.Generator().manual_seed(part)
    shards = []
    for key, shape, axis, dtype in _arrays(size):
        local = list(shape)
        local[axis] //= num_parts
        tensor = torch.empty(local, dtype=dtype).normal_(generator=generator)
        shards.append(Shard(key, axis, part, num_parts, tensor))
    return tuple(shards)


def build_slices(size: GptSize, part: int, division: Division) -> tuple[Shard, ...]:
    """One part of every array, cut out of values that are the same however the state is divided.

    Takes the memory of one whole array beside the parts.
    """
    generator = torch.Generator().manual_seed(0)
    shards = []
    for key, shape, own_axis, dtype in _arrays(size):
        axis = division.split.axis(len(shape), own_axis)
        whole = torch.empty(shape, dtype=dtype).normal_(generator=generator)
        tensor = whole.chunk(division.num_parts, axis)[part].clone(
            memory_format=torch.contiguous_format
        )
        shards.append(Shard(key, axis, part, division.num_parts, tensor))
    return tuple(shards)


def _matrix_nbytes(size: GptSize) -> int:
    """Nearly all of the bytes: the matrices, at three bytes per element on average."""
    in_layers = size.num_layers * 12 * size.hidden**2 * 3
    return in_layers + size.vocabulary * size.hidden * 4


def _arrays(size: GptSize) -> Iterator[tuple[str, tuple[int, ...], int, torch.dtype]]:
    """Key, shape, divided dim and dtype of every array."""
    h = size.hidden
    yield "embedding.word_embeddings.weight", (size.vocabulary, h), 0, torch.float32
    for layer in range(size.num_layers):
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


@dataclass(frozen=True, slots=True)
class Extent:
    """How much there is of everything.

    Attributes:
        nbytes: of all arrays together, about.
        num_arrays: of equal size.
        num_ranks: each of which has an equal part of every array.
    """

    nbytes: int
    num_arrays: int
    num_ranks: int


def build_equal_shards(extent: Extent, part: int) -> tuple[Shard, ...]:
    """One part of every array, with values of its own, the same in every process."""
    generator = torch.Generator().manual_seed(part)
    wanted = extent.nbytes / (extent.num_arrays * extent.num_ranks * _NUM_COLUMNS * _ITEMSIZE)
    shape = (max(1, round(wanted)), _NUM_COLUMNS)
    return tuple(
        Shard(
            f"layers.{number}.weight",
            0,
            part,
            extent.num_ranks,
            torch.empty(shape).normal_(generator=generator),
        )
        for number in range(extent.num_arrays)
    )
