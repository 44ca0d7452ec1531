"""The names of HyperPod's checkpointless training that this package keeps, and what tests each.

The list follows its API reference. ``abort_instances`` of ``create_custom_abort`` is stated there
as one name for a variable number of parts. A trainer is a StateProvider here, or has one.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from dist_ckpt_strategies import inprocess, recovery
from dist_ckpt_strategies.integrations.nemo import auto_resume_class, strategy_class
from tests.support.kept import Kept, own_parameters, require_tested, require_understood

ABORT = "tests/inprocess/test_abort.py::"
AGENT = "tests/inprocess/test_agent.py::"
FAULTS = "tests/inprocess/test_wrap_faults.py::"
LAUNCHED = "tests/inprocess/test_launched.py::"
WRAP = "tests/inprocess/test_wrap.py::"
LOCK = "tests/recovery/test_update_lock.py::"
MANAGER = "tests/recovery/test_manager.py::"
PEFT = "tests/recovery/test_peft.py::"
SHARDED = "tests/recovery/test_sharded_training.py::"
LIGHTNING = "tests/integrations/test_lightning.py::"
NEMO = "tests/integrations/test_nemo.py::"

RERUN = f"{WRAP}test_a_block_that_raises_is_run_again"
IN_TURN = f"{WRAP}test_methods_out_of_turn_say_so"
SURVIVED = f"{FAULTS}test_a_fault_is_survived"
DEFAULT_ABORT = f"{ABORT}test_the_default_has_the_documented_parts_in_order"
CLEANED = f"{ABORT}test_cleaning_up_can_be_repeated_and_lets_the_trainer_go"
NO_CUDA = f"{ABORT}test_a_process_that_never_used_cuda_passes"
NO_CLIENT = f"{AGENT}test_without_a_client_the_agents_package_is_needed"
STEP_AGAIN = f"{MANAGER}test_a_step_is_run_again_from_the_random_states_of_its_beginning"
STORED = f"{MANAGER}test_random_states_stored_by_hand_are_loaded_again"
SAVED = f"{MANAGER}test_saving_what_is_tracked_does_not_change_how_far_it_is"
OFFLOADED = f"{MANAGER}test_an_offloaded_state_can_be_used_and_the_live_one_is_let_go_of"
TAKEN_OVER = f"{MANAGER}test_a_new_model_takes_over_what_the_old_one_had"
FLIPPED = f"{MANAGER}test_a_byte_that_flips_in_memory_is_found_and_the_tensor_named"
EACH = f"{PEFT}test_a_lost_rank_gets_the_base_model_and_the_adapter_each_by_itself"
NOTED = f"{PEFT}test_the_base_model_is_noted_once_and_offloaded_with_the_rest"
SAME_BITS = f"{LIGHTNING}test_exceptions_and_a_killed_rank_leave_the_result_as_it_is_without_them"
FROM_DISK = f"{LIGHTNING}test_without_an_answer_from_memory_the_connector_loads_the_checkpoint"
FOUND = f"{LIGHTNING}test_the_wrapper_and_the_peft_callback_are_found_on_the_trainer"
ONCE = f"{LIGHTNING}test_adapters_are_asked_for_once"
TOLD = f"{NEMO}test_setting_up_tells_every_part_of_the_trainer"
NO_LOAD = f"{NEMO}test_a_state_from_memory_is_not_loaded_again_and_nothing_is_torn_down"
PUT_OFF = f"{NEMO}test_looking_for_a_checkpoint_is_put_off_until_it_is_forced"
OVER_STORE = f"{NEMO}test_ranks_meet_over_the_base_store_under_keys_of_the_attempt"
IS_PEFT = f"{NEMO}test_a_peft_callback_makes_it_a_peft_training"


def kept(name: str, parameters: str | None, test: str) -> Kept:
    package, _, rest = name.partition(".")
    if package == "recovery":
        return Kept(name, parameters, test, "dist_ckpt_strategies")
    return Kept(rest, parameters, test, f"dist_ckpt_strategies.{package}")


def manager(name: str, load_test: str) -> list[Kept]:
    """The members that both managers have."""
    return [
        kept(f"recovery.{name}.save_checkpoint", "trainer", SAVED),
        kept(
            f"recovery.{name}.delete_checkpoint", "", f"{MANAGER}test_a_deleted_checkpoint_is_gone"
        ),
        kept(f"recovery.{name}.try_checkpointless_load", "trainer", load_test),
        kept(
            f"recovery.{name}.checkpointless_recovery_feasible",
            "trainer, include_checksum_verification=True",
            TAKEN_OVER,
        ),
        kept(f"recovery.{name}.store_rng_states", "", STORED),
        kept(f"recovery.{name}.load_rng_states", "", STORED),
        kept(f"recovery.{name}.maybe_offload_checkpoint", "", OFFLOADED),
    ]


ABORT_PARTS = (
    "AbortTransformerEngine",
    "HPCheckpointingAbort",
    "HPAbortTorchDistributed",
    "HPDataLoaderAbort",
)

KEPT = [
    kept(
        "inprocess.train_utils.wait_rank",
        "",
        f"{LAUNCHED}test_wait_rank_sets_the_variables_that_the_supervisor_assigns",
    ),
    kept("inprocess.train_utils.HPAgentK8sAPIFactory", "", NO_CLIENT),
    kept("inprocess.train_utils.HPAgentK8sAPIFactory.__call__", "", NO_CLIENT),
    kept("inprocess.wrap.HPWrapper.__call__", "fn", RERUN),
    kept("inprocess.wrap.HPCallWrapper", "wrapper", RERUN),
    kept("inprocess.wrap.HPCallWrapper.initialize_barrier", "", RERUN),
    kept("inprocess.wrap.HPCallWrapper.start_hp_fault_handling_thread", "", IN_TURN),
    kept("inprocess.wrap.HPCallWrapper.handle_fn_exception", "call_ex", IN_TURN),
    kept("inprocess.wrap.HPCallWrapper.restart", "term_ex", IN_TURN),
    kept("inprocess.wrap.HPCallWrapper.launch", "fn, *a, **kw", RERUN),
    kept("inprocess.wrap.HPCallWrapper.run", "fn, a, kw", RERUN),
    kept("inprocess.wrap.HPCallWrapper.shutdown", "", f"{WRAP}test_nothing_of_a_call_is_left"),
    kept(
        "inprocess.health_check.CudaHealthCheck",
        "timeout=datetime.timedelta(seconds=30)",
        NO_CUDA,
    ),
    kept("inprocess.health_check.CudaHealthCheck.__call__", "state, train_ex=None", NO_CUDA),
    kept("inprocess.health_check.HPState", None, NO_CUDA),
    kept("inprocess.abort.Compose", "*instances", DEFAULT_ABORT),
    *(kept(f"inprocess.abort.{name}", None, DEFAULT_ABORT) for name in ABORT_PARTS),
    kept("inprocess.abort.CheckpointlessAbortManager", "", DEFAULT_ABORT),
    kept(
        "inprocess.abort.CheckpointlessAbortManager.get_default_checkpointless_abort",
        "",
        DEFAULT_ABORT,
    ),
    kept(
        "inprocess.abort.CheckpointlessAbortManager.create_custom_abort",
        "*abort_instances",
        f"{ABORT}test_a_custom_abort_has_what_it_is_given_and_not_nothing",
    ),
    kept(
        "inprocess.abort.CheckpointlessAbortManager.override_abort",
        "abort_compose, abort_type, new_abort",
        f"{ABORT}test_a_part_is_replaced_in_a_copy",
    ),
    kept("inprocess.abort.CheckpointlessFinalizeCleanup", "", CLEANED),
    kept("inprocess.abort.CheckpointlessFinalizeCleanup.__call__", "*a, **kw", CLEANED),
    kept("inprocess.abort.CheckpointlessFinalizeCleanup.register_attributes", "trainer", CLEANED),
    *(
        kept(f"inprocess.finalize.{name}", "", CLEANED)
        for name in ("abort_megatron", "abort_te", "cleanup_rope", "cleanup_ddp")
    ),
    kept("recovery.CheckpointManager", "enable_checksum=False, enable_offload=False", TAKEN_OVER),
    kept("recovery.CheckpointManager.global_step", None, TAKEN_OVER),
    kept("recovery.CheckpointManager.rng_states", None, STORED),
    *manager("CheckpointManager", TAKEN_OVER),
    kept("recovery.MemoryChecksumManager", "", FLIPPED),
    kept("recovery.ParameterUpdateLock", "", f"{LOCK}test_the_thread_that_holds_the_lock_is_known"),
    kept("recovery.PEFTCheckpointManager", "*args, **kwargs", EACH),
    *manager("PEFTCheckpointManager", EACH),
    kept("recovery.PEFTCheckpointManager.maybe_save_base_model", "trainer", NOTED),
    kept("recovery.PEFTCheckpointManager.try_base_model_checkpointless_load", "trainer", EACH),
    kept(
        "recovery.PEFTCheckpointManager.is_adapter_key",
        "key",
        f"{PEFT}test_adapters_are_known_by_name_or_by_their_gradient",
    ),
]

LIGHTNING_KEPT = [
    kept(
        "integrations.lightning.CheckpointlessCallback",
        "enable_inprocess=False, enable_checkpointless=False, enable_checksum=False, "
        "clean_tensor_hook=False, clean_lightning_module=False",
        SAME_BITS,
    ),
    *(
        kept(f"integrations.lightning.CheckpointlessCallback.{name}", parameters, test)
        for name, parameters, test in (
            ("get_wrapper_from_trainer", "trainer", FOUND),
            (
                "on_train_batch_start",
                "trainer, pl_module, batch, batch_idx, *args, **kwargs",
                SAME_BITS,
            ),
            ("on_train_batch_end", "trainer, pl_module, outputs, batch, batch_idx", SAME_BITS),
            ("get_peft_callback", "trainer", FOUND),
            ("_try_adapter_checkpointless_restore", "trainer, params_to_save", ONCE),
        )
    ),
    kept(
        "integrations.lightning.CheckpointlessCompatibleConnector.resume_start",
        "checkpoint_path=None",
        FROM_DISK,
    ),
    kept("integrations.lightning.CheckpointlessCompatibleConnector.resume_end", "", FROM_DISK),
    kept(
        "integrations.lightning.HPFaultInjectionCallback",
        None,
        f"{LIGHTNING}test_a_fault_on_purpose_happens_once",
    ),
]

NEMO_KEPT = {
    "setup": ("trainer", TOLD),
    "setup_distributed": ("", OVER_STORE),
    "load_model_state_dict": ("checkpoint, strict=True", NO_LOAD),
    "get_wrapper": ("", TOLD),
    "is_peft": ("", IS_PEFT),
    "teardown": ("", NO_LOAD),
}

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
ATTRIBUTES = {
    recovery.CheckpointManager: {
        "global_step",
        "rng_states",
        "checksum_manager",
        "parameter_update_lock",
    },
    recovery.PEFTCheckpointManager: {
        "params_to_save",
        "base_model_weights",
        "base_model_keys_to_extract",
    },
    inprocess.CheckpointlessFinalizeCleanup: {"trainer"},
}

if find_spec("lightning") is not None:
    KEPT += LIGHTNING_KEPT

every_name = pytest.mark.parametrize("one", KEPT, ids=lambda one: one.name)


@every_name
def test_the_name_can_be_imported(one: Kept) -> None:
    assert one.find() is not None


@pytest.mark.parametrize("one", [k for k in KEPT if k.parameters is not None], ids=lambda k: k.name)
def test_calls_as_the_reference_states_them_are_understood(one: Kept) -> None:
    require_understood(one)


@pytest.mark.parametrize("one", [*KEPT, *LIGHTNING_KEPT], ids=lambda one: one.name)
def test_a_test_shows_its_behaviour(one: Kept) -> None:
    require_tested(one)


def test_the_wrapper_takes_the_documented_parameters_by_name() -> None:
    found = {p.name: p for p in own_parameters(inprocess.HPWrapper)}

    assert {name: found[name].default for name in WRAPPER_PARAMETERS} == WRAPPER_PARAMETERS
    assert all(found[name].kind is found[name].KEYWORD_ONLY for name in found)
    (default_abort,) = found["abort"].default.instances
    assert isinstance(default_abort, inprocess.HPAbortTorchDistributed)
    require_tested(kept("inprocess.HPWrapper", None, f"{WRAP}test_unset_parts_are_valid"))


@pytest.mark.parametrize("kind", ATTRIBUTES, ids=lambda kind: kind.__name__)
def test_the_documented_attributes_are_there(kind: Any) -> None:
    made = kind()

    assert [name for name in ATTRIBUTES[kind] if not hasattr(made, name)] == []


def test_a_call_counts_its_steps() -> None:
    call = inprocess.HPCallWrapper(inprocess.HPWrapper())

    assert call.step_upon_restart == 0


@pytest.mark.parametrize("name", NEMO_KEPT)
def test_the_strategy_of_nemo_has_the_documented_methods(name: str) -> None:
    parameters, test = NEMO_KEPT[name]
    found = own_parameters(getattr(strategy_class(object), name))
    expected = [part.partition("=")[0] for part in parameters.split(", ") if part]

    assert [parameter.name for parameter in found] == expected
    require_tested(kept(name, None, test))


def test_the_resumption_of_nemo_takes_the_documented_parameters() -> None:
    setup: Any = getattr(auto_resume_class(object), "setup")  # noqa: B009 - it is made here
    found = own_parameters(setup)

    assert [(p.name, p.default) for p in found[1:]] == [("model", None), ("force_setup", False)]
    require_tested(kept("setup", None, PUT_OFF))
