"""The vocabulary's padding grown or shrunk since the save, with ``allow_shape_mismatch``.

The sets store 128 rows, of which 100 belong to the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException

from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.errors import ShapeMismatchError
from tests.golden.routes import Route, begin_rank, load_along, require_done
from tests.golden.sets import RESHARDABLE, TP4, GoldenSet, has_same_bits, poisoned
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

NUM_REAL_ROWS = 100


def padded_keys(golden: GoldenSet) -> list[str]:
    facts = golden.info["tensors"]
    return [key for key in golden.tensors if facts[key]["allow_shape_mismatch"]]


def padded_share(
    golden: GoldenSet, key: str, num_rows: int, rank: int, size: int, *, is_flexible: bool = True
) -> Any:
    whole = golden.tensors[key]
    data = poisoned((num_rows // size, *whole.shape[1:]), whole.dtype)
    return ShardedTensor.from_rank_offsets(
        key, data, (0, rank, size), allow_shape_mismatch=is_flexible
    )


def load_padded(
    rank: int, golden: GoldenSet, engine: Engine, num_rows: int
) -> dict[tuple[Route, str], torch.Tensor]:
    _, size = begin_rank(engine)
    found: dict[tuple[Route, str], torch.Tensor] = {}
    for route in Route:
        asked = {k: padded_share(golden, k, num_rows, rank, size) for k in padded_keys(golden)}
        loaded = load_along(route, {"v": asked}, golden.checkpoint)["v"]
        found |= {(route, key): tensor.clone() for key, tensor in loaded.items()}
    return found


def expected_rows(golden: GoldenSet, key: str, num_rows: int) -> torch.Tensor:
    stored = golden.tensors[key]
    expected = torch.zeros((num_rows, *stored.shape[1:]), dtype=stored.dtype)
    num_kept = min(num_rows, stored.shape[0])
    expected[:num_kept] = stored[:num_kept]
    return expected


@pytest.mark.parametrize("engine_used", list(Engine))
@pytest.mark.parametrize(
    ("size", "num_rows"),
    [
        pytest.param(2, 104, id="shrunk at TP2"),
        pytest.param(2, 160, id="grown at TP2"),
        pytest.param(4, 256, id="grown at TP4, two ranks wholly beyond the stored rows"),
    ],
)
@pytest.mark.parametrize("name", [TP4, RESHARDABLE])
def test_real_rows_are_exact_and_padding_is_zeros(
    unpacked: Callable[[str], GoldenSet], name: str, size: int, num_rows: int, engine_used: Engine
) -> None:
    golden = unpacked(name)

    results = require_done(run_processes(size, load_padded, golden, engine_used, num_rows))

    keys = padded_keys(golden)
    assert len(keys) == (2 if name == TP4 else 8)
    for route, key in results[0]:
        found = torch.cat([result[route, key] for result in results])
        assert has_same_bits(found, expected_rows(golden, key, num_rows)), (route, key)
        real = golden.tensors[key][:NUM_REAL_ROWS]
        assert has_same_bits(found[:NUM_REAL_ROWS], real), (route, key)
    assert len(results[0]) == len(keys) * len(Route)


def load_rigid(rank: int, golden: GoldenSet, num_rows: int) -> str:
    _, size = begin_rank(Engine.TENSORSTORE)
    key = "output_layer.weight"
    asked = padded_share(golden, key, num_rows, rank, size, is_flexible=False)
    with pytest.raises(ShapeMismatchError) as found:
        load_along(Route.MEGATRON, {"w": asked}, golden.checkpoint)
    assert found.errisinstance(CheckpointingException)
    return str(found.value)


@pytest.mark.parametrize("num_rows", [104, 160])
def test_another_size_is_refused_where_no_mismatch_is_allowed(
    tp4: GoldenSet, num_rows: int
) -> None:
    for message in require_done(run_processes(2, load_rigid, tp4, num_rows)):
        assert "output_layer.weight: shape (128, 64) in the checkpoint" in message
        assert f"({num_rows}, 64) requested" in message
