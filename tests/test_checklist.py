"""The names of Megatron-Core <= 0.15 that this package keeps: where they are and what tests them.

The list follows the reference of ``dist_checkpointing.strategies`` in Megatron-Core's user guide,
modules ``base``, ``zarr`` and ``tensorstore``. Parts that are not there yet are not in it.
"""

from __future__ import annotations

import pytest
from megatron.core.dist_checkpointing.strategies import base

from tests.support.kept import Kept, require_tested, require_understood

WHOLE = "tests/golden/test_whole_arrays.py::"
GOLDEN_OBJECTS = "tests/golden/test_objects.py::"
SAVE_LOAD = "tests/strategies/test_save_load.py::"
REGISTRY = "tests/strategies/test_registry.py::"
CLASSES = "tests/strategies/test_strategy_classes.py::"
FUNCTIONS = "tests/strategies/test_kept_functions.py::"

METADATA = f"{WHOLE}test_the_sharded_metadata_names_every_array_and_every_object"
TENSORS_METADATA = f"{WHOLE}test_the_metadata_names_every_array_with_its_shape_and_dtype"
REMOVAL = f"{WHOLE}test_removing_a_prefix_leaves_every_other_array_as_it_was"
LAYOUTS = f"{SAVE_LOAD}test_every_dtype_comes_back_bit_for_bit_in_another_layout"
ON_DEVICE = f"{SAVE_LOAD}test_load_directly_on_device_copies_into_the_callers_data"
REGISTERED = f"{REGISTRY}test_the_functions_of_megatron_core_0_15_register_one_strategy_each"
ENUM = f"{REGISTRY}test_the_names_of_the_package_are_those_of_the_registry"
KNOWN = f"{REGISTRY}test_a_registered_instance_is_returned"
REFUSED = f"{CLASSES}test_another_format_is_refused_by_name"
OBJECTS = f"{GOLDEN_OBJECTS}test_every_object_is_what_was_saved"
COMMON = f"{GOLDEN_OBJECTS}test_the_common_state_is_part_of_what_is_loaded"
COMMON_OBJECTS = f"{CLASSES}test_objects_take_the_common_strategys_way_too"


def sharded_loader(name: str, load_test: str) -> list[Kept]:
    """The members of a load strategy, as the reference lists them for base and subclass."""
    return [
        Kept(f"{name}.can_handle_sharded_objects", None, OBJECTS),
        Kept(f"{name}.check_backend_compatibility", "loaded_version", REFUSED),
        Kept(f"{name}.check_version_compatibility", "loaded_version", REFUSED),
        Kept(f"{name}.load", "sharded_state_dict, checkpoint_dir", load_test),
        Kept(f"{name}.load_sharded_metadata", "checkpoint_dir", METADATA),
        Kept(f"{name}.load_tensors_metadata", "checkpoint_dir", TENSORS_METADATA),
        Kept(f"{name}.remove_sharded_tensors", "checkpoint_dir, key_prefix", REMOVAL),
    ]


