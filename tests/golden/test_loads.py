"""Every array, object and common state of every set, through both loads; and by several ranks."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject

import dist_ckpt_strategies
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy
from tests.golden.sets import NAMES, TP4, GoldenSet, Route, differing, load_along, register
from tests.local.clique_worlds import described
from tests.support.ranks import done_by
from tests.support.sharding import Cut, at_random, differences, no_data, on_grid, state_of, zeros

both_loads = pytest.mark.parametrize("load", [dist_checkpointing.load, dist_ckpt_strategies.load])
UNCHECKED = {"validate_access_integrity": False}


def arrays_of(golden: GoldenSet, *, has_data: bool) -> dict[str, Any]:
    cuts = [
        on_grid(key, tuple(whole.shape), (1,) * whole.ndim, size=1, dtype=whole.dtype)
        for key, whole in golden.tensors.items()
    ]
    state = state_of(0, cuts, zeros if has_data else no_data)
    return {shard.key: shard for shard in state.values()}


def objects_of(golden: GoldenSet) -> dict[str, Any]:
    names = {key: ObjectId.parse(key) for key in golden.objects}
    return {
        key: ShardedObject(name.key, None, name.shape, name.offset)
        for key, name in names.items()
        if name is not None
    }


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("has_data", [True, False], ids=["into data", "without data"])
@both_loads
@pytest.mark.slow
def test_arrays_objects_and_common_state_are_what_was_saved(
    golden: GoldenSet, load: Any, *, has_data: bool
) -> None:
    allowed = set(torch.serialization.get_safe_globals())
    asked = {"arrays": arrays_of(golden, has_data=has_data), "objects": objects_of(golden)}
    found = load(asked, golden.checkpoint, **UNCHECKED)
    common = TorchCommonLoadStrategy().load_common(golden.checkpoint)

    assert differing(found["arrays"], golden.tensors) == []
    saved = {key: described(value) for key, value in golden.objects.items()}
    assert {key: described(value) for key, value in found["objects"].items()} == saved
    assert found.keys() == common.keys() | asked.keys()
    assert described({name: found[name] for name in common}) == described(dict(common))
    info = json.loads((golden.folder / "info.json").read_text())  # what the writer noted
    assert (common["iteration"], common["args"]["note"]) == (info["steps"], "été")
    assert Namespace in allowed  # others allowed it; a load leaves their list alone
    assert set(torch.serialization.get_safe_globals()) == allowed


@pytest.mark.usefixtures("registered")
def test_metadata_names_everything_and_what_it_names_can_be_loaded(golden: GoldenSet) -> None:
    tensors = dist_checkpointing.load_tensors_metadata(golden.checkpoint)
    values = {key: (tuple(t.global_shape), t.dtype) for key, t in tensors.items()}
    assert values == {key: (tuple(t.shape), t.dtype) for key, t in golden.tensors.items()}

    asked = serialization.load_sharded_metadata(golden.checkpoint)
    assert asked.keys() == golden.tensors.keys() | golden.objects.keys()
    found = dist_checkpointing.load(asked, golden.checkpoint, **UNCHECKED)
    assert differing({key: found[key] for key in golden.tensors}, golden.tensors) == []
    assert found.keys() >= golden.objects.keys()


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("prefix", ["optimizer", "decoder."])
def test_removing_a_prefix_leaves_everything_else_as_it_was(
    flat: GoldenSet, prefix: str, tmp_path: Path
) -> None:
    copy = str(shutil.copytree(flat.checkpoint, tmp_path / "copy"))

    dist_checkpointing.remove_sharded_tensors(copy, prefix)

    kept = {k: t for k, t in flat.tensors.items() if not k.startswith(prefix)}
    objects = {k for k in flat.objects if not k.startswith(prefix)}
    found = dist_checkpointing.load_plain_tensors(copy)
    assert differing({k: v for k, v in found.items() if isinstance(v, torch.Tensor)}, kept) == []
    assert serialization.load_sharded_metadata(copy).keys() == kept.keys() | objects
    left = [path for path in Path(copy).glob(f"{prefix}*") if path.is_file() or any(path.iterdir())]
    assert left == [], "the locks of its writer go, too"


# Cut at random over real ranks, along every route


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


def load_every_cut(rank: int, golden: GoldenSet, size: int) -> list[str]:
    """Body of a rank: the routes and keys that came out wrong."""
    register()
    wrong = []
    for route in Route:
        for seed, data in enumerate((zeros, no_data)):
            asked = cuts(golden, seed, size)
            found = load_along(route, state_of(rank, asked, data), golden.checkpoint)
            names = differences(rank, asked, found, golden.part_of)
            wrong += [f"{route}, seed {seed}: {name}" for name in names]
    return wrong


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "size"), [*((name, 4) for name in NAMES), (TP4, 2)])
def test_every_set_loads_bit_exactly_at_other_layouts(
    unpacked: Callable[[str], GoldenSet], name: str, size: int
) -> None:
    assert done_by(size, load_every_cut, unpacked(name), size) == [[]] * size
