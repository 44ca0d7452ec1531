"""The sets in a real GPTModel with Megatron-Core's distributed optimizer, at other layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dist_ckpt_strategies.cli.demo.main import ParallelLayout
from dist_ckpt_strategies.config import Engine
from tests.golden.gpt import Trainee, gather_whole, parallel
from tests.golden.routes import Route, begin_rank, load_along, require_done
from tests.golden.sets import FLAT, RESHARDABLE, TP4, GoldenSet, differing
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

NUM_STORED_ROWS = 128


def load_with_optimizer(
    _rank: int, golden: GoldenSet, layout: ParallelLayout, route: Route
) -> list[str]:
    """Body of a rank: keys whose global tensors are not what was saved."""
    begin_rank(Engine.TENSORSTORE)
    with parallel(layout):
        trainee = Trainee.build(layout, NUM_STORED_ROWS)
        before = gather_whole(trainee.model.sharded_state_dict())
        assert "output_layer.weight" in differing(before, golden.tensors)
        loaded = load_along(route, trainee.state(is_loading=True), golden.checkpoint)
        trainee.take_over(loaded)
        after = gather_whole(trainee.state(is_loading=False))
        return differing(after, golden.tensors)


@pytest.mark.parametrize(
    ("layout", "route"),
    [
        (ParallelLayout(tp=1, pp=1, dp=2), Route.MEGATRON),
        (ParallelLayout(tp=4, pp=1, dp=1), Route.OURS_WRAPPED),
        (ParallelLayout(tp=1, pp=2, dp=2), Route.WRAPPED),
    ],
    ids=str,
)
def test_weights_and_optimizer_state_are_bit_identical_at_another_layout(
    reshardable: GoldenSet, layout: ParallelLayout, route: Route
) -> None:
    results = run_processes(
        layout.num_ranks, load_with_optimizer, reshardable, layout, route, timeout_s=120
    )

    assert require_done(results) == [[]] * layout.num_ranks


def load_weights(
    rank: int, golden: GoldenSet, layout: ParallelLayout, num_rows: int
) -> dict[str, torch.Tensor]:
    begin_rank(Engine.TENSORSTORE)
    with parallel(layout):
        model = Trainee.build(layout, num_rows).model
        asked: dict[str, Any] = {"model": model.sharded_state_dict()}
        loaded = load_along(Route.MEGATRON, asked, golden.checkpoint)
        model.load_state_dict(loaded["model"], strict=True)
        whole = gather_whole(model.sharded_state_dict())
        return whole if rank == 0 else {}


@pytest.mark.parametrize(("name", "num_rows"), [(TP4, 104), (RESHARDABLE, 128), (FLAT, 256)])
def test_weights_are_bit_identical_whatever_the_vocabularys_padding(
    unpacked: Callable[[str], GoldenSet], name: str, num_rows: int
) -> None:
    layout, golden = ParallelLayout(tp=4), unpacked(name)
    results = run_processes(4, load_weights, golden, layout, num_rows, timeout_s=120)

    found = require_done(results)[0]
    expected = {k: t for k, t in golden.tensors.items() if not k.startswith("optimizer.")}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        resized = torch.zeros((num_rows, 64), dtype=torch.bfloat16)
        num_kept = min(num_rows, NUM_STORED_ROWS)
        resized[:num_kept] = expected[key][:num_kept]
        expected[key] = resized
    assert differing(found, expected) == []
