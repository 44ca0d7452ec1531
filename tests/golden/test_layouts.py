"""The sets at other parallel layouts than they were saved in, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies.config import Engine
from tests.golden.routes import Route, begin_rank, load_along, require_done
from tests.golden.sets import NAMES, TP4, GoldenSet, has_same_bits, poisoned
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

State = dict[str, Any]


def as_saved(golden: GoldenSet, rank: int, size: int) -> State:
    """The tensor-parallel cut that the writer noted, at this number of ranks."""
    found = {}
    for key, whole in golden.tensors.items():
        facts = golden.info["tensors"][key]
        first = facts["prepend_axis_num"]
        cut = [d for d in range(first, whole.ndim) if facts["axis_fragmentations"][d] > 1]
        found[key] = cut_along(key, whole, cut[0] if cut else None, rank, size)
    return found


def along_the_first_axis(golden: GoldenSet, rank: int, size: int) -> State:
    return {key: cut_along(key, whole, 0, rank, size) for key, whole in golden.tensors.items()}


def along_the_last_axis(golden: GoldenSet, rank: int, size: int) -> State:
    return {
        k: cut_along(k, whole, whole.ndim - 1, rank, size) for k, whole in golden.tensors.items()
    }


def replicated(golden: GoldenSet, rank: int, size: int) -> State:
    return {key: cut_along(key, whole, None, rank, size) for key, whole in golden.tensors.items()}


def in_uneven_shares(golden: GoldenSet, rank: int, size: int) -> State:
    """Shares of every length along the longest axis, some of them empty."""
    found = {}
    for key, whole in golden.tensors.items():
        dim = max(range(whole.ndim), key=lambda d, n=whole.shape: n[d])  # type: ignore[misc]
        weights = [n * n for n in range(size)]
        ends = [whole.shape[dim] * sum(weights[: n + 1]) // sum(weights) for n in range(size)]
        start, end = (0, *ends)[rank], ends[rank]
        shape = (*whole.shape[:dim], end - start, *whole.shape[dim + 1 :])
        offset = tuple(start if d == dim else 0 for d in range(whole.ndim))
        if end > start:
            data = poisoned(shape, whole.dtype)
            found[key] = ShardedTensor(
                key, data, whole.dtype, shape, tuple(whole.shape), offset, None
            )
    return found


def layer_by_layer(golden: GoldenSet, rank: int, size: int) -> State:
    """A pipeline's cut: each rank has some of the layers, one tensor each, and no other array."""
    num_layers = golden.info["layers"]
    mine = range(rank * num_layers // size, (rank + 1) * num_layers // size)
    return {
        f"{key} {layer}": ShardedTensor.from_rank_offsets(
            key,
            poisoned(whole.shape[1:], whole.dtype),
            (0, layer, num_layers),
            prepend_axis_num=1,
        )
        for key, whole in golden.tensors.items()
        if "decoder.layers." in key
        for layer in mine
    }


CUTS = (
    as_saved,
    along_the_first_axis,
    along_the_last_axis,
    replicated,
    in_uneven_shares,
    layer_by_layer,
)


def cut_along(key: str, whole: torch.Tensor, dim: int | None, rank: int, size: int) -> Any:
    """One share along a dim; where it does not divide, the whole array on every rank."""
    if dim is None or whole.shape[dim] % size:
        return ShardedTensor.from_rank_offsets(
            key, poisoned(whole.shape, whole.dtype), replica_id=rank
        )
    shape = list(whole.shape)
    shape[dim] //= size
    data = poisoned(shape, whole.dtype)
    return ShardedTensor.from_rank_offsets(key, data, (dim, rank, size))


def load_every_cut(rank: int, golden: GoldenSet, engine: Engine) -> list[str]:
    """Body of a rank: the routes, cuts and keys that came out wrong."""
    _, size = begin_rank(engine)
    wrong = []
    for route in Route:
        for cut in CUTS:
            loaded = load_along(route, {"cut": cut(golden, rank, size)}, golden.checkpoint)
            shards = cut(golden, rank, size)
            wrong += [f"{route}, {cut.__name__}: {key}" for key in wrong_of(loaded, golden, shards)]
    return wrong


def wrong_of(loaded: State, golden: GoldenSet, shards: State) -> list[str]:
    found = loaded["cut"] if shards else {}
    if found.keys() != shards.keys():
        return sorted(found.keys() ^ shards.keys())
    return [
        name
        for name, shard in shards.items()
        if not has_same_bits(found[name], golden.tensors[shard.key][shard.global_slice()])
    ]


@pytest.mark.parametrize(
    ("name", "size", "engine"),
    [*((name, 4, Engine.TENSORSTORE) for name in NAMES), (TP4, 2, Engine.ZARR)],
)
def test_every_set_loads_bit_exactly_at_other_layouts(
    unpacked: Callable[[str], GoldenSet], name: str, size: int, engine: Engine
) -> None:
    results = run_processes(size, load_every_cut, unpacked(name), engine)

    assert require_done(results) == [[]] * size
