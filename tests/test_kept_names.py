"""The names of other packages that this one keeps: where they are, how they are called.

The lists follow the references of ``dist_checkpointing.strategies`` in Megatron-Core's user guide,
modules ``base``, ``zarr``, ``tensorstore`` and ``two_stage``; of NVRx's local checkpoints, and of
Megatron-Core's ``tensor_aware_state_dict``; and of HyperPod's checkpointless training, which states
``abort_instances`` of ``create_custom_abort`` as one name for a variable number of parts, and whose
trainer is a StateProvider here, or has one. NVRx's own signatures are compared in ``tests/nvrx``,
where it is installed. None stands for what is not called.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import pytest

from dist_ckpt_strategies import inprocess, local
from dist_ckpt_strategies.integrations.nemo import auto_resume_class, strategy_class
from dist_ckpt_strategies.megatron.types import tensor_aware_class
from tests.support.kept import own_parameters, require_understood

Names = dict[str, str | None]


def below(name: str, members: Names) -> Names:
    """The names of a class's members, with that of the class."""
    return {f"{name}.{member}": parameters for member, parameters in members.items()}


SHARDED_LOADER: Names = {
    "can_handle_sharded_objects": None,
    "check_backend_compatibility": "loaded_version",
    "check_version_compatibility": "loaded_version",
    "load": "sharded_state_dict, checkpoint_dir",
    "load_sharded_metadata": "checkpoint_dir",
    "load_tensors_metadata": "checkpoint_dir",
    "remove_sharded_tensors": "checkpoint_dir, key_prefix",
}

TWO_STAGE = "strategies.two_stage.TwoStageDataParallelLoadShardedStrategy"

MEGATRONS: Names = {
    "strategies.registry.StrategyAction": None,
    "strategies.registry.get_default_strategy": "action, backend, version",
    "strategies.registry.register_default_strategy": "action, backend, version, strategy",
    "strategies.common.TorchCommonSaveStrategy": "backend, version",
    **below(
        "strategies.common.TorchCommonSaveStrategy",
        {
            "can_handle_sharded_objects": None,
            "save_common": "common_state_dict, checkpoint_dir",
            "save_sharded_objects": "sharded_objects_state_dict, checkpoint_dir",
        },
    ),
    "strategies.common.TorchCommonLoadStrategy": "",
    **below(
        "strategies.common.TorchCommonLoadStrategy",
        {
            "can_handle_sharded_objects": None,
            "load_common": "checkpoint_dir",
            "load_sharded_objects": "sharded_objects_state_dict, checkpoint_dir",
            "load_sharded_metadata": "checkpoint_dir",
            "check_backend_compatibility": "loaded_backend",
            "check_version_compatibility": "loaded_version",
        },
    ),
    "strategies.zarr.ZarrSaveShardedStrategy": "backend, version",
    "strategies.zarr.ZarrSaveShardedStrategy.can_handle_sharded_objects": None,
    "strategies.zarr.ZarrSaveShardedStrategy.save": "sharded_state_dict, checkpoint_dir",
    "strategies.zarr.ZarrLoadShardedStrategy": "",
    **below("strategies.zarr.ZarrLoadShardedStrategy", SHARDED_LOADER),
    "strategies.zarr.register_default_zarr_strategies": "",
    "strategies.zarr.flatten_range": "sharded_tensor, x",
    "strategies.zarr.load_zarr_based_sharded_metadata": "checkpoint_dir, get_shape_dtype_fn",
    "strategies.zarr.pad_to_expected_shape": "x, expected_sharded_ten",
    "strategies.zarr.postprocess_numpy_array": (
        "loaded_array, sharded_tensor, apply_flattened_range=True"
    ),
    "strategies.tensorstore.TensorStoreLoadShardedStrategy": "load_directly_on_device=False",
    **below("strategies.tensorstore.TensorStoreLoadShardedStrategy", SHARDED_LOADER),
    "strategies.tensorstore.register_default_tensorstore_strategies": "",
    "strategies.tensorstore.merge_global_slice_with_shape": "global_slice, actual_shape, key",
    "strategies.tensorstore.open_ts_array": "arr_path",
    TWO_STAGE: "data_parallel_group, cpu_transfer=True",
    **below(
        TWO_STAGE,
        {
            "can_handle_sharded_objects": None,
            "check_backend_compatibility": "loaded_version",
            "check_version_compatibility": "loaded_version",
            "deduplicate_chunks": "ten_metas",
            "load": "sharded_state_dict, checkpoint_dir",
            "load_tensor_from_storage": "checkpoint_dir, ten_meta",
            "load_tensors_metadata": "checkpoint_dir",
            "maybe_init_gloo_group": "",
            "summarize_load_times": "",
        },
    ),
    "strategies.two_stage.sharded_tensor_chunk_id": "sharded_tensor",
    "strategies.two_stage.timed": "verbose=True",
}


