"""The names of NVRx's local checkpoints that this package keeps, and what tests each.

The list follows the API reference of ``nvidia_resiliency_ext.checkpointing.local.replication``, the
usage guide of its local checkpoints, and Megatron-Core's ``tensor_aware_state_dict``. NVRx's own
signatures are compared in ``tests/nvrx``, where it is installed.
"""

from __future__ import annotations

import inspect
from abc import ABC
from typing import Any, Generic

import pytest

from dist_ckpt_strategies import local
from dist_ckpt_strategies.megatron.types import tensor_aware_class
from tests.support.kept import Kept, own_parameters, require_tested, require_understood

REPLICATION = "tests/local/test_replication.py::"
BASIC = "tests/local/test_basic_state_dict.py::"
MCORE = "tests/local/test_mcore_state_dict.py::"
MANAGER = "tests/local/test_manager.py::"

COPIED = f"{REPLICATION}test_a_clique_copies_its_states_and_gives_them_back"
NOBODY = f"{REPLICATION}test_what_nobody_has_is_an_error_on_all_members_of_the_clique_and_no_other"
MADE = f"{REPLICATION}test_cliques_are_made_once_and_numbers_that_do_not_fit_are_refused"
NO_RANKS = f"{REPLICATION}test_a_manager_refuses_a_strategy_that_names_no_ranks"
POPPED = f"{BASIC}test_what_is_popped_and_inserted_is_the_same_state"
NEW = f"{BASIC}test_new_tensors_have_the_old_shapes_and_dtypes"
COPIES = f"{BASIC}test_copies_on_the_cpu_are_copies"
FOUND = f"{BASIC}test_tensors_are_found_in_nested_dicts_lists_and_tuples_in_order"
REFILLED = f"{MCORE}test_a_hollow_state_is_filled_again"
LAYOUTS = f"{MCORE}test_a_state_comes_back_in_its_own_layout_and_in_others"
RECOVERED = f"{MANAGER}test_what_one_member_of_each_clique_has_is_enough"
LOST = f"{MANAGER}test_a_lost_clique_means_the_save_before_or_an_error_everywhere"
QUEUED = "tests/nvrx/test_queue.py::test_nvrxs_queue_finalises_a_local_save"


def kept(name: str, parameters: str | None, test: str) -> Kept:
    return Kept(f"local.{name}", parameters, test, "dist_ckpt_strategies")


def strategy(name: str, test: str, execute: str = "*args, **kwargs") -> list[Kept]:
    """The methods of a replication strategy."""
    return [
        kept(f"{name}.replicate", "local_ckpt, id_", test),
        kept(f"{name}.retrieve_execute", execute, test),
        kept(f"{name}.retrieve_plan", "globally_available_ids, wanted", test),
    ]


def tensor_aware(name: str, filled: str, made: str, copied: str) -> list[Kept]:
    """The members of a tensor-aware state dict."""
    return [
        kept(f"{name}.pop_tensors", "", filled),
        kept(f"{name}.tensors", None, filled),
        kept(f"{name}.is_hollow", None, filled),
        kept(f"{name}.insert_tensors", "tensor_data", filled),
        kept(f"{name}.init_tensors", "", made),
        kept(f"{name}.copy_tensors_to_cpu", "non_blocking=False", copied),
        kept(f"{name}.restore_tensor_device", "non_blocking=True", copied),
        kept(f"{name}.values", "", filled),
        kept(f"{name}.state_dict", None, filled),
    ]


KEPT = [
    kept("CliqueReplicationStrategy", "local_group, target_device='cpu'", COPIED),
    kept(
        "CliqueReplicationStrategy.from_replication_params",
        "replication_jump=0, replication_factor=2",
        MADE,
    ),
    *strategy("CliqueReplicationStrategy", COPIED, "plan, my_data"),
    kept("LazyCliqueReplicationStrategy", "replication_jump=0, replication_factor=2", MADE),
    *strategy("LazyCliqueReplicationStrategy", COPIED),
    kept("LazyReplicationStrategyBuilder", "", MADE),
    kept("LazyReplicationStrategyBuilder.replication_strategy", None, MADE),
    *strategy("LazyReplicationStrategyBuilder", COPIED),
    kept("ReplicationStrategy", "", NO_RANKS),
    *strategy("ReplicationStrategy", NO_RANKS),
    kept("NoReplicasAvailableError", None, NOBODY),
    kept("ExchangePlan", None, COPIED),
    kept("ExchangePlan.entries", None, COPIED),
    kept("ExchangePlan.required_ids", "rank=None", COPIED),
    kept(
        "LocalCheckpointManager",
        "root_local_ckpt_dir, session_id='', repl_strategy=None",
        RECOVERED,
    ),
    kept("LocalCheckpointManager.save", "state_dict, iteration, is_async=False", RECOVERED),
    kept("LocalCheckpointManager.load", "", RECOVERED),
    kept("LocalCheckpointManager.find_latest", "", LOST),
    kept("LocalSaveRequest.for_nvrx", "", QUEUED),
    kept("BasicTensorAwareStateDict", "state_dict", FOUND),
    *tensor_aware("TensorAwareStateDict", POPPED, NEW, COPIES),
    *tensor_aware("BasicTensorAwareStateDict", POPPED, NEW, COPIES),
    *tensor_aware("MCoreTensorAwareStateDict", REFILLED, REFILLED, REFILLED),
    kept(
        "MCoreTensorAwareStateDict.from_state_dict",
        "sharded_state_dict, algo='fully_parallel', parallelization_group=None, "
        "cached_metadata=None",
        LAYOUTS,
    ),
    kept("MCoreTensorAwareStateDict.to_state_dict", "sharded_state_dict, algo='atomic'", LAYOUTS),
]

BASES = {
    "BasicTensorAwareStateDict": (local.TensorAwareStateDict,),
    "CliqueReplicationStrategy": (local.ReplicationStrategy,),
    "LazyCliqueReplicationStrategy": (local.LazyReplicationStrategyBuilder,),
    "LazyReplicationStrategyBuilder": (local.ReplicationStrategy, ABC, Generic),
    "MCoreTensorAwareStateDict": (local.TensorAwareStateDict,),
    "NoReplicasAvailableError": (Exception,),
    "ReplicationStrategy": (ABC,),
    "TensorAwareStateDict": (ABC,),
}

every_name = pytest.mark.parametrize("one", KEPT, ids=lambda one: one.name)


@every_name
def test_the_name_can_be_imported(one: Kept) -> None:
    assert one.find() is not None


@pytest.mark.parametrize("one", [k for k in KEPT if k.parameters is not None], ids=lambda k: k.name)
def test_calls_as_the_reference_states_them_are_understood(one: Kept) -> None:
    require_understood(one)


@every_name
def test_a_test_shows_its_behaviour(one: Kept) -> None:
    require_tested(one)


@pytest.mark.parametrize("name", BASES)
def test_its_bases_are_those_of_the_reference(name: str) -> None:
    found: Any = getattr(local, name)

    assert all(base in found.__mro__ for base in BASES[name])


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