KEPT = [
    Kept("registry.StrategyAction", None, ENUM),
    Kept("registry.get_default_strategy", "action, backend, version", KNOWN),
    Kept("registry.register_default_strategy", "action, backend, version, strategy", KNOWN),
    Kept("common.TorchCommonSaveStrategy", "backend, version", COMMON_OBJECTS),
    Kept("common.TorchCommonSaveStrategy.can_handle_sharded_objects", None, COMMON_OBJECTS),
    Kept(
        "common.TorchCommonSaveStrategy.save_common",
        "common_state_dict, checkpoint_dir",
        "tests/strategies/test_faults.py::test_common_state_that_cannot_be_written_is_raised_on_every_rank",
    ),
    Kept(
        "common.TorchCommonSaveStrategy.save_sharded_objects",
        "sharded_objects_state_dict, checkpoint_dir",
        COMMON_OBJECTS,
    ),
    Kept("common.TorchCommonLoadStrategy", "", COMMON),
    Kept("common.TorchCommonLoadStrategy.can_handle_sharded_objects", None, COMMON_OBJECTS),
    Kept("common.TorchCommonLoadStrategy.load_common", "checkpoint_dir", COMMON),
    Kept(
        "common.TorchCommonLoadStrategy.load_sharded_objects",
        "sharded_objects_state_dict, checkpoint_dir",
        COMMON_OBJECTS,
    ),
    Kept("common.TorchCommonLoadStrategy.load_sharded_metadata", "checkpoint_dir", COMMON_OBJECTS),
    Kept("common.TorchCommonLoadStrategy.check_backend_compatibility", "loaded_backend", REFUSED),
    Kept("common.TorchCommonLoadStrategy.check_version_compatibility", "loaded_version", REFUSED),
    Kept("zarr.ZarrSaveShardedStrategy", "backend, version", LAYOUTS),
    Kept("zarr.ZarrSaveShardedStrategy.can_handle_sharded_objects", None, OBJECTS),
    Kept("zarr.ZarrSaveShardedStrategy.save", "sharded_state_dict, checkpoint_dir", LAYOUTS),
    Kept("zarr.ZarrLoadShardedStrategy", "", LAYOUTS),
    *sharded_loader("zarr.ZarrLoadShardedStrategy", LAYOUTS),
    Kept("zarr.register_default_zarr_strategies", "", REGISTERED),
    Kept(
        "zarr.flatten_range",
        "sharded_tensor, x",
        FUNCTIONS + "test_a_flattened_range_counts_elements_in_c_order",
    ),
    Kept(
        "zarr.load_zarr_based_sharded_metadata",
        "checkpoint_dir, get_shape_dtype_fn",
        FUNCTIONS + "test_metadata_is_what_the_callers_function_says_of_each_array",
    ),
    Kept(
        "zarr.pad_to_expected_shape",
        "x, expected_sharded_ten",
        FUNCTIONS + "test_what_is_missing_at_the_end_of_each_dim_becomes_zeros",
    ),
    Kept(
        "zarr.postprocess_numpy_array",
        "loaded_array, sharded_tensor, apply_flattened_range=True",
        FUNCTIONS + "test_a_numpy_array_becomes_the_tensor_of_its_dtype",
    ),
    Kept("tensorstore.TensorStoreLoadShardedStrategy", "load_directly_on_device=False", ON_DEVICE),
    *sharded_loader("tensorstore.TensorStoreLoadShardedStrategy", ON_DEVICE),
    Kept("tensorstore.register_default_tensorstore_strategies", "", REGISTERED),
    Kept(
        "tensorstore.merge_global_slice_with_shape",
        "global_slice, actual_shape, key",
        FUNCTIONS + "test_a_slice_that_reaches_past_the_end_is_cut",
    ),
    Kept(
        "tensorstore.open_ts_array",
        "arr_path",
        FUNCTIONS + "test_an_array_is_opened_with_tensorstore_by_a_relative_path_too",
    ),
]

BASES = {
    "common.TorchCommonLoadStrategy": base.LoadCommonStrategy,
    "common.TorchCommonSaveStrategy": base.SaveCommonStrategy,
    "tensorstore.TensorStoreLoadShardedStrategy": base.LoadShardedStrategy,
    "zarr.ZarrLoadShardedStrategy": base.LoadShardedStrategy,
    "zarr.ZarrSaveShardedStrategy": base.SaveShardedStrategy,
}

every_name = pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)


@every_name
def test_the_name_can_be_imported(kept: Kept) -> None:
    assert kept.find() is not None


@pytest.mark.parametrize(
    "kept", [k for k in KEPT if k.parameters is not None], ids=lambda k: k.name
)
def test_calls_as_the_reference_states_them_are_understood(kept: Kept) -> None:
    require_understood(kept)


@pytest.mark.parametrize("name", BASES)
def test_a_strategy_is_one_of_megatron_cores(name: str) -> None:
    assert issubclass(Kept(name, None, "").find(), BASES[name])


@every_name
def test_a_test_shows_its_behaviour(kept: Kept) -> None:
    require_tested(kept)