def replication(execute: str = "*args, **kwargs") -> Names:
    """The methods of a replication strategy."""
    return {
        "replicate": "local_ckpt, id_",
        "retrieve_execute": execute,
        "retrieve_plan": "globally_available_ids, wanted",
    }


TENSOR_AWARE: Names = {
    "pop_tensors": "",
    "tensors": None,
    "is_hollow": None,
    "insert_tensors": "tensor_data",
    "init_tensors": "",
    "copy_tensors_to_cpu": "non_blocking=False",
    "restore_tensor_device": "non_blocking=True",
    "values": "",
}

NVRX: Names = {
    "CliqueReplicationStrategy": "local_group, target_device='cpu'",
    "CliqueReplicationStrategy.from_replication_params": (
        "replication_jump=0, replication_factor=2"
    ),
    **below("CliqueReplicationStrategy", replication("plan, my_data")),
    "LazyCliqueReplicationStrategy": "replication_jump=0, replication_factor=2",
    **below("LazyCliqueReplicationStrategy", replication()),
    "LazyReplicationStrategyBuilder": "",
    "LazyReplicationStrategyBuilder.replication_strategy": None,
    **below("LazyReplicationStrategyBuilder", replication()),
    "ReplicationStrategy": "",
    **below("ReplicationStrategy", replication()),
    "NoReplicasAvailableError": None,
    "ExchangePlan": None,
    "ExchangePlan.entries": None,
    "ExchangePlan.required_ids": "rank=None",
    "LocalCheckpointManager": "root_local_ckpt_dir, session_id='', repl_strategy=None",
    "LocalCheckpointManager.save": "state_dict, iteration, is_async=False",
    "LocalCheckpointManager.load": "",
    "LocalCheckpointManager.find_latest": "",
    "LocalSaveRequest.for_nvrx": "",
    **below("TensorAwareStateDict", TENSOR_AWARE),
    "BasicTensorAwareStateDict": "state_dict",
    **below("BasicTensorAwareStateDict", {**TENSOR_AWARE, "state_dict": None}),
    **below("MCoreTensorAwareStateDict", {**TENSOR_AWARE, "state_dict": None}),
    "MCoreTensorAwareStateDict.from_state_dict": (
        "sharded_state_dict, algo='fully_parallel', parallelization_group=None, "
        "cached_metadata=None"
    ),
    "MCoreTensorAwareStateDict.to_state_dict": "sharded_state_dict, algo='atomic'",
}

MANAGER: Names = {
    "save_checkpoint": "trainer",
    "delete_checkpoint": "",
    "try_checkpointless_load": "trainer",
    "checkpointless_recovery_feasible": "trainer, include_checksum_verification=True",
    "store_rng_states": "",
    "load_rng_states": "",
    "maybe_offload_checkpoint": "",
}

HYPERPODS: Names = {
    "inprocess.train_utils.wait_rank": "",
    "inprocess.train_utils.HPAgentK8sAPIFactory": "",
    "inprocess.train_utils.HPAgentK8sAPIFactory.__call__": "",
    "inprocess.wrap.HPWrapper.__call__": "fn",
    "inprocess.wrap.HPCallWrapper": "wrapper",
    **below(
        "inprocess.wrap.HPCallWrapper",
        {
            "initialize_barrier": "",
            "start_hp_fault_handling_thread": "",
            "handle_fn_exception": "call_ex",
            "restart": "term_ex",
            "launch": "fn, *a, **kw",
            "run": "fn, a, kw",
            "shutdown": "",
        },
    ),
    "inprocess.health_check.CudaHealthCheck": "timeout=datetime.timedelta(seconds=30)",
    "inprocess.health_check.CudaHealthCheck.__call__": "state, train_ex=None",
    "inprocess.health_check.HPState": None,
    **below(
        "inprocess.abort",
        {
            "Compose": "*instances",
            "AbortTransformerEngine": None,
            "HPCheckpointingAbort": None,
            "HPAbortTorchDistributed": None,
            "HPDataLoaderAbort": None,
            "CheckpointlessAbortManager": "",
            "CheckpointlessAbortManager.get_default_checkpointless_abort": "",
            "CheckpointlessAbortManager.create_custom_abort": "*abort_instances",
            "CheckpointlessAbortManager.override_abort": "abort_compose, abort_type, new_abort",
            "CheckpointlessFinalizeCleanup": "",
            "CheckpointlessFinalizeCleanup.__call__": "*a, **kw",
            "CheckpointlessFinalizeCleanup.register_attributes": "trainer",
        },
    ),
    **below(
        "inprocess.finalize",
        {"abort_megatron": "", "abort_te": "", "cleanup_rope": "", "cleanup_ddp": ""},
    ),
    "recovery.CheckpointManager": "enable_checksum=False, enable_offload=False",
    "recovery.CheckpointManager.global_step": None,
    "recovery.CheckpointManager.rng_states": None,
    **below("recovery.CheckpointManager", MANAGER),
    "recovery.MemoryChecksumManager": "",
    "recovery.ParameterUpdateLock": "",
    "recovery.PEFTCheckpointManager": "*args, **kwargs",
    **below("recovery.PEFTCheckpointManager", MANAGER),
    "recovery.PEFTCheckpointManager.maybe_save_base_model": "trainer",
    "recovery.PEFTCheckpointManager.try_base_model_checkpointless_load": "trainer",
    "recovery.PEFTCheckpointManager.is_adapter_key": "key",
}

