"""Fine-tuning: the base model is noted once, and only the rest travels."""

from typing import Any

import pytest
import torch
from torch import nn

from dist_ckpt_strategies.recovery import PEFTCheckpointManager, TorchStateProvider
from tests.support.ranks import run_processes

LOST = 2


def make(seed: int) -> tuple[Any, TorchStateProvider]:
    """A frozen base with an adapter beside it."""
    torch.manual_seed(seed)
    found = nn.ModuleDict({"base": nn.Linear(64, 64), "lora": nn.Linear(64, 2)})
    found["base"].requires_grad_(requires_grad=False)
    optimizer = torch.optim.AdamW(found["lora"].parameters(), lr=0.01)
    return found, TorchStateProvider(found, optimizer)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("decoder.adapter.linear_in", True),
        ("decoder.adapters", True),
        ("chosen.weight", True),
        ("decoder.weight", False),
        (("w", nn.Parameter(torch.zeros(1))), True),
        (("w", nn.Parameter(torch.zeros(1), requires_grad=False)), False),
    ],
)
def test_adapters_are_known_by_name_or_by_their_gradient(key: Any, expected: bool) -> None:
    manager = PEFTCheckpointManager()
    manager.params_to_save.add("chosen.weight")

    assert manager.is_adapter_key(key) is expected


def test_the_base_model_is_noted_once_and_offloaded_with_the_rest() -> None:
    first, provider = make(1)
    manager: Any = PEFTCheckpointManager(enable_checksum=True, enable_offload=True)
    assert not manager.base_model_weights
    manager.save_checkpoint(provider)
    names = ["model/module/base.bias", "model/module/base.weight"]
    noted = [manager.base_model_weights[name] for name in names]
    manager.maybe_save_base_model(make(2)[1])
    assert manager.base_model_keys_to_extract == sorted(manager.base_model_weights) == names
    assert all(manager.base_model_weights[n] is one for n, one in zip(names, noted, strict=True))

    manager.maybe_offload_checkpoint()
    assert torch.equal(manager.base_model_weights[names[1]], first["base"].weight)
    second, new = make(2)
    assert manager.try_base_model_checkpointless_load(new) is not None
    assert manager.try_checkpointless_load(new) is not None, manager.last_failure
    assert all(map(torch.equal, first.parameters(), second.parameters()))


def continue_after(rank: int, lost: tuple[int, ...]) -> Any:
    first, provider = make(1)
    manager = PEFTCheckpointManager(timeout_s=60)
    assert manager.try_base_model_checkpointless_load(provider) is None
    manager.track(provider)
    manager.begin_step()
    first["lora"](first["base"](torch.ones(3, 64))).sum().backward()
    manager.vote()
    if rank in lost:
        manager = PEFTCheckpointManager(timeout_s=60)
    second, new = make(2)
    base = manager.try_base_model_checkpointless_load(new)
    if base is None:
        return str(manager.last_failure)
    loaded = manager.try_checkpointless_load(new)
    assert loaded is not None, manager.last_failure
    provider.apply_update()  # on ranks that have finished the step already the second time
    is_equal = torch.equal(first["base"].weight, second["base"].weight)
    assert torch.equal(first["lora"].weight, second["lora"].weight) == (rank in lost)
    return is_equal, loaded["global_step"], base["received_nbytes"], loaded["received_nbytes"]


def base_of_lost_rank(rank: int) -> tuple[bool, bool]:
    """The last one is lost, a base model is damaged, and all ask for the base."""
    first, provider = make(1)
    manager = PEFTCheckpointManager(enable_checksum=True, timeout_s=60)
    manager.track(provider)
    expected = first["base"].weight.detach().clone()
    if rank == 0:
        first["base"].weight.data[3, 3] += 1
    if rank == LOST:
        manager = PEFTCheckpointManager(enable_checksum=True, timeout_s=60)
    second, new = make(2)
    base = manager.try_base_model_checkpointless_load(new)
    return base is not None, torch.equal(second["base"].weight, expected)


def lose_in_turn(rank: int) -> list[Any]:
    return [continue_after(rank, (LOST,)), continue_after(rank, (0, 1, 2)), base_of_lost_rank(rank)]


@pytest.mark.multiprocess
def test_a_lost_rank_gets_the_base_model_and_the_adapter_each_by_itself() -> None:
    """Where no rank has the base model all ranks see that; a damaged one is not sent."""
    served, lost, damaged = zip(*run_processes(3, lose_in_turn), strict=True)

    base_nbytes = 4 * (64 * 64 + 64)
    num_adapter = 64 * 2 + 2
    adapter_nbytes = 4 * (3 * num_adapter + 2)  # with two moments, and a counter of each tensor
    assert served == ((True, 1, 0, 0), (True, 1, 0, 0), (True, 1, base_nbytes, adapter_nbytes))
    assert all("ranks 0, 1, 2: has no base model" in one for one in lost)
    assert damaged == ((True, True),) * 3
