from __future__ import annotations

import pytest
import torch

from benchmarks.common.states import TOY, Split, build_shards
from dist_ckpt_strategies.cli.bench_rank import Target


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("split", ["TP", "rows", "columns"])
def test_shards_of_any_division_make_up_the_same_state(split: Split, num_parts: int) -> None:
    whole = build_shards(TOY, 0, 1)
    parts = [build_shards(TOY, part, num_parts, split) for part in range(num_parts)]
    for array, *own in zip(whole, *parts, strict=True):
        assert all(one.tensor.is_contiguous() for one in own)
        joined = torch.cat([one.tensor for one in own], own[0].axis)
        assert torch.equal(joined, array.tensor)
    assert sum(shard.tensor.nbytes for shard in whole) == TOY.nbytes


def test_a_load_that_does_nothing_is_found_out_and_new_tensors_are_copied() -> None:
    wanted = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    held = wanted.clone()
    target = Target({"w": held})
    target.clear()
    with pytest.raises(ValueError, match=r"w: tape loaded other values than were saved"):
        target.check("tape")
    target.accept({"w": wanted, "more": torch.zeros(1)})
    target.check("tape")
    assert torch.equal(held, wanted)