LIGHTNINGS: Names = {
    "CheckpointlessCallback": (
        "enable_inprocess=False, enable_checkpointless=False, enable_checksum=False, "
        "clean_tensor_hook=False, clean_lightning_module=False"
    ),
    **below(
        "CheckpointlessCallback",
        {
            "get_wrapper_from_trainer": "trainer",
            "on_train_batch_start": "trainer, pl_module, batch, batch_idx, *args, **kwargs",
            "on_train_batch_end": "trainer, pl_module, outputs, batch, batch_idx",
            "get_peft_callback": "trainer",
            "_try_adapter_checkpointless_restore": "trainer, params_to_save",
        },
    ),
    "CheckpointlessCompatibleConnector.resume_start": "checkpoint_path=None",
    "CheckpointlessCompatibleConnector.resume_end": "",
    "HPFaultInjectionCallback": None,
}

NEMOS = {
    "setup": "trainer",
    "setup_distributed": "",
    "load_model_state_dict": "checkpoint, strict=True",
    "get_wrapper": "",
    "is_peft": "",
    "teardown": "",
}

KEPT = MEGATRONS | below("local", NVRX) | HYPERPODS
if find_spec("lightning") is not None:
    KEPT |= below("integrations.lightning", LIGHTNINGS)


def found(name: str) -> Any:
    """What has a name below the package."""
    return resolve_name(f"dist_ckpt_strategies.{name}")


@pytest.mark.parametrize("name", KEPT)
def test_the_name_is_kept_and_calls_as_the_reference_states_them_are_understood(name: str) -> None:
    parameters = KEPT[name]
    assert found(name) is not None
    if parameters is not None:
        require_understood(found(name), parameters)


@pytest.mark.parametrize("name", ["from_state_dict", "to_state_dict"])
def test_a_sharded_state_is_made_and_turned_back_by_megatrons_signatures(name: str) -> None:
    ours = own_parameters(getattr(local.MCoreTensorAwareStateDict, name))
    theirs = own_parameters(getattr(tensor_aware_class(), name))

    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


def test_the_abstract_members_are_those_of_the_reference() -> None:
    strategies = {"replicate", "retrieve_execute", "retrieve_plan"}

    assert local.ReplicationStrategy.__abstractmethods__ == strategies
    assert inspect.isabstract(local.LazyReplicationStrategyBuilder)
    assert local.TensorAwareStateDict.__abstractmethods__ == TENSOR_AWARE.keys() - {"values"}


WRAPPER_PARAMETERS = {
    "finalize": None,
    "health_check": None,
    "hp_api_factory": None,
    "abort_timeout": None,
    "enabled": True,
    "trace_file_path": None,
    "async_raise_before_abort": True,
    "early_abort_communicator": False,
    "checkpoint_manager": None,
    "check_memory_status": True,
}


def test_the_wrapper_takes_the_documented_parameters_by_name() -> None:
    own = {p.name: p for p in own_parameters(inprocess.HPWrapper)}

    assert {name: own[name].default for name in WRAPPER_PARAMETERS} == WRAPPER_PARAMETERS
    assert all(one.kind is one.KEYWORD_ONLY for one in own.values())
    (default_abort,) = own["abort"].default.instances
    assert isinstance(default_abort, inprocess.HPAbortTorchDistributed)


@pytest.mark.parametrize("name", NEMOS)
def test_the_strategy_of_nemo_has_the_documented_methods(name: str) -> None:
    own = own_parameters(getattr(strategy_class(object), name))
    expected = [part.partition("=")[0] for part in NEMOS[name].split(", ") if part]

    assert [parameter.name for parameter in own] == expected


def test_the_resumption_of_nemo_takes_the_documented_parameters() -> None:
    setup: Any = getattr(auto_resume_class(object), "setup")  # noqa: B009 - it is made here
    own = own_parameters(setup)

    assert [(p.name, p.default) for p in own[1:]] == [("model", None), ("force_setup", False)]
