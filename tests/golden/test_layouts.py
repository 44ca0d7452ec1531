"""The sets cut at random over real ranks, along every route."""

from collections.abc import Callable

import pytest

from dist_ckpt_strategies.config import Engine
from tests.golden.sets import (
    NAMES,
    TP4,
    GoldenSet,
    Route,
    load_along,
    register_engine,
)
from tests.support.ranks import done_by
from tests.support.sharding import Cut, at_random, differences, no_data, on_grid, state_of, zeros

pytestmark = pytest.mark.multiprocess


def cuts(golden: GoldenSet, seed: int, size: int) -> list[Cut]:
    """In regions of all sizes; where layers are stacked, by layer as pipeline stages do."""
    found = []
    for key, whole in golden.tensors.items():
        shape, dtype = tuple(whole.shape), whole.dtype
        if seed == 0 and "decoder.layers." in key:
            grid = (shape[0], *[1] * (len(shape) - 1))
            found.append(on_grid(key, shape, grid, size=size, dtype=dtype, num_prepended=1))
        else:
            found.append(at_random(key, shape, 1 + 4 * seed, size=size, dtype=dtype, seed=seed))
    return found


def load_every_cut(rank: int, golden: GoldenSet, engine: Engine, size: int) -> list[str]:
    """Body of a rank: the routes and keys that came out wrong."""
    register_engine(engine)
    wrong = []
    for route in Route:
        for seed, data in enumerate((zeros, no_data)):
            asked = cuts(golden, seed, size)
            found = load_along(route, state_of(rank, asked, data), golden.checkpoint)
            names = differences(rank, asked, found, golden.part_of)
            wrong += [f"{route}, seed {seed}: {name}" for name in names]
    return wrong


@pytest.mark.parametrize(
    ("name", "size", "engine"),
    [*((name, 4, Engine.TENSORSTORE) for name in NAMES), (TP4, 2, Engine.ZARR)],
)
def test_every_set_loads_bit_exactly_at_other_layouts(
    unpacked: Callable[[str], GoldenSet], name: str, size: int, engine: Engine
) -> None:
    assert done_by(size, load_every_cut, unpacked(name), engine, size) == [[]] * size
