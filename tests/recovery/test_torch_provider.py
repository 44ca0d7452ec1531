"""Plain torch trainings: the provider changes nothing, and a lost rank goes on bit for bit."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.recovery import CheckpointManager, TorchStateProvider
from tests.support.tensors import bits

optim = torch.optim
OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 0.01, weight_decay=0.1),
    "Adamax": lambda p: optim.Adamax(p, 0.01),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "Adadelta": lambda p: optim.Adadelta(p, 0.01),
    "SGD": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "plain SGD": lambda p: optim.SGD(p, 0.01),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01, initial_accumulator_value=0.1),
}
SCHEDULES: list[Any] = [
    lambda o: schedules.StepLR(o, 2, 0.5),
    lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    lambda o: schedules.MultiStepLR(o, [2, 4], 0.1),
    lambda o: schedules.LambdaLR(o, lambda step: 0.9**step),
    lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    lambda o: schedules.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.5, 2), schedules.MultiStepLR(o, [2], 0.1)], [3]
    ),
    lambda o: schedules.LinearLR(o, 0.1),
    lambda o: schedules.LinearLR(o, 0.1),
]
"""One for each of the optimizers."""
FAULTS = ((1, True, False), (2, False, True), (4, False, False), (5, True, True))
"""Of a step: whether it has voted, and whether the same provider takes over."""


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


def make(makers: tuple[Any, Any], seed: int) -> tuple[nn.Module, Any, Any]:
    found = model(seed)
    with torch.no_grad():
        next(found.parameters())[0, 0] = -0.0
    optimizer = makers[0](found.parameters())
    return found, optimizer, makers[1](optimizer)


def go_on(
    manager: CheckpointManager, found: nn.Module, provider: TorchStateProvider, until: int
) -> None:
    manager.track(provider)
    while provider.step < until:
        manager.begin_step()
        train(found, range(provider.step, provider.step + 1), manager.vote)
        with manager.updating():
            provider.apply_update()
        manager.end_step()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "makers", list(zip(OPTIMIZERS.values(), SCHEDULES, strict=True)), ids=OPTIMIZERS
)
def test_a_training_with_a_provider_is_that_without_and_others_continue_it(
    makers: tuple[Any, Any],
) -> None:
    """At each fault a new provider takes over or the same; statistics of BatchNorm move once."""
    found, optimizer, schedule = make(makers, 1)
    before = state_of(found)
    provider = TorchStateProvider(found, optimizer, schedule)
    assert state_of(found) == before
    torch.manual_seed(5)
    manager = CheckpointManager(enable_checksum=True)
    for fault, has_voted, reuses in FAULTS:
        go_on(manager, found, provider, fault)
        manager.begin_step()
        train(found, range(fault, fault + 1), manager.vote if has_voted else lambda: None)
        if not reuses:
            found, optimizer, schedule = make(makers, 1 + fault)
            provider = TorchStateProvider(found, optimizer, schedule)
        assert manager.try_checkpointless_load(provider) is not None, manager.last_failure
        assert provider.step == fault + has_voted
        torch.rand(3)  # the step draws what it drew before all the same
    go_on(manager, found, provider, 7)

    plain, other, schedule = make(makers, 1)

    def update() -> None:
        other.step()
        schedule.step()

    torch.manual_seed(5)
    train(plain, range(7), update)
    assert state_of(found) == state_of(plain)
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]


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
    optimizer.param_groups[0]["rule"] = None
    provider, manager = TorchStateProvider(found, optimizer), CheckpointManager(enable_offload=True)
    manager.track(provider)
    next(found.parameters()).untyped_storage().resize_(0)
    with pytest.raises(PlanError, match=r"model: module/.* its memory was released"):
        manager.track(provider)
    with pytest.raises(PlanError, match=r"model: module/.* its memory was released"):
        manager.maybe_offload_checkpoint()
