"""Views of checkpoints for other libraries, and figures about their elements."""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from megatron.core.dist_checkpointing import ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CorruptCheckpointError
from dist_ckpt_strategies.tools import lazy_array
from tests.cli.commands import json_of, run
from tests.support.checkpoints import flip_at
from tests.support.tensors import bits

pytestmark = pytest.mark.slow

VALUES = {
    "model/large": torch.arange(110_000, dtype=torch.float32).reshape(1100, 100),
    "model/layer/cube": torch.arange(2100, dtype=torch.int64).reshape(10, 35, 6),
    "half": torch.tensor([1.5, 0.0, -2.0], dtype=torch.bfloat16),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(3.5),
    "odd": torch.tensor([float("nan"), 0.0, float("inf"), 2.0]),
    "flags": torch.tensor([True, False, True, True]),
}


def save(root: Path) -> Path:
    state: dict[str, Any] = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in VALUES.items()}
    dist_ckpt_strategies.save(state, root)
    return root


def test_views_have_the_same_elements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_array, "_CHUNK_NBYTES", 7000)  # many chunks, and some at the edge
    opened = dist_ckpt_strategies.open(save(tmp_path / "c"))
    group = zarr.open_group(opened.zarr_store(), mode="r")

    assert {key for key, _ in group.members(max_depth=None)} == {*VALUES, "model", "model/layer"}
    for key, tensor in VALUES.items():
        view, array = opened[key].tensorstore(), group[key]
        assert isinstance(array, zarr.Array)
        assert view.read().result().tobytes() == bits(tensor)
        assert np.asarray(array[...]).tobytes() == bits(tensor)
        assert tuple(view.shape) == tuple(array.shape) == tuple(tensor.shape)
    assert opened["half"].tensorstore().dtype.numpy_dtype == ml_dtypes.bfloat16
    assert group["half"].attrs["dtype"] == "bfloat16"
    part = opened["model/large"].tensorstore()[7:900:3, 5]
    assert part.read().result().tolist() == VALUES["model/large"][7:900:3, 5].tolist()


def test_views_change_nothing_and_read_no_damage(tmp_path: Path) -> None:
    opened = dist_ckpt_strategies.open(save(tmp_path / "c"))
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_group(opened.zarr_store(), mode="a").create_group("x")
    with pytest.raises(ValueError, match="writing"):
        opened["half"].tensorstore()[0].write(1).result()
    (pack,) = (tmp_path / "c").glob("packs/*/*")
    flip_at(pack, pack.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError, match=r"model/large: .*written by rank 0"):
        opened["model/large"].tensorstore().read().result()
    with pytest.raises(CorruptCheckpointError, match=r"model/large: .*written by rank 0"):
        np.asarray(zarr.open_group(opened.zarr_store(), mode="r")["model/large"])


def test_inspect_shows_figures_about_elements(tmp_path: Path) -> None:
    root = save(tmp_path / "c")
    rows = json_of("inspect", root, "--stats", code=0)["stats"]
    found = {row.pop("key"): tuple(row.values()) for row in rows}

    assert found == {
        "model/large": (0, 109_999, 54_999.5, 0, 1 / 110_000),
        "model/layer/cube": (0, 2099, 1049.5, 0, 1 / 2100),
        "half": (-2.0, 1.5, pytest.approx(-1 / 6), 0, pytest.approx(1 / 3)),
        "empty": (None, None, None, 0, 0),
        "scalar": (3.5, 3.5, 3.5, 0, 0),
        "odd": (0, "inf", "inf", 0.25, 0.25),
        "flags": (0, 1, 0.75, 0, 0.25),
    }
    lines = run("inspect", root, "--stats", "--keys", "model/*").stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["array", "min", "max", "mean", "nan", "zeros"],
        ["model/large", "0", "109999", "54999.5", "0", "9.09091e-06"],
        ["model/layer/cube", "0", "2099", "1049.5", "0", "0.00047619"],
    ]
