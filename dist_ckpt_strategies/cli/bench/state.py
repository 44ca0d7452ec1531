"""A state like a GPT's, in equal parts: matrices and small vectors, of two dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import xxhash

_NUM_LAYERS = 24
_NUM_ROWS = {
    "self_attention.linear_qkv": 3,
    "self_attention.linear_proj": 1,
    "mlp.linear_fc1": 4,
    "mlp.linear_fc2": 4,
}
"""Matrices of a layer, of as many times ``hidden`` rows."""
_NORMS = ("input_layernorm", "pre_mlp_layernorm")
_PARAMETERS_PER_LAYER = sum(_NUM_ROWS.values())
_MEAN_ITEMSIZE = 3
"""Half of the layers are float32, half bfloat16."""


@dataclass(frozen=True, slots=True)
class Part:
    """This rank's part of an array, which is divided by rows.

    Attributes:
        key: name of the array.
        tensor: the part.
        digest: of what is saved.
    """

    key: str
    tensor: torch.Tensor
    digest: int

    def has_come_back(self) -> bool:
        """Whether the tensor holds what was saved."""
        return _digest(self.tensor) == self.digest


def build_parts(nbytes: int, global_rank: int, num_ranks: int) -> tuple[Part, ...]:
    """One part of every array, of a state of about ``nbytes`` in all parts together."""
    generator = torch.Generator().manual_seed(global_rank)
    width = _width(nbytes, num_ranks)
    parts = []
    for key, shape, dtype in _arrays(width):
        rows = (shape[0] // num_ranks, *shape[1:])
        tensor = torch.empty(rows, dtype=dtype).normal_(generator=generator)
        parts.append(Part(key, tensor, _digest(tensor)))
    return tuple(parts)


def _width(nbytes: int, num_ranks: int) -> int:
    """Columns of the matrices: a multiple of the ranks, so that all parts are equal."""
    wanted = math.sqrt(nbytes / (_NUM_LAYERS * _PARAMETERS_PER_LAYER * _MEAN_ITEMSIZE))
    return max(1, round(wanted / num_ranks)) * num_ranks


def _arrays(width: int) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """Key, shape and dtype of every array."""
    for layer in range(_NUM_LAYERS):
        dtype = torch.bfloat16 if layer % 2 else torch.float32
        for name, times in _NUM_ROWS.items():
            yield f"decoder.layers.{layer}.{name}.weight", (times * width, width), dtype
        for name in _NORMS:
            for kind in ("weight", "bias"):
                yield f"decoder.layers.{layer}.{name}.{kind}", (width,), dtype


def _digest(tensor: torch.Tensor) -> int:
    return int(xxhash.xxh3_64_intdigest(tensor.view(-1).view(torch.uint8).numpy().data))
