"""The names of Megatron-Core <= 0.15 that this package keeps: where they are, how they are called.

The list follows the reference of ``dist_checkpointing.strategies`` in Megatron-Core's user guide,
modules ``base``, ``zarr``, ``tensorstore`` and ``two_stage``.
"""

from __future__ import annotations

import pytest
from megatron.core.dist_checkpointing.strategies import base

from tests.support.kept import Kept, require_understood


def sharded_loader(name: str) -> dict[str, str | None]:
    """The members of a load strategy, as the reference lists them for base and subclass."""
    return {
        f"{name}.can_handle_sharded_objects": None,
        f"{name}.check_backend_compatibility": "loaded_version",
        f"{name}.check_version_compatibility": "loaded_version",
        f"{name}.load": "sharded_state_dict, checkpoint_dir",
        f"{name}.load_sharded_metadata": "checkpoint_dir",
        f"{name}.load_tensors_metadata": "checkpoint_dir",
        f"{name}.remove_sharded_tensors": "checkpoint_dir, key_prefix",
    }


TWO_STAGE = "two_stage.TwoStageDataParallelLoadShardedStrategy"

KEPT: dict[str, str | None] = {
    "registry.StrategyAction": None,
    "registry.get_default_strategy": "action, backend, version",
    "registry.register_default_strategy": "action, backend, version, strategy",
    "common.TorchCommonSaveStrategy": "backend, version",
    "common.TorchCommonSaveStrategy.can_handle_sharded_objects": None,
    "common.TorchCommonSaveStrategy.save_common": "common_state_dict, checkpoint_dir",
    "common.TorchCommonSaveStrategy.save_sharded_objects": (
        "sharded_objects_state_dict, checkpoint_dir"
    ),
    "common.TorchCommonLoadStrategy": "",
    "common.TorchCommonLoadStrategy.can_handle_sharded_objects": None,
    "common.TorchCommonLoadStrategy.load_common": "checkpoint_dir",
    "common.TorchCommonLoadStrategy.load_sharded_objects": (
        "sharded_objects_state_dict, checkpoint_dir"
    ),
    "common.TorchCommonLoadStrategy.load_sharded_metadata": "checkpoint_dir",
    "common.TorchCommonLoadStrategy.check_backend_compatibility": "loaded_backend",
    "common.TorchCommonLoadStrategy.check_version_compatibility": "loaded_version",
    "zarr.ZarrSaveShardedStrategy": "backend, version",
    "zarr.ZarrSaveShardedStrategy.can_handle_sharded_objects": None,
    "zarr.ZarrSaveShardedStrategy.save": "sharded_state_dict, checkpoint_dir",
    "zarr.ZarrLoadShardedStrategy": "",
    **sharded_loader("zarr.ZarrLoadShardedStrategy"),
    "zarr.register_default_zarr_strategies": "",
    "zarr.flatten_range": "sharded_tensor, x",
    "zarr.load_zarr_based_sharded_metadata": "checkpoint_dir, get_shape_dtype_fn",
    "zarr.pad_to_expected_shape": "x, expected_sharded_ten",
    "zarr.postprocess_numpy_array": "loaded_array, sharded_tensor, apply_flattened_range=True",
    "tensorstore.TensorStoreLoadShardedStrategy": "load_directly_on_device=False",
    **sharded_loader("tensorstore.TensorStoreLoadShardedStrategy"),
    "tensorstore.register_default_tensorstore_strategies": "",
    "tensorstore.merge_global_slice_with_shape": "global_slice, actual_shape, key",
    "tensorstore.open_ts_array": "arr_path",
    TWO_STAGE: "data_parallel_group, cpu_transfer=True",
    f"{TWO_STAGE}.can_handle_sharded_objects": None,
    f"{TWO_STAGE}.check_backend_compatibility": "loaded_version",
    f"{TWO_STAGE}.check_version_compatibility": "loaded_version",
    f"{TWO_STAGE}.deduplicate_chunks": "ten_metas",
    f"{TWO_STAGE}.load": "sharded_state_dict, checkpoint_dir",
    f"{TWO_STAGE}.load_tensor_from_storage": "checkpoint_dir, ten_meta",
    f"{TWO_STAGE}.load_tensors_metadata": "checkpoint_dir",
    f"{TWO_STAGE}.maybe_init_gloo_group": "",
    f"{TWO_STAGE}.summarize_load_times": "",
    "two_stage.sharded_tensor_chunk_id": "sharded_tensor",
    "two_stage.timed": "verbose=True",
}

BASES = {
    "common.TorchCommonLoadStrategy": base.LoadCommonStrategy,
    "common.TorchCommonSaveStrategy": base.SaveCommonStrategy,
    "tensorstore.TensorStoreLoadShardedStrategy": base.LoadShardedStrategy,
    "zarr.ZarrLoadShardedStrategy": base.LoadShardedStrategy,
    "zarr.ZarrSaveShardedStrategy": base.SaveShardedStrategy,
    TWO_STAGE: base.LoadShardedStrategy,
}


@pytest.mark.parametrize("name", KEPT)
def test_the_name_is_kept_and_calls_as_the_reference_states_them_are_understood(name: str) -> None:
    kept = Kept(name, KEPT[name], "")
    assert kept.find() is not None
    if kept.parameters is not None:
        require_understood(kept)


@pytest.mark.parametrize("name", BASES)
def test_a_strategy_is_one_of_megatron_cores(name: str) -> None:
    assert issubclass(Kept(name, None, "").find(), BASES[name])
