"""What four ranks do together while one of them fails."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.config import LocalOptions
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
    MCoreTensorAwareStateDict,
)
from dist_ckpt_strategies.recovery import CheckpointManager, Phase
from dist_ckpt_strategies.recovery.provider import InMemoryCheckpoint
from dist_ckpt_strategies.recovery.random_states import (
    capture_random_states,
)
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.support.memory_provider import MemoryProvider
from tests.support.sharding import Cut, Part, no_data, on_grid, replicated, state_of, zeros

LIMIT_S = 6.0
"""How long the ranks wait for each other."""

Action = Callable[[Path], Any]
"""One attempt, in a directory of its own. Collective."""


def cuts() -> list[Cut]:
    """Whole chunks, copies, and pieces that have to move to the writer of their chunk."""
    runs = ((2, 0, 1000), (0, 1000, 200), (2, 1200, 1800), (1, 3000, 96))
    parts = tuple(Part(holder, (start,), (length,)) for holder, start, length in runs)
    return [
        on_grid("grid", (8, 8), (4, 2)),
        replicated(on_grid("copies", (8, 4), (2, 2))),
        Cut("flat", (3096,), torch.float32, parts),
    ]


def saved_state(rank: int) -> dict[str, Any]:
    """Arrays in order and not, an object of each rank, and what all hold alike."""
    state: dict[str, Any] = state_of(rank, cuts())
    across = torch.arange(64, dtype=torch.float32).reshape(8, 8).t()
    state["across"] = ShardedTensor.from_rank_offsets("across", across, (0, rank, 4))
    state["object"] = ShardedObject("object", {"of rank": rank, "x": "y" * 9000}, (4,), (rank,))
    state["common"] = {"iteration": 7}
    return state


def wanted_state(rank: int, *, has_data: bool = False) -> dict[str, Any]:
    """The same to load, cut otherwise."""
    state: dict[str, Any] = state_of(rank, cuts(), zeros if has_data else no_data)
    rows = torch.zeros(32, 2) if has_data else torch.zeros(2, 32).t()
    state["across"] = ShardedTensor.from_rank_offsets("across", rows, (1, rank, 4))
    state["object"] = ShardedObject("object", None, (4,), ((rank + 1) % 4,))
    return state


def _required(rank: int, found: dict[str, Any]) -> None:
    assert found["object"]["of rank"] == (rank + 1) % 4
    assert found["common"] == {"iteration": 7}
    for held in found.values():
        assert not isinstance(held, ShardedTensor)


def save_with(backend: tuple[str, int]) -> Callable[[int, Path], Action]:
    """Save."""

    def prepare(rank: int, shared: Path) -> Action:
        return lambda root: dist_ckpt_strategies.save(
            saved_state(rank), root, backend, timeout_s=LIMIT_S
        )

    return prepare


def save_behind_with(backend: tuple[str, int]) -> Callable[[int, Path], Action]:
    """Save behind training, and wait for it."""

    def prepare(rank: int, shared: Path) -> Action:
        def attempt(root: Path) -> None:
            handle = dist_ckpt_strategies.save_async(
                saved_state(rank), root, backend, timeout_s=LIMIT_S
            )
            handle.wait()

        return attempt

    return prepare


def load_with(backend: tuple[str, int]) -> Callable[[int, Path], Action]:
    """Load what all have saved, in another layout."""

    def prepare(rank: int, shared: Path) -> Action:
        dist_ckpt_strategies.save(saved_state(rank), shared / "whole", backend, timeout_s=LIMIT_S)

        def attempt(root: Path) -> None:
            del root
            found = dist_ckpt_strategies.load(
                wanted_state(rank, has_data=rank % 2 == 0), shared / "whole", timeout_s=LIMIT_S
            )
            _required(rank, found)  # type: ignore[arg-type]

        return attempt

    return prepare


def load_in_two_stages(backend: tuple[str, int]) -> Callable[[int, Path], Action]:
    """Load so that each byte is read once."""

    def prepare(rank: int, shared: Path) -> Action:
        dist_ckpt_strategies.save(saved_state(rank), shared / "whole", backend, timeout_s=LIMIT_S)
        strategy = TwoStageDataParallelLoadShardedStrategy(None, timeout_s=LIMIT_S)
        strategy.maybe_init_gloo_group()

        def attempt(root: Path) -> None:
            del root
            state = wanted_state(rank, has_data=rank % 2 == 0)
            found = dist_ckpt_strategies.load(state, shared / "whole", strategy, timeout_s=LIMIT_S)
            _required(rank, found)  # type: ignore[arg-type]

        return attempt

    return prepare


def _node(shared: Path, rank: int) -> Path:
    return shared / f"node{rank // 2}"


def save_local_replicated(rank: int, shared: Path) -> Action:
    """Save to the nodes' own disks, through the backend."""
    local = LocalOptions(replication_jump=2, replication_factor=2, max_bucket_bytes=4096)

    def attempt(root: Path) -> None:
        own = LocalOptions(**{**_fields(local), "node_directory": lambda r: root / f"n{r // 2}"})
        strategy = LocalReplicatedSaveShardedStrategy(local=own, cliques=cliques)
        dist_ckpt_strategies.save(saved_state(rank), root / "0007", strategy, timeout_s=LIMIT_S)

    cliques = LazyCliqueReplicationStrategy(2, 2, max_bucket_bytes=4096, timeout_s=LIMIT_S)
    assert cliques.replication_strategy is not None
    return attempt


