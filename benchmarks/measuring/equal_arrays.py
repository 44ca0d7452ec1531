"""A state of arrays of equal size, of which there can be more, or larger ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.measuring.gpt_state import Shard

_NUM_COLUMNS = 256
_ITEMSIZE = 4


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
