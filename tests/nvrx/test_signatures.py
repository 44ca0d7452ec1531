"""Calls that NVRx's own classes take, ours take too."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from dist_ckpt_strategies import local
from tests.support.kept import own_parameters

pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext: tox -e nvrx")

MODULES = {
    "BasicTensorAwareStateDict": "basic_state_dict",
    "CliqueReplicationStrategy": "replication.strategies",
    "ExchangePlan": "replication.group_utils",
    "LazyCliqueReplicationStrategy": "replication.strategies",
    "LazyReplicationStrategyBuilder": "replication.strategies",
    "LocalCheckpointManager": "ckpt_managers.local_manager",
    "ReplicationStrategy": "replication.strategies",
    "TensorAwareStateDict": "base_state_dict",
}
LEFT_OUT = {
    "ExchangePlan": {"plan"},  # ours is frozen
    "LocalCheckpointManager": {"rank"},  # of no documented use
}


def named(parameter: inspect.Parameter) -> tuple[str, Any]:
    return parameter.name, parameter.default


def members_of(cls: Any) -> list[str]:
    return [name for name, _ in inspect.getmembers(cls) if not name.startswith("_")]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_member_is_there_with_the_parameters_it_had(name: str) -> None:
    ours = getattr(local, name)
    theirs = getattr(
        import_module(f"nvidia_resiliency_ext.checkpointing.local.{MODULES[name]}"), name
    )
    for member in set(members_of(theirs)) - LEFT_OUT.get(name, set()):
        own, their = getattr(ours, member), getattr(theirs, member)
        if not callable(their) or member == "retrieve_execute":
            continue
        expected = [named(parameter) for parameter in own_parameters(their)]
        assert [named(p) for p in own_parameters(own)[: len(expected)]] == expected, member
    if name != "ExchangePlan":
        expected = [named(parameter) for parameter in own_parameters(theirs)]
        assert [named(p) for p in own_parameters(ours)[: len(expected)]] == expected
