"""The module functions that Megatron-Core <= 0.15 offered beside its Zarr strategies."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    PlanError,
    ShapeMismatchError,
    StorageError,
)
from dist_ckpt_strategies.strategies.tensorstore import merge_global_slice_with_shape, open_ts_array
from dist_ckpt_strategies.strategies.zarr import (
    load_zarr_based_sharded_metadata,
    postprocess_numpy_array,
)


def wanted(*local_shape: int, **fields: Any) -> Any:
    """What a ShardedTensor says about itself; 0.16.1's own refuses a flattened range."""
    defaults = {"key": "w", "allow_shape_mismatch": False, "flattened_range": None}
    return SimpleNamespace(local_shape=local_shape, **defaults | fields)


def test_slices_are_cut_where_they_reach_past_the_end() -> None:
    cut = merge_global_slice_with_shape((slice(2, 9), slice(0, 3), 5), (4, 3, 6), "w")
    assert cut == (slice(2, 4), slice(0, 3), 5)
    open_ended = (slice(None), slice(None, 9), slice(2, None))
    found = merge_global_slice_with_shape(open_ended, (4, 3, 6), "w")
    assert found == (slice(0, 4), slice(0, 3), slice(2, 6))

    for start in (4, 7):
        with pytest.raises(PlanError, match=f"w: slice {start}:9 lies beyond size 4"):
            merge_global_slice_with_shape((slice(start, 9),), (4,), "w")
    with pytest.raises(CheckpointingException, match=r"w: 1 slices for the 2 dims"):
        merge_global_slice_with_shape((slice(0, 1),), (4, 3), "w")


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (np.arange(6, dtype=ml_dtypes.bfloat16), torch.bfloat16),
        (np.arange(6, dtype=ml_dtypes.float8_e5m2), torch.float8_e5m2),
        (np.arange(6, dtype=">f4"), torch.float32),
        (np.arange(12, dtype=np.int64)[::2] // 2, torch.int64),
    ],
)
def test_a_numpy_array_becomes_the_tensor_of_its_dtype(stored: Any, dtype: torch.dtype) -> None:
    found = postprocess_numpy_array(stored, wanted(6))

    assert found.dtype == dtype
    assert found.float().tolist() == [0, 1, 2, 3, 4, 5]


def test_an_array_of_another_shape_is_refused_unless_that_is_allowed() -> None:
    stored = np.ones((2, 2), dtype=np.float32)

    with pytest.raises(ShapeMismatchError, match=r"w: local shape \(2, 2\) loaded, \(3, 2\) exp"):
        postprocess_numpy_array(stored, wanted(3, 2))
    padded = postprocess_numpy_array(stored, wanted(3, 2, allow_shape_mismatch=True))
    assert padded.tolist() == [[1, 1], [1, 1], [0, 0]]


def test_the_flattened_range_is_cut_out_unless_it_is_not_wanted() -> None:
    stored = np.arange(6, dtype=np.float32).reshape(2, 3)
    asked = wanted(2, 3, flattened_range=slice(4, 6))

    assert postprocess_numpy_array(stored, asked).tolist() == [4, 5]
    assert postprocess_numpy_array(stored, asked, False).shape == (2, 3)  # noqa: FBT003 - theirs


def test_an_array_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    with pytest.raises(ArrayNotFoundError, match=f"w: no Zarr v2 array at {tmp_path}/w") as missing:
        open_ts_array(tmp_path / "w")
    assert (missing.value.key, missing.value.path) == ("w", f"{tmp_path}/w")
    (tmp_path / "w" / ".zarray").write_text("{ no longer what it was")
    with pytest.raises(StorageError, match=f"w: array {tmp_path}/w cannot be opened: "):
        open_ts_array(tmp_path / "w")


def test_metadata_is_what_the_callers_function_says_of_each_array(tmp_path: Path) -> None:
    weight = torch.arange(32, dtype=torch.bfloat16).reshape(4, 8)
    state = {key: ShardedTensor.from_rank_offsets(key, weight) for key in ("w", "a/b")}
    dist_ckpt_strategies.save(state, tmp_path, ("zarr", 1))
    says = {str(tmp_path / key): ((4, n), ml_dtypes.bfloat16) for n, key in enumerate(state)}

    found = load_zarr_based_sharded_metadata(tmp_path, says.pop)

    assert says == {}
    described = {key: (value.global_shape, value.dtype) for key, value in found.items()}
    assert described == {key: ((4, n), torch.bfloat16) for n, key in enumerate(state)}