def _fields(options: LocalOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__dataclass_fields__}


def load_local_replicated(rank: int, shared: Path) -> Action:
    """Load from the nodes' own disks, of which one has been lost."""
    local = LocalOptions(
        replication_jump=2,
        replication_factor=2,
        max_bucket_bytes=4096,
        node_directory=lambda r: shared / f"n{r // 2}",
    )
    saving = LocalReplicatedSaveShardedStrategy(local=local)
    dist_ckpt_strategies.save(saved_state(rank), shared / "0007", saving, timeout_s=LIMIT_S)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(shared / "n1")
    dist.barrier()

    def attempt(root: Path) -> None:
        del root
        loading = LocalReplicatedLoadShardedStrategy(local=local)
        found = dist_ckpt_strategies.load(
            wanted_state(rank, has_data=rank % 2 == 0), shared / "0007", loading, timeout_s=LIMIT_S
        )
        _required(rank, found)  # type: ignore[arg-type]

    return attempt


def _values(rank: int) -> dict[str, Any]:
    return {
        "small": [torch.arange(5 + rank), torch.zeros(3, 4).t()],
        "large": torch.arange(9000, dtype=torch.float32) + rank,
        "text": "x",
    }


def _cliques() -> CliqueReplicationStrategy:
    return CliqueReplicationStrategy.from_replication_params(
        2, 2, timeout_s=LIMIT_S, max_bucket_bytes=4096
    )


def save_parts(rank: int, shared: Path) -> Action:
    """Save each rank's state to its node, and copies to another."""
    cliques = _cliques()

    def attempt(root: Path) -> None:
        manager = LocalCheckpointManager(
            root / f"node{rank // 2}", repl_strategy=cliques, timeout_s=LIMIT_S
        )
        manager.save(BasicTensorAwareStateDict(_values(rank)), 3)

    return attempt


def save_parts_behind(rank: int, shared: Path) -> Action:
    """The same behind training."""
    cliques = _cliques()

    def attempt(root: Path) -> None:
        manager = LocalCheckpointManager(
            root / f"node{rank // 2}", repl_strategy=cliques, timeout_s=LIMIT_S
        )
        request = manager.save(BasicTensorAwareStateDict(_values(rank)), 3, is_async=True)
        assert request is not None
        request.wait()

    return attempt


def load_parts(rank: int, shared: Path) -> Action:
    """Load the states after one node has been lost."""
    manager = LocalCheckpointManager(
        _node(shared, rank), repl_strategy=_cliques(), timeout_s=LIMIT_S, max_bucket_bytes=4096
    )
    manager.save(BasicTensorAwareStateDict(_values(rank)), 3)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(_node(shared, 2))
    dist.barrier()

    def attempt(root: Path) -> None:
        del root
        state, _ = manager.load()
        assert torch.equal(state.state_dict["large"], _values(rank)["large"])

    return attempt


