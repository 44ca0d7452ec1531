"""Saves that repeat the one before: told in trainings with faults, and in no honest one."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dist_ckpt_strategies import (
    ManagerOptions,
    SavePolicy,
    TieredCheckpointManager,
    installed,
    save,
    save_async,
)
from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.integrations import dcp
from dist_ckpt_strategies.local import LocalCheckpointManager
from dist_ckpt_strategies.strategies.safetensors import PackSaveShardedStrategy
from tests.support.entries import PACKS, logged, outcome, require_failure, require_on_ranks

pytestmark = pytest.mark.multiprocess

Save = Callable[[dict[str, Any], int], object]


class Training:
    """A model with a frozen part, tied weights and an average, its rows on two ranks."""

    def __init__(self, rank: int, rate: float = 0.1) -> None:
        torch.manual_seed(rank)
        self.rank, self.num_done = rank, 0
        self.layers = {name: nn.Parameter(torch.randn(64, 96)) for name in ("base", "one", "two")}
        self.layers["base"].requires_grad_(False)  # noqa: FBT003 - torch's
        self.mean = self.layers["one"].detach().clone()
        self.optimizer = torch.optim.AdamW(self.layers.values(), lr=rate)
        self.step(0)  # makes the moments
        self.optimizer.param_groups[0]["lr"] = rate

    def step(self, rate: float | None = None) -> None:
        if rate is not None:
            self.optimizer.param_groups[0]["lr"] = rate
        for layer in self.layers.values():
            layer.grad = torch.randn_like(layer) if layer.requires_grad else None
        self.optimizer.step()
        self.mean.lerp_(self.layers["one"].detach(), 0.1)
        self.num_done += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """By key; the layer ``two`` is also the head."""
        found = {f"model.{name}.weight": layer.detach() for name, layer in self.layers.items()}
        found |= {"model.head.weight": found["model.two.weight"], "ema_model.one.weight": self.mean}
        for name, layer in self.layers.items():
            for what, held in self.optimizer.state.get(layer, {}).items():
                found[f"optimizer.state.{what}.{name}.weight"] = held.detach()
        return found

    def state(self, tensors: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
        shards: dict[str, Any] = {}
        for key, tensor in (tensors or self.tensors()).items():
            where = [(0, self.rank, 2)] if tensor.dim() else []
            replica = 0 if tensor.dim() else self.rank
            shards[key] = ShardedTensor.from_rank_offsets(key, tensor, *where, replica_id=replica)
        random = ShardedObject("rng", torch.get_rng_state(), (2,), (self.rank,))
        return {"shards": shards, "rng": random, "num_done": self.num_done}


def by_save(root: Path) -> Save:
    strategy = PackSaveShardedStrategy()
    return lambda state, step: save(state, root / f"iter_{step}", strategy)


def by_save_async(root: Path) -> Save:
    strategy = PackSaveShardedStrategy()
    return lambda state, step: save_async(state, root / f"step{step}" / "actor", strategy).wait()


def by_megatrons(root: Path) -> Save:
    def act(state: dict[str, Any], step: int) -> None:
        place = root / f"iter_{step}"
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(state, str(place))

    return act


def by_dcp(root: Path) -> Save:
    mesh = init_device_mesh("cpu", (2,))
    writer = dcp.PackStorageWriter(root)

    def act(state: dict[str, Any], step: int) -> None:
        tensors = {
            key: DTensor.from_local(t.data, mesh, [Shard(0)]) if t.data.dim() else t.data
            for key, t in state["shards"].items()
        }
        dcp.save(tensors | {"step": step}, root / f"step-{step}", storage_writer=writer)

    return act


def by_manager(root: Path, tier: str) -> Save:
    local = LocalCheckpointManager(root / "local")
    policy = SavePolicy(should_save=lambda _: tier)
    options = ManagerOptions(strategy=PackSaveShardedStrategy())
    manager = TieredCheckpointManager(root / tier, local=local, policy=policy, options=options)

    def act(state: dict[str, Any], step: int) -> None:
        assert manager.save(step, state)
        manager.wait()

    return act


def in_latest(root: Path) -> Save:
    """Steps have no numbers."""
    strategy = PackSaveShardedStrategy()
    return lambda state, _: save(state, root / "latest", strategy, overwrite=True)


def run_honest(rank: int, begin: Callable[[Path], Save], root: Path) -> None:
    """Trainings without a fault."""
    dist.barrier()
    training, act = Training(rank), begin(root / "honest")
    training.mean.zero_()
    step = 0

    def go(rate: float | None = None, *, updates: int = 1) -> None:
        nonlocal step
        for _ in range(updates):
            training.step(rate)
            step += 1
        act(training.state(), step)

    found = logged(".sharded.unchanged")
    for _ in range(3):
        go(0.0)  # warm-up, in which the average moves at first
        training.mean.copy_(training.layers["one"].detach())
    for _ in range(2):
        go(0.1)
    training.layers["one"].requires_grad_(False)  # noqa: FBT003
    go(updates=2)
    training.layers["base"].requires_grad_(True)  # noqa: FBT003 - new moments: new arrays
    go()
    go()
    assert not found, found


def run_faults(rank: int, begin: Callable[[Path], Save], root: Path, way: str) -> None:
    """In each training one thing stands still from the third save on."""
    for number, (stale, words) in enumerate(
        [
            (".weight", ("no update was applied", "4 of 4 model", "4 of 4 optimizer")),
            ("optimizer.", ("the weights have changed", "4 of 4 optimizer")),
            ("model.", ("weights changed before", "4 of 4 model", "0 of 4 optimizer")),
        ]
    ):
        dist.barrier()
        training, act = Training(rank), begin(root / f"fault{number}")
        kept: dict[str, torch.Tensor] = {}
        found = logged(".sharded.unchanged")
        for step in (1, 2, 3):
            training.step()
            tensors = training.tensors()
            if step == 2:
                kept = {k: t.clone() for k, t in tensors.items() if stale in k and t.dim()}
            act(training.state(tensors | (kept if step > 2 else {})), 10 * step)
        assert len(found) == (rank == 0), found
        for text in found:
            assert "unchanged since" in text, text
            assert "weight" in text, text
            # Local checkpoints keep what each rank holds as arrays of their own.
            assert way == "local" or all(word in text for word in words), text


def run_way(rank: int, name: str, root: Path) -> None:
    ways: dict[str, Callable[[Path], Save]] = {
        "save": by_save,
        "save_async": by_save_async,
        "latest": in_latest,
        "megatron": by_megatrons,
        "dcp": by_dcp,
        "global": lambda place: by_manager(place, "global"),
        "local": lambda place: by_manager(place, "local"),
    }
    with installed() if name == "megatron" else nullcontext():
        run_honest(rank, ways[name], root)
        run_faults(rank, ways[name], root, name)


WAYS = ("save", "save_async", "latest", "megatron", "dcp", "global", "local")


@pytest.mark.parametrize("name", WAYS)
def test_a_standing_state_is_told_and_an_honest_training_is_not(name: str, tmp_path: Path) -> None:
    require_on_ranks(2, run_way, name, tmp_path, default=PACKS)


def raise_before_the_commit(rank: int, root: Path) -> None:
    """What one rank asks for holds on both; later saves go on."""
    training, strategy = Training(rank), PackSaveShardedStrategy()
    save(training.state(), root / "iter_1", strategy)
    how: Any = {"on_unchanged": "raise" if rank else "ignore"}
    for is_async in (False, True):

        def again() -> None:
            place = root / "iter_2"
            if is_async:  # noqa: B023
                save_async(training.state(), place, strategy, **how).wait()
            else:
                save(training.state(), place, strategy, **how)

        words = "iter_2: unchanged since", "iter_1: 4 of 4 model arrays, 4 of 4", "nothing was"
        require_failure(outcome(again), PlanError, *words)
        assert not (root / "iter_2" / "index").exists()
    save(training.state(), root / "copy_of_1", strategy, on_unchanged="raise")  # the same step
    training.step()
    for is_second in (False, True):  # a step that is saved again repeats nothing
        how = {"on_unchanged": "raise", "overwrite": is_second}
        save(training.state(), root / "iter_2", strategy, **how)
    require_failure(
        outcome(lambda: save(training.state(), root / "z", ("zarr", 1), on_unchanged="raise")),
        StrategyError,
        "on_unchanged",
    )
    # A frozen model without an optimizer; then other shards of the same arrays.
    frozen = {k: t for k, t in training.tensors().items() if k.startswith("model.")}
    strategy = PackSaveShardedStrategy()
    for step in (1, 2):
        save(training.state(frozen), root / f"frozen_{step}", strategy, on_unchanged="raise")
    for number, ranks in enumerate(((0, 1), (1, 0), (1, 0))):
        training.rank = ranks[rank]
        place, state = root / f"other_{number}", training.state()
        found = outcome(partial(save, state, place, strategy, on_unchanged="raise"))
        assert (found is None) == (number < 2), found
    copies_of_a_step_are_silent(Training(rank), root / "copies")


def copies_of_a_step_are_silent(training: Training, root: Path) -> None:
    """Their names differ in more than numbers; a later step is told apart by its common state."""
    strategy = PackSaveShardedStrategy()
    how: Any = {"on_unchanged": "raise"}
    for name in ("epoch=0-step=20", "epoch=0-step=20-v1", "last", "best_0.25"):
        save(training.state(), root / name, strategy, **how)
    training.num_done += 1
    again = partial(save, training.state(), root / "final", strategy, **how)
    require_failure(outcome(again), PlanError, "no update was applied", "best_0.25")


def test_raise_keeps_a_repeated_save_from_the_commit(tmp_path: Path) -> None:
    require_on_ranks(2, raise_before_the_commit, tmp_path, default=PACKS)
