"""Every array of every set, as a full tensor, in one process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, serialization

import dist_ckpt_strategies
from dist_ckpt_strategies.core.array import Region
from tests.golden.sets import GoldenSet, box_of, differing, has_same_bits


def wanted(golden: GoldenSet, *, has_data: bool = True) -> dict[str, ShardedTensor]:
    return {
        key: box_of(key, whole, Region.whole(tuple(whole.shape)), has_data=has_data)
        for key, whole in golden.tensors.items()
    }


def plain_tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    """What load_plain_tensors gives, without the common state that Megatron-Core adds to it."""
    found = dist_checkpointing.load_plain_tensors(checkpoint)
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.usefixtures("engine")
def test_every_array_loads_bit_exactly_with_load_plain_tensors(golden: GoldenSet) -> None:
    found = plain_tensors(golden.checkpoint)

    assert differing(found, golden.tensors) == []
    assert len(found) == len(golden.info["tensors"])


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("has_data", [True, False], ids=["into data", "without data"])
def test_every_array_loads_bit_exactly_with_megatron_cores_load(
    golden: GoldenSet, *, has_data: bool
) -> None:
    found = dist_checkpointing.load(
        {"arrays": wanted(golden, has_data=has_data)},
        golden.checkpoint,
        validate_access_integrity=False,
    )

    assert differing(found["arrays"], golden.tensors) == []


@pytest.mark.usefixtures("engine")
def test_every_array_loads_bit_exactly_with_our_load(golden: GoldenSet) -> None:
    found = dist_ckpt_strategies.load(
        {"arrays": wanted(golden)}, golden.checkpoint, validate_access_integrity=False
    )

    assert isinstance(found, dict)
    assert differing(found["arrays"], golden.tensors) == []


@pytest.mark.usefixtures("engine")
def test_the_metadata_names_every_array_with_its_shape_and_dtype(golden: GoldenSet) -> None:
    found = dist_checkpointing.load_tensors_metadata(golden.checkpoint)

    facts = {key: (tuple(t.global_shape), t.dtype) for key, t in found.items()}
    assert facts == {key: (tuple(t.shape), t.dtype) for key, t in golden.tensors.items()}
    for tensor in found.values():
        assert tensor.data is None
        assert tuple(tensor.local_shape) == tuple(tensor.global_shape)
        assert set(tensor.global_offset) == {0}
        assert set(tensor.axis_fragmentations) == {1}


@pytest.mark.usefixtures("engine")
def test_the_sharded_metadata_names_every_array_and_every_object(golden: GoldenSet) -> None:
    found = serialization.load_sharded_metadata(golden.checkpoint)

    assert found.keys() == golden.tensors.keys() | golden.objects.keys()


@pytest.mark.usefixtures("engine")
def test_what_the_sharded_metadata_names_can_be_loaded(golden: GoldenSet) -> None:
    asked = serialization.load_sharded_metadata(golden.checkpoint)

    found = dist_checkpointing.load(asked, golden.checkpoint, validate_access_integrity=False)

    tensors = {key: found[key] for key in golden.tensors}
    assert differing(tensors, golden.tensors) == []
    assert found.keys() >= golden.objects.keys()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("prefix", ["optimizer.state.exp_avg.", "decoder.", "embedding"])
def test_removing_a_prefix_leaves_every_other_array_as_it_was(
    reshardable: GoldenSet, prefix: str, tmp_path: Path
) -> None:
    copy = str(shutil.copytree(reshardable.checkpoint, tmp_path / "copy"))

    dist_checkpointing.remove_sharded_tensors(copy, prefix)

    kept = {k: t for k, t in reshardable.tensors.items() if not k.startswith(prefix)}
    assert len(kept) < len(reshardable.tensors)
    assert differing(plain_tensors(copy), kept) == []
    left = serialization.load_sharded_metadata(copy)
    objects = {k for k in reshardable.objects if not k.startswith(prefix)}
    assert left.keys() == kept.keys() | objects
    assert not [path for path in Path(copy).glob(f"{prefix}*/**/*") if path.is_file()]


@pytest.mark.usefixtures("engine")
def test_removing_an_array_removes_the_locks_that_its_writer_left(
    flat: GoldenSet, tmp_path: Path
) -> None:
    copy = str(shutil.copytree(flat.checkpoint, tmp_path / "copy"))
    assert list(Path(copy).glob("optimizer*.sync"))

    dist_checkpointing.remove_sharded_tensors(copy, "optimizer")

    assert not list(Path(copy).glob("optimizer*"))


def test_a_set_opens_with_tensorstore_alone(golden: GoldenSet) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    for key, expected in golden.tensors.items():
        path = str(Path(golden.checkpoint) / key)
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}
        values = tensorstore.open(spec, read=True).result().read().result()
        is_bfloat16 = expected.dtype == torch.bfloat16
        bits = torch.from_numpy(values.view("int16" if is_bfloat16 else values.dtype))
        assert has_same_bits(bits.view(expected.dtype), expected), key