def exchange_states(rank: int, shared: Path) -> Action:
    """Copies of states between the ranks of a clique, and back."""
    cliques = CliqueReplicationStrategy.from_replication_params(
        1, 4, timeout_s=LIMIT_S, max_bucket_bytes=4096
    )
    members = cliques.global_ranks

    def attempt(root: Path) -> None:
        del root
        state = BasicTensorAwareStateDict(_values(rank))
        states, ids = cliques.replicate(state, f"state{rank}")
        held = dict(zip(ids, states, strict=True))
        mine = f"state{rank}"
        available = {member: [f"state{other}" for other in members if other != member]
                     for member in members}  # fmt: skip
        plan = cliques.retrieve_plan(available, [mine])
        found = cliques.retrieve_execute(plan, held)
        assert torch.equal(found[mine].state_dict["large"], _values(rank)["large"])

    return attempt


def reshard_state(rank: int, shared: Path) -> Action:
    """A state with shards, to another layout."""

    def attempt(root: Path) -> None:
        del root
        state, _ = MCoreTensorAwareStateDict.from_state_dict(saved_state(rank))
        found = state.to_state_dict(wanted_state(rank, has_data=True))
        _required(rank, found)

    return attempt


def recover_where(lost: int) -> Callable[[int, Path], Action]:
    """Bring a rank that has lost its state back from those that hold the same; all then go on."""

    def prepare(rank: int, shared: Path) -> Action:
        random_states = pickle.dumps(capture_random_states())

        def attempt(root: Path) -> None:
            del root
            manager = CheckpointManager(enable_checksum=True, timeout_s=LIMIT_S)
            if rank != lost:
                # As its commit would have left it: that is a collective of the training's own.
                manager._kept = InMemoryCheckpoint(_replica(rank, 1.0), 0, Phase.COMMITTED)
                for other in range(dist.get_world_size()):
                    manager._random[other, 1] = random_states
            new = _replica(rank, 0.0)
            if manager.try_checkpointless_load(new) is None:
                assert manager.last_failure is not None
                raise manager.last_failure
            parts = new.parts()
            assert all((found == 2.0 + rank % 2).all() for found in parts[f"p{rank % 2}"].values())

        return attempt

    return prepare


def _replica(rank: int, value: float) -> MemoryProvider:
    """Ranks 0 and 2 hold one shard, 1 and 3 another; tensors in order and not."""
    value += rank % 2 if value else 0
    shard = {"x": torch.full((3000,), value), "across": torch.full((64, 32), value).t()}
    return MemoryProvider({f"p{rank % 2}": shard})


@dataclass(frozen=True)
class Scenario:
    """What is tried again and again."""

    prepare: Callable[[int, Path], Action]


SCENARIOS = {
    "save zarr 1": Scenario(save_with(("zarr", 1))),
    "save zarr 2": Scenario(save_with(("zarr", 2))),
    "save behind zarr 1": Scenario(save_behind_with(("zarr", 1))),
    "save behind zarr 2": Scenario(save_behind_with(("zarr", 2))),
    "load zarr 1": Scenario(load_with(("zarr", 1))),
    "load zarr 2": Scenario(load_with(("zarr", 2))),
    "two stages zarr 1": Scenario(load_in_two_stages(("zarr", 1))),
    "two stages zarr 2": Scenario(load_in_two_stages(("zarr", 2))),
    "save local_replicated": Scenario(save_local_replicated),
    "load local_replicated": Scenario(load_local_replicated),
    "save parts": Scenario(save_parts),
    "save parts behind": Scenario(save_parts_behind),
    "load parts": Scenario(load_parts),
    "exchange states": Scenario(exchange_states),
    "reshard": Scenario(reshard_state),
    "recover from": Scenario(recover_where(0)),
    "recover": Scenario(recover_where(2)),
}
