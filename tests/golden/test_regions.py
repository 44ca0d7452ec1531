"""Arbitrary boxes of the stored arrays, which no parallel layout asks for."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from megatron.core import dist_checkpointing

from dist_ckpt_strategies.core.array import Region
from tests.golden.sets import GoldenSet, box_of, has_same_bits, share_of

pytestmark = pytest.mark.usefixtures("engine")

NUM_BOXES_PER_ARRAY = 3


def random_box(random_numbers: random.Random, shape: tuple[int, ...]) -> Region:
    """A box with at least one element; along each dim it is sometimes the whole extent."""
    offset, extent = [], []
    for size in shape:
        low, high = sorted(random_numbers.sample(range(size + 1), 2))
        if random_numbers.random() < 0.25:
            low, high = 0, size
        offset.append(low)
        extent.append(high - low)
    return Region(tuple(offset), tuple(extent))


def random_boxes(golden: GoldenSet, seed: int) -> Iterator[tuple[str, Region]]:
    random_numbers = random.Random(seed)
    for key, whole in golden.tensors.items():
        for _ in range(NUM_BOXES_PER_ARRAY):
            yield key, random_box(random_numbers, tuple(whole.shape))


@pytest.mark.parametrize("seed", range(4))
def test_a_random_box_of_every_array_loads_bit_exactly(golden: GoldenSet, seed: int) -> None:
    boxes = dict(enumerate(random_boxes(golden, seed)))
    asked = {n: box_of(key, golden.tensors[key], box) for n, (key, box) in boxes.items()}

    found = dist_checkpointing.load(asked, golden.checkpoint, validate_access_integrity=False)

    for number, (key, box) in boxes.items():
        expected = golden.tensors[key][box.slices()]
        assert has_same_bits(found[number], expected), (key, box)


def test_single_elements_load_bit_exactly(golden: GoldenSet) -> None:
    corners = {
        key: Region(tuple(n - 1 for n in whole.shape), (1,) * whole.ndim)
        for key, whole in golden.tensors.items()
    }
    asked = {key: box_of(key, golden.tensors[key], box) for key, box in corners.items()}

    found = dist_checkpointing.load(asked, golden.checkpoint, validate_access_integrity=False)

    for key, box in corners.items():
        assert has_same_bits(found[key], golden.tensors[key][box.slices()]), key


@pytest.mark.parametrize("num_shares", [2, 4, 8, 16])
def test_every_cut_along_every_axis_loads_bit_exactly(golden: GoldenSet, num_shares: int) -> None:
    wanted = {
        (key, dim, number): golden.tensors[key].chunk(num_shares, dim)[number]
        for key, whole in golden.tensors.items()
        for dim in range(whole.ndim)
        if whole.shape[dim] % num_shares == 0
        for number in (0, num_shares // 2, num_shares - 1)
    }
    asked = {
        str((key, dim, number)): share_of(key, golden.tensors[key], dim, number, num_shares)
        for key, dim, number in wanted
    }

    found = dist_checkpointing.load(asked, golden.checkpoint, validate_access_integrity=False)

    assert [name for name, t in wanted.items() if not has_same_bits(found[str(name)], t)] == []


def test_layers_load_one_by_one_through_a_prepended_axis(golden: GoldenSet) -> None:
    layers = {
        (key, layer): whole[layer]
        for key, whole in golden.tensors.items()
        if "decoder.layers." in key
        for layer in range(whole.shape[0])
    }
    asked = {
        str((key, layer)): dist_checkpointing.ShardedTensor.from_rank_offsets(
            key, torch.zeros_like(one), (0, layer, golden.info["layers"]), prepend_axis_num=1
        )
        for (key, layer), one in layers.items()
    }

    found = dist_checkpointing.load(asked, golden.checkpoint, validate_access_integrity=False)

    assert [name for name, t in layers.items() if not has_same_bits(found[str(name)], t)] == []
