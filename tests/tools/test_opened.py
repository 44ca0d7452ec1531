"""``dist_ckpt_strategies.open``: slices as numpy gives them, damage, and what is not there."""

import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException

import dist_ckpt_strategies
from dist_ckpt_strategies import Options, convert
from dist_ckpt_strategies.config import MIB
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointChangedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
    StrategyError,
    UnsafeObjectError,
)
from tests.cli.commands import run
from tests.support.checkpoints import contents, copied, flip_at
from tests.tools.all_formats import FORMATS

SHAPES = {"large": (1100, 300), "cube": (5, 7, 6), "row": (9,), "scalar": (), "empty": (0, 4)}


class Custom:
    def __init__(self) -> None:
        self.n = 1


def state(seed: int) -> dict[str, Any]:
    random_bits = np.random.default_rng(seed)
    arrays = {key: random_bits.normal(size=shape) for key, shape in SHAPES.items()}
    tensors: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(key, torch.tensor(a, dtype=torch.float32))
        for key, a in arrays.items()
    }
    half = torch.tensor(arrays["row"], dtype=torch.bfloat16)
    tensors["half"] = ShardedTensor.from_rank_offsets("half", half)
    return tensors | {"rng": ShardedObject("rng", {1: seed}, (1,), (0,)), "iteration": seed}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in each format; not to be changed."""
    root = tmp_path_factory.mktemp("opened")
    dist_ckpt_strategies.save(state(1), root / "pack", ("safetensors", 1))
    for name in FORMATS:
        if name != "pack":
            convert(root / "pack", root / name, name)
    return root


def random_index(rng: random.Random, shape: tuple[int, ...]) -> Any:
    def of_dim(length: int) -> Any:
        if length and rng.random() < 0.3:
            return rng.randrange(-length, length)
        start, stop = (rng.choice([None, rng.randint(-length - 2, length + 2)]) for _ in range(2))
        return slice(start, stop, rng.choice([None, 1, 2, 3, -1, -2, 400]))

    index = [of_dim(length) for length in shape[: rng.randint(0, len(shape))]]
    if rng.random() < 0.4:
        index.insert(rng.randint(0, len(index)), ...)
        missing = len(shape) - len(index) + 1
        at = index.index(...)
        index[at + 1 :] = [of_dim(length) for length in shape[at + missing :]]
    return index[0] if len(index) == 1 and rng.random() < 0.5 else tuple(index)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_slices_are_those_of_numpy(saved: Path, name: str) -> None:
    before = contents(saved / name)
    in_parts = Options(max_inflight_bytes=70_000)  # of the large one
    opened = dist_ckpt_strategies.open(saved / name, options=in_parts)
    rng = random.Random(name)
    expected = {key: held.data.numpy() for key, held in state(1).items() if key in SHAPES}

    for key, values in expected.items():
        array = opened[key]
        assert (array.shape, array.dtype, array.size) == (values.shape, values.dtype, values.size)
        assert np.asarray(array).tobytes() == values.tobytes()
        for _ in range(60):
            index = random_index(rng, values.shape)
            found = array[index]
            assert np.array_equal(found, values[index]), (key, index)
            assert found.shape == values[index].shape, (key, index)
    assert np.array_equal(np.stack(list(opened["cube"])), expected["cube"])
    assert opened["half"].dtype == ml_dtypes.bfloat16
    assert opened["half"].torch().dtype == torch.bfloat16
    assert np.asarray(opened["row"], dtype=np.float64).dtype == np.float64
    assert repr(opened["row"]) == "<array row: (9,) float32>"
    assert f"{saved / name}: {opened.format}, 6 arrays" in repr(opened)
    assert opened.objects["rng/shard_0_1"] == {1: 1}
    assert opened.common["iteration"] == 1
    assert contents(saved / name) == before


def test_a_slice_with_steps_takes_little_memory(tmp_path: Path) -> None:
    whole = torch.arange(16 * MIB // 4, dtype=torch.float32).reshape(64, -1)
    dist_ckpt_strategies.save({"w": ShardedTensor.from_rank_offsets("w", whole)}, tmp_path / "c")
    for index in ((..., slice(None, None, 100)), slice(None, None, -9)):
        array = dist_ckpt_strategies.open(tmp_path / "c", options=Options(max_inflight_bytes=MIB))
        tracemalloc.start()
        found = array["w"][index]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert np.array_equal(found, whole.numpy()[index])
        assert peak < found.nbytes + 3 * MIB, (index, peak)


def test_wrong_indices_are_refused_as_numpy_refuses_them(saved: Path) -> None:
    array = dist_ckpt_strategies.open(saved / "pack")["cube"]

    for index in (5, (0, -8), (0, 0, 0, 0), (..., ...), None, [0, 1], True, 1.5):
        with pytest.raises(IndexError, match="cube"):
            array[index]
    with pytest.raises(TypeError):
        len(dist_ckpt_strategies.open(saved / "pack")["scalar"])


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_there_is_named_with_what_is_similar(saved: Path, name: str) -> None:
    opened = dist_ckpt_strategies.open(saved / name)

    for mapping, key, similar in (
        (opened, "larg", "large"),
        (opened.objects, "rng/shard_1_1", "rng"),
    ):
        assert key not in mapping
        assert mapping.get(key) is None
        with pytest.raises(ArrayNotFoundError, match=f"{key}: no such .*similar ones: {similar}"):
            mapping[key]
        with pytest.raises(KeyError):
            mapping[key]


def test_a_place_without_a_checkpoint_is_refused(tmp_path: Path, saved: Path) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        dist_ckpt_strategies.open(tmp_path / "none")
    assert isinstance(caught.value, CheckpointingException)
    (tmp_path / "unfinished" / "packs").mkdir(parents=True)
    with pytest.raises(IncompleteCheckpointError):
        dist_ckpt_strategies.open(tmp_path / "unfinished")
    with pytest.raises(StrategyError, match="verify: expected one of off, read"):
        dist_ckpt_strategies.open(saved / "pack", verify="some")
    lost = copied(saved / "pack", tmp_path / "lost")
    (lost / "index").write_bytes(b"{")
    with pytest.raises(CorruptCheckpointError, match="rebuild-index"):
        dist_ckpt_strategies.open(lost)


def test_only_what_is_sliced_is_read_and_it_is_verified(saved: Path, tmp_path: Path) -> None:
    root = copied(saved / "pack", tmp_path / "c")
    (pack,) = root.glob("packs/*/*")
    content = pack.read_bytes()
    at = content.index(state(1)["large"].data.numpy()[1000].tobytes())
    flip_at(pack, at)

    opened = dist_ckpt_strategies.open(root)
    expected = state(1)["large"].data.numpy()

    assert np.array_equal(opened["large"][:800], expected[:800])
    assert np.array_equal(opened["large"][:870:200, ::7], expected[:870:200, ::7])
    for index in (slice(900, 1001), (1000, 5), ...):
        with pytest.raises(CorruptCheckpointError, match=r"large: .*rank 0, is damaged: bytes"):
            opened["large"][index]
    unverified = dist_ckpt_strategies.open(root, verify="off")["large"][...]
    assert (unverified != expected).sum() == 1


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_that_is_replaced_gives_an_error_and_no_mixture(
    saved: Path, tmp_path: Path, name: str
) -> None:
    root = copied(saved / name, tmp_path / "c")
    opened = dist_ckpt_strategies.open(root)
    array = opened["large"]
    if name in {"torch_dist", "zarr@3"}:
        os.utime(root / "metadata.json")
    else:
        dist_ckpt_strategies.save(state(2), root, opened.format, overwrite=True)

    error = CheckpointChangedError if name == "pack" else StorageError
    for read in (lambda: array[:3], lambda: opened["cube"][...], lambda: opened.common):
        with pytest.raises(error, match="replaced this checkpoint"):
            read()
    if name not in {"torch_dist", "zarr@3"}:
        assert dist_ckpt_strategies.open(root).common["iteration"] == 2


def test_objects_are_unpickled_with_the_allow_list(tmp_path: Path) -> None:
    held = {"o": ShardedObject("o", Custom(), (1,), (0,)), "other": Custom()}
    dist_ckpt_strategies.save(held, tmp_path / "c", ("safetensors", 1), allow=[Custom])

    opened = dist_ckpt_strategies.open(tmp_path / "c")
    with pytest.raises(UnsafeObjectError, match=r"o/shard_0_1: .*Custom"):
        opened.objects["o/shard_0_1"]
    with pytest.raises(UnsafeObjectError, match="Custom"):
        _ = opened.common
    opened = dist_ckpt_strategies.open(tmp_path / "c", allow=[Custom])
    assert opened.objects["o/shard_0_1"].n == opened.common["other"].n == 1


def test_a_key_that_is_no_text_is_none_of_its_keys(saved: Path) -> None:
    for name in FORMATS:
        opened: Any = dist_ckpt_strategies.open(saved / name)
        assert 5 not in opened
        assert None not in opened


def test_an_array_may_have_the_name_of_the_index_of_packs(tmp_path: Path) -> None:
    root, elements = tmp_path / "c", torch.arange(4.0)
    for _ in range(2):
        state = {"index": ShardedTensor.from_rank_offsets("index", elements)}
        dist_ckpt_strategies.save(state, root, ("zarr", 1), overwrite=True)

    assert dist_ckpt_strategies.open(root)["index"][...].tolist() == elements.tolist()
    assert run("verify", root).exit_code == 0


def test_sparse_tensors_in_objects_are_compared(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("same", 1.0), ("other", 2.0)):
        sparse = (value * torch.eye(2)).to_sparse()
        state = {"o": ShardedObject("o", sparse, (1,), (0,))}
        dist_ckpt_strategies.save(state, tmp_path / name)

    for name, num_differing in (("same", 0), ("other", 1)):
        report = dist_ckpt_strategies.diff(tmp_path / "a", tmp_path / name)
        assert len(report.objects) == num_differing
