"""Checkpoints that Megatron-Core and this package saved on four ranks, in every other format."""

import json
import os
import shutil
import tracemalloc
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_torch_dist

import dist_ckpt_strategies
from dist_ckpt_strategies import ConvertOptions, convert, diff
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.device import as_bytes
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError, StorageError
from tests.support.checkpoints import copied, write_marker
from tests.support.entries import prepare
from tests.support.layouts import (
    empties,
    irregular,
    irregular_otherwise,
    scattered,
    scattered_otherwise,
)
from tests.support.ranks import allow_torch_dist, run_processes
from tests.support.sharding import (
    ALL_DTYPES,
    Cut,
    differences,
    on_grid,
    same_bits,
    state_of,
    whole,
    zeros,
)
from tests.tools.all_formats import BACKENDS, FORMATS, saved_by

pytestmark = pytest.mark.multiprocess

PAIRS = [("zarr@1", "torch_dist"), ("torch_dist", "zarr@1"), ("torch_dist", "zarr@3")]
PAIRS += [(source, "pack") for source in FORMATS]
"""What is read does not depend on the writer; packs go to both kinds of Zarr in ``saved_by``."""
TINY = ConvertOptions(max_memory_bytes=1, max_file_bytes=2000)
INDEX = "model.safetensors.index.json"
NOT_IN_SAFETENSORS = (torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
PLAIN_KEYS = ("x.torch.float32", "x.torch.int64", "x.torch.bool")
"""Arrays that zarr-python reads, whatever their format."""

OF_OPTIMIZER = ("optimizer.state.param.w", "chained_0.optimizer.state.param.w", "optimizer/w/step")


def on_grids(grid: tuple[int, ...]) -> list[Cut]:
    """An array of each dtype, by the name z where safetensors lack it, and an optimizer's."""
    names = {d: f"{'z' if d in NOT_IN_SAFETENSORS else 'x'}.{d}" for d in ALL_DTYPES}
    arrays = [on_grid(name, (12, 8), grid, dtype=dtype) for dtype, name in names.items()]
    return arrays + [on_grid(key, (12, 8), grid) for key in OF_OPTIMIZER]


def saved_cuts() -> list[Cut]:
    return [*on_grids((2, 2)), *scattered(), *irregular()]


def wanted_cuts() -> list[Cut]:
    return [*on_grids((4, 1)), *scattered_otherwise(), *irregular_otherwise()]


def objects_of(rank: int, *, filled: bool) -> dict[str, Any]:
    values = {"plain": {"rank": rank, "list": [1, 2.5]}, "tensors": {"t": torch.arange(5) + rank}}
    return {
        name: ShardedObject(f"o.{name}", value if filled else None, (4,), (rank,))
        for name, value in values.items()
    }


def whole_state(rank: int, to: str) -> dict[str, Any]:
    cuts = saved_cuts() + ([] if to == "torch_dist" else empties())
    return state_of(rank, cuts) | objects_of(rank, filled=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same state in each format, saved by four ranks; not to be changed."""
    return saved_by(4, whole_state, tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def converted(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of them in each format."""
    root = tmp_path_factory.mktemp("converted")
    for source, to in PAIRS:
        convert(saved / source, root / f"{source} {to}", to)
    return root


def load_all(rank: int, root: Path) -> None:
    allow_torch_dist()
    prepare(60)
    for source, to in PAIRS:
        if to == "zarr@3":  # which no load reads
            continue
        path = root / f"{source} {to}"
        with cpu_stand_ins():
            wanted = state_of(rank, wanted_cuts(), zeros) | objects_of(rank, filled=False)
            loaded = dist_checkpointing.load(wanted, str(path))
        assert differences(rank, wanted_cuts(), loaded) == [], path
        for name, expected in objects_of(rank, filled=True).items():
            assert repr(loaded[name]) == repr(expected.data), path
        assert loaded["iteration"] == 7, path


def test_a_converted_checkpoint_equals_its_source_and_loads_in_another_layout(
    saved: Path, converted: Path
) -> None:
    for source, to in PAIRS:
        report = diff(saved / source, converted / f"{source} {to}")
        assert report.is_equal, (source, to, report)
        assert report.num_objects == 8
    assert run_processes(4, load_all, converted, timeout_s=300) == [None] * 4


def test_open_gives_the_arrays_objects_and_common_state_of_every_format(saved: Path) -> None:
    for name, backend in BACKENDS.items():
        cuts = saved_cuts() + ([] if name == "torch_dist" else empties())
        opened = dist_ckpt_strategies.open(saved / name)
        assert opened.format == backend
        assert opened.identity
        assert sorted(opened) == list(opened) == sorted(cut.key for cut in cuts)
        for cut in cuts:
            array, expected = opened[cut.key], whole(cut)
            assert same_bits(array.torch(), expected), cut.key
            assert (array.shape, array.ndim) == (cut.shape, len(cut.shape))
            assert array.dtype.name == str(cut.dtype).removeprefix("torch.")
            part = tuple(slice(n // 3, None) for n in cut.shape)
            raw = np.ascontiguousarray(array[part]).reshape(-1).view(np.uint8)
            assert raw.tobytes() == bytes(as_bytes(expected[part].contiguous()).numpy())
        of_last_rank = objects_of(3, filled=True)
        assert len(opened.objects) == 8
        assert repr(opened.objects["o.tensors/shard_3_4"]) == repr(of_last_rank["tensors"].data)
        assert opened.common["iteration"] == 7


def blocks_of(root: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in packs."""
    found = []
    for path in root.glob("packs/*/*"):
        with safe_open(path, "pt") as file:
            found += [(key, tuple(file.get_slice(key).get_shape())) for key in file.keys()]
    return found


def test_the_shards_stay_the_chunks(saved: Path, converted: Path) -> None:
    """All were saved as 6 x 4 elements."""
    keys = [cut.key for cut in on_grids((2, 2))]
    places = [saved / name for name in ("zarr@1", "zarr@3")]
    for root in (*places, *(converted / f"torch_dist {to}" for to in ("zarr@1", "zarr@3"))):
        arrays = [zarr.open_array(root / key, mode="r") for key in PLAIN_KEYS]
        assert {array.chunks for array in arrays} == {(6, 4)}
    metadata: Any = FileSystemReader(converted / "zarr@1 torch_dist").read_metadata()
    for key in keys:
        shards = metadata.state_dict_metadata[key].chunks
        assert [tuple(shard.sizes) for shard in shards] == [(6, 4)] * 4
    for name in ("zarr@1 pack", "torch_dist pack", "pack pack"):
        blocks = blocks_of(converted / name)
        for key in keys:
            of_key = [shape for block, shape in blocks if block.rpartition("@")[0] == key]
            assert {shape[:2] for shape in of_key} == {(6, 4)}
            assert len(of_key) == 4


def test_the_models_arrays_go_to_safetensors(saved: Path, tmp_path: Path) -> None:
    left_out = ("z.", *OF_OPTIMIZER)
    cuts = [cut for cut in saved_cuts() + empties() if not cut.key.startswith(left_out)]
    for options in (None, TINY):
        target = tmp_path / ("many" if options else "one")
        convert(saved / "pack", target, "safetensors", keys="[!z]*", options=options)

        index = json.loads((target / INDEX).read_bytes())
        files = sorted({*index["weight_map"].values()})
        assert {path.name for path in target.iterdir()} == {*files, INDEX}
        found = {key: t for name in files for key, t in load_file(target / name).items()}
        assert found.keys() == {cut.key for cut in cuts} == index["weight_map"].keys()
        assert [cut.key for cut in cuts if not same_bits(found[cut.key], whole(cut))] == []
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 2
    with safe_open(target / files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_what_safetensors_cannot_hold_is_reported_before_anything_is_written(
    saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=r"z.torch.complex128: safetens"):
        convert(saved / "pack", tmp_path / "c", "safetensors")
    assert not (tmp_path / "c").exists()

    convert(saved / "pack", tmp_path / "c", "safetensors", keys="x.torch.*int*")

    index = json.loads((tmp_path / "c" / INDEX).read_bytes())
    assert len(index["weight_map"]) == 8


def test_files_of_safetensors_are_read_back(saved: Path, tmp_path: Path) -> None:
    options = ConvertOptions(max_file_bytes=2000)
    convert(saved / "pack", tmp_path / "model", "safetensors", keys="[!z]*", options=options)

    for to in ("pack", "safetensors"):
        convert(tmp_path / "model", tmp_path / to, to, options=TINY)
        found = diff(saved / "pack", tmp_path / to, keys="[!zc]*")
        assert {one.difference for one in found.arrays} == {"only_in_a"}
        assert all(one.key.startswith("optimizer") for one in found.arrays)
    opened = dist_ckpt_strategies.open(tmp_path / "model")
    assert opened.common == {}
    assert not opened.objects
    for file, nbytes in (("model-00001-of-00003.safetensors", 100), (INDEX, 20)):
        name = next((tmp_path / "model").glob(file.replace("00003", "*")))
        os.truncate(name, nbytes)
        with pytest.raises(CorruptCheckpointError, match=str(name)):
            dist_ckpt_strategies.open(tmp_path / "model")["scalar"]


def test_zarr_v3_is_read_by_tensorstore_and_whatever_tensorstore_writes(
    saved: Path, tmp_path: Path
) -> None:
    compressed = copied(saved / "zarr@3", tmp_path / "zarr@3")
    for cut in saved_cuts():
        place = {"driver": "file", "path": str(saved / "zarr@3" / cut.key)}
        stored = tensorstore.open({"driver": "zarr3", "kvstore": place}).result()
        elements = stored.read().result()
        raw = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        assert raw.tobytes() == bytes(as_bytes(whole(cut)).numpy())
        shutil.rmtree(compressed / cut.key)
        place["path"] = str(compressed / cut.key)
        order: list[Any] = [{"name": "bytes"}] if elements.itemsize > 1 else []
        metadata = {
            "shape": cut.shape,
            "data_type": elements.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [max(1, n - 1) for n in cut.shape]},
            },
            "codecs": [*order, {"name": "zstd", "configuration": {"level": 1}}],
        }
        spec: Any = {"driver": "zarr3", "kvstore": place, "metadata": metadata}
        spec |= {"create": True, "store_data_equal_to_fill_value": True}
        tensorstore.open(spec).result().write(elements).result()

    assert diff(saved / "zarr@3", compressed).is_equal
    convert(compressed, tmp_path / "pack", "pack", options=TINY)
    assert diff(saved / "pack", tmp_path / "pack").is_equal
    (compressed / "buffer" / "c" / "0").unlink()
    with pytest.raises(StorageError, match=f"buffer: {compressed}/buffer: NOT_FOUND"):
        convert(compressed, tmp_path / "again", "pack")


ROWS, COLUMNS = 2048, 4096
MEMORY_NBYTES = 4 << 20


def large_state(rank: int, _to: str) -> dict[str, Any]:
    """One array of 32 MiB, in one shard."""
    return state_of(rank, [on_grid("w", (ROWS, COLUMNS), (1, 1), size=1)])


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by(1, large_state, tmp_path_factory.mktemp("large"))


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("zarr@1", ("pack", "zarr@3")),
        ("zarr@3", ("torch_dist",)),
        ("torch_dist", ("zarr@1",)),
        ("pack", ("pack", "safetensors")),
    ],
)
def test_memory_is_bounded_whatever_the_arrays_size(
    large: Path, tmp_path: Path, source: str, targets: tuple[str, ...]
) -> None:
    options = ConvertOptions(max_memory_bytes=MEMORY_NBYTES)
    tracemalloc.start()
    try:
        for to in targets:
            convert(large / source, tmp_path / to, to, options=options)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert ROWS * COLUMNS * 4 == 8 * MEMORY_NBYTES
    of_shards = ROWS * COLUMNS * 4 if source == "torch_dist" else 0  # one, read whole
    assert peak_nbytes < 2 * MEMORY_NBYTES + of_shards
    if "zarr@3" in targets:
        chunks = zarr.open_array(tmp_path / "zarr@3" / "w", mode="r").chunks
        assert chunks == (MEMORY_NBYTES // 32 // (COLUMNS * 4), COLUMNS)
    assert diff(large / source, tmp_path / targets[0]).is_equal


def test_keys_with_slashes_are_groups_of_zarr_v3(tmp_path: Path) -> None:
    keys = ["model/layer.0/w", "model/layer.0/w/scale", "b"]
    state = {key: ShardedTensor.from_rank_offsets(key, torch.ones(4)) for key in keys}
    dist_ckpt_strategies.save(state, tmp_path / "c")

    convert(tmp_path / "c", tmp_path / "z", "zarr@3")

    group = zarr.open_group(tmp_path / "z", mode="r")
    model: Any = group["model"]
    assert list(model.keys()) == ["layer.0"]
    assert (model["layer.0"]["w"][:] == 1).all()
    assert sorted(dist_ckpt_strategies.open(tmp_path / "z")) == sorted(keys)
    assert diff(tmp_path / "c", tmp_path / "z").is_equal


def write_with_common_object(root: Path, weight: torch.Tensor, common: dict[str, Any]) -> None:
    """A checkpoint as Megatron-Core 0.19 writes them: there is no common.pt."""
    save_torch_dist(
        {"w": weight, "common_state/shard_0_1": [common]},
        storage_writer=FileSystemWriter(root),
        planner=DefaultSavePlanner(flatten_state_dict=False),
        no_dist=True,
    )
    write_marker(root, "torch_dist")


@pytest.mark.parametrize("to", FORMATS)
def test_common_state_among_the_objects_becomes_a_file(tmp_path: Path, to: str) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    common = {"iteration": 3, "args": Namespace(tp=2)}
    write_with_common_object(tmp_path / "a", weight, common)

    report = convert(tmp_path / "a", tmp_path / "b", to)

    assert (report.num_arrays, report.num_objects) == (1, 0)
    assert torch.load(tmp_path / "b" / "common.pt", weights_only=False) == common
    assert diff(tmp_path / "a", tmp_path / "b").is_equal
    if to in {"pack", "zarr@1"}:
        wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4))}
        loaded: Any = dist_ckpt_strategies.load(wanted, tmp_path / "b", strict="raise_all")
        assert torch.equal(loaded.pop("w"), weight)
        assert loaded == common


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_a_view_that_is_conjugate_or_negative_is_read_and_compared(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Such a tensor stays a view in the files of torch_dist, of objects and of common state."""
    weight = view(torch.randn(3, 4, dtype=torch.complex64))
    write_with_common_object(tmp_path / "a", weight, {"iteration": 3})

    convert(tmp_path / "a", tmp_path / "b", "pack")

    wanted = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros_like(weight))}
    loaded: Any = dist_ckpt_strategies.load(wanted, tmp_path / "b")
    assert torch.equal(loaded["w"], weight)
    plain = weight.resolve_conj().resolve_neg()
    for name, tensor in (("view", weight), ("same", plain), ("other", -weight)):
        common = {"name": name, "tensor": tensor}
        write_with_common_object(tmp_path / name, weight, common)
    for name, differing in (("same", []), ("other", ["['tensor']"])):
        found = diff(tmp_path / "view", tmp_path / name).objects
        assert [one.where for one in found] == ["['name']", *differing]
