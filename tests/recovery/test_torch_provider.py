"""Plain torch trainings: the provider changes nothing, and a lost rank goes on bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.recovery import CheckpointManager, TorchStateProvider
from tests.support.tensors import bits

OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 2))


def train(found: nn.Module, steps: range, update: Any) -> None:
    """With the same batch whenever a step is run; dropout is drawn anew."""
    for step in steps:
        batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        found.zero_grad()
        found(batch).square().mean().backward()
        update()


def state_of(found: nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in found.state_dict().items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_with_a_provider_is_that_without_and_another_continues_it(name: str) -> None:
    def make(seed: int) -> tuple[nn.Module, Any, Any]:
        found = model(seed)
        with torch.no_grad():
            next(found.parameters())[0, 0] = -0.0
        optimizer = OPTIMIZERS[name](found.parameters())
        return found, optimizer, schedules.LinearLR(optimizer, 0.1, total_iters=9)

    first, optimizer, schedule = make(1)
    before = state_of(first)
    old = TorchStateProvider(first, optimizer, schedule)
    assert state_of(first) == before
    torch.manual_seed(5)
    train(first, range(3), old.apply_update)
    manager = CheckpointManager()
    manager.save_checkpoint(old)
    second, other, schedule = make(2)
    new = TorchStateProvider(second, other, schedule)
    assert manager.try_checkpointless_load(new) is not None
    train(second, range(3, 6), new.apply_update)

    plain, optimizer, schedule = make(1)

    def update() -> None:
        optimizer.step()
        schedule.step()

    torch.manual_seed(5)
    train(plain, range(6), update)
    assert state_of(second) == state_of(plain)


def with_statistics(seed: int) -> tuple[nn.Module, TorchStateProvider]:
    found = model(seed)
    found[2] = nn.Identity()  # type: ignore[operator]
    return found, TorchStateProvider(found, torch.optim.Adam(found.parameters(), lr=0.01))


@pytest.mark.parametrize("reuses", [True, False], ids=["same provider", "new provider"])
@pytest.mark.parametrize("has_voted", [True, False], ids=["after the vote", "before the vote"])
def test_statistics_of_a_step_that_is_run_again_move_once(*, reuses: bool, has_voted: bool) -> None:
    expected, provider = with_statistics(1)
    train(expected, range(3), provider.apply_update)

    found, provider = with_statistics(1)
    train(found, range(1), provider.apply_update)
    provider.set_step(1)
    manager = CheckpointManager(enable_checksum=True)
    manager.track(provider)
    manager.begin_step()
    train(found, range(1, 2), manager.vote if has_voted else lambda: None)
    if not reuses:
        found, provider = with_statistics(2)
    loaded = manager.try_checkpointless_load(provider)
    assert loaded is not None
    train(found, range(1 + has_voted, 3), provider.apply_update)

    assert loaded["global_step"] == 1 + has_voted
    assert state_of(found) == state_of(expected)


def test_an_optimizer_whose_beginning_is_not_known_is_refused_unless_it_has_begun() -> None:
    found = model()
    optimizer = torch.optim.Rprop(found.parameters())
    with pytest.raises(StrategyError, match="Rprop: its state before the first step"):
        TorchStateProvider(found, optimizer)
    train(found, range(1), optimizer.step)

    assert TorchStateProvider(found, optimizer).parts()["model"]
    damped = torch.optim.SGD(model().parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(StrategyError, match="SGD"):
        TorchStateProvider(found, damped)


def test_state_that_cannot_be_sent_to_another_rank_is_refused_at_the_start() -> None:
    found = model()
    optimizer = torch.optim.SGD(found.parameters(), lr=0.1)
    optimizer.param_groups[0]["rule"] = lambda: None
    with pytest.raises(PlanError, match="cannot be sent to another rank"):
        CheckpointManager().track(TorchStateProvider(found, optimizer))


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda o: schedules.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 4], 0.1),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.5, 2), schedules.MultiStepLR(o, [2], 0.1)], [3]
    ),
}


def rates_of(make_schedule: Any, faults: set[int]) -> dict[int, float]:
    """The rate of each step; after the vote of a faulty one a new training takes over."""

    def made() -> tuple[Any, TorchStateProvider]:
        found = model()
        optimizer = torch.optim.AdamW(found.parameters(), lr=0.1)
        return optimizer, TorchStateProvider(found, optimizer, make_schedule(optimizer))

    manager, rates = CheckpointManager(), {}
    optimizer, provider = made()
    while provider.step < 7:
        manager.track(provider)
        rates[provider.step] = optimizer.param_groups[0]["lr"]
        manager.begin_step()
        manager.vote()
        if provider.step in faults:
            optimizer, provider = made()
            assert manager.try_checkpointless_load(provider) is not None, manager.last_failure
            continue
        with manager.updating():
            provider.apply_update()
        manager.end_step()
    return rates


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_continues_in_a_new_training(name: str) -> None:
    expected = rates_of(SCHEDULES[name], set())

    assert len(set(expected.values())) > 1
    assert rates_of(SCHEDULES[name], {1, 2, 4}) == expected
