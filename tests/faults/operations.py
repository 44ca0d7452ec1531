"""What four ranks do together while a call fails on one of them."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.config import LocalOptions
from dist_ckpt_strategies.local import (
    LazyCliqueReplicationStrategy,
    MCoreTensorAwareStateDict,
)
from dist_ckpt_strategies.recovery import CheckpointManager
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.local.clique_worlds import (
    cliques,
    described,
    loaded,
    manager_of,
    once,
    state_of,
    values_of,
)
from tests.support.memory_provider import MemoryProvider
from tests.support.sharding import Cut, Part, no_data, on_grid, replicated, zeros
from tests.support.sharding import state_of as sharded_state_of

LIMIT_S = 30.0  # how long the ranks wait for each other: beside other work a process starts late
_SMALL: dict[str, Any] = {"timeout_s": LIMIT_S, "max_bucket_bytes": 4096}

Action = Callable[[Path], Callable[[], Any]]
"""Makes ready for an attempt in a directory of its own, and returns it. Both are collective."""

Operation = Callable[[int, Path], Action]
"""Gets the rank and an empty directory. Collective."""


def _cuts() -> list[Cut]:
    """Blocks in two dims, copies, and runs of which one rank holds two and another none."""
    runs = ((2, 0, 774), (0, 774, 774), (2, 1548, 774), (1, 2322, 774))
    parts = tuple(Part(holder, (start,), (length,)) for holder, start, length in runs)
    return [
        on_grid("grid", (8, 8), (4, 2)),
        replicated(on_grid("copies", (8, 4), (2, 2))),
        Cut("flat", (3096,), torch.float32, parts),
    ]


def _saved(rank: int) -> dict[str, Any]:
    """Arrays in order and not, an object of each rank, and common state."""
    state: dict[str, Any] = sharded_state_of(rank, _cuts())
    across = torch.arange(64, dtype=torch.float32).reshape(8, 8).t()
    state["across"] = ShardedTensor.from_rank_offsets("across", across, (0, rank, 4))
    state["object"] = ShardedObject("object", {"of rank": rank, "x": "y" * 9000}, (4,), (rank,))
    state["common"] = {"iteration": 7}
    return state


def _wanted(rank: int, *, has_data: bool) -> dict[str, Any]:
    """The same to load, cut otherwise."""
    state: dict[str, Any] = sharded_state_of(rank, _cuts(), zeros if has_data else no_data)
    rows = torch.zeros(32, 2) if has_data else torch.zeros(2, 32).t()
    state["across"] = ShardedTensor.from_rank_offsets("across", rows, (1, rank, 4))
    state["object"] = ShardedObject("object", None, (4,), ((rank + 1) % 4,))
    return state


def _require_loaded(rank: int, found: Any) -> None:
    assert found["object"]["of rank"] == (rank + 1) % 4
    assert found["common"] == {"iteration": 7}
    assert not any(isinstance(held, ShardedTensor) for held in found.values())


def _load(rank: int, root: Path, strategy: Any) -> None:
    wanted = _wanted(rank, has_data=rank % 2 == 0)
    found = dist_ckpt_strategies.load(wanted, root, strategy, timeout_s=LIMIT_S)
    _require_loaded(rank, found)


def save_with(backend: Any, rank: int, _directory: Path) -> Action:
    save = dist_ckpt_strategies.save
    return lambda root: partial(save, _saved(rank), root, backend, timeout_s=LIMIT_S)


def save_async_with(backend: tuple[str, int], rank: int, _directory: Path) -> Action:
    save = dist_ckpt_strategies.save_async
    return lambda root: lambda: save(_saved(rank), root, backend, timeout_s=LIMIT_S).wait()


def load_with(backend: tuple[str, int], rank: int, directory: Path) -> Action:
    """Load what all have saved, in another layout."""
    save_with(backend, rank, directory)(directory)()
    return lambda _: partial(_load, rank, directory, None)


def load_in_two_stages(backend: tuple[str, int], rank: int, directory: Path) -> Action:
    """Load so that each byte is read once."""
    save_with(backend, rank, directory)(directory)()
    strategy = TwoStageDataParallelLoadShardedStrategy(None, timeout_s=LIMIT_S)
    strategy.maybe_init_gloo_group()
    return lambda _: partial(_load, rank, directory, strategy)


def _on_nodes(root: Path) -> LocalOptions:
    return LocalOptions(
        replication_jump=2,
        replication_factor=2,
        max_bucket_bytes=4096,
        node_directory=lambda rank: root / f"node{rank // 2}",
    )


def save_local_replicated(rank: int, directory: Path) -> Action:
    """Save to the nodes' own disks, through the backend."""
    cliques = LazyCliqueReplicationStrategy(2, 2, **_SMALL)
    assert cliques.replication_strategy is not None

    def ready(root: Path) -> Callable[[], Any]:
        strategy = LocalReplicatedSaveShardedStrategy(local=_on_nodes(root), cliques=cliques)
        return save_with(strategy, rank, directory)(root / "0007")

    return ready


def load_local_replicated(rank: int, directory: Path) -> Action:
    """Load from the nodes' own disks, of which one has been lost."""
    save_local_replicated(rank, directory)(directory)()
    _lose_a_node(rank, directory)
    strategy = LocalReplicatedLoadShardedStrategy(local=_on_nodes(directory))
    return lambda _: partial(_load, rank, directory / "0007", strategy)


def _lose_a_node(rank: int, directory: Path) -> None:
    once(rank, lambda: shutil.rmtree(directory / "node1"))


def save_shards(rank: int, _directory: Path, *, is_async: bool = False) -> Action:
    """Save each rank's state to its node, and copies to another."""
    strategy = cliques(**_SMALL)

    def attempt(root: Path) -> None:
        manager = manager_of(rank, str(root), strategy, **_SMALL)
        request = manager.save(state_of(rank, 3), 3, is_async=is_async)
        if request is not None:
            request.wait()

    return lambda root: partial(attempt, root)


def load_shards(rank: int, directory: Path) -> Action:
    """Load the states after one node has been lost."""
    save_shards(rank, directory)(directory)()
    _lose_a_node(rank, directory)
    manager = manager_of(rank, str(directory), cliques(**_SMALL), **_SMALL)

    def attempt() -> None:
        assert loaded(manager, rank) == "3"

    return lambda _: attempt


def exchange_states(rank: int, _directory: Path) -> Action:
    """Copies of states between the ranks of a clique, and back."""
    strategy = cliques(4, 1, **_SMALL)
    names = {member: f"state{member}" for member in strategy.global_ranks}
    available = {m: [name for other, name in names.items() if other != m] for m in names}

    def attempt() -> None:
        mine = f"state{rank}"
        states, ids = strategy.replicate(state_of(rank, 3), mine)
        plan = strategy.retrieve_plan(available, [mine])
        found = strategy.retrieve_execute(plan, dict(zip(ids, states, strict=True)))
        assert described(found[mine].state_dict) == described(values_of(rank, 3))

    return lambda _: attempt


def reshard_state(rank: int, _directory: Path) -> Action:
    """A state with shards, to another layout."""

    def attempt() -> None:
        state, _ = MCoreTensorAwareStateDict.from_state_dict(_saved(rank))
        _require_loaded(rank, state.to_state_dict(_wanted(rank, has_data=True)))

    return lambda _: attempt


def recover_where(lost: int, rank: int, _directory: Path) -> Action:
    """Bring a rank that has lost its state back from those that hold the same; finish the step."""

    def ready(_: Path) -> Callable[[], Any]:
        manager = CheckpointManager(enable_checksum=True, timeout_s=LIMIT_S)
        manager.track(_replica(rank, 1.0 + rank % 2))
        manager.begin_step()
        manager.vote()
        if rank == lost:
            manager = CheckpointManager(enable_checksum=True, timeout_s=LIMIT_S)
        return partial(attempt, manager)

    def attempt(manager: CheckpointManager) -> None:
        new = _replica(rank, 0.0)
        if manager.try_checkpointless_load(new) is None:
            assert manager.last_failure is not None
            raise manager.last_failure
        parts = new.parts()[f"p{rank % 2}"]
        assert all((found == 2.0 + rank % 2).all() for found in parts.values())

    return ready


def _replica(rank: int, value: float) -> MemoryProvider:
    """Ranks 0 and 2 hold one shard, 1 and 3 another; tensors in order and not."""
    shard = {"x": torch.full((3000,), value), "across": torch.full((64, 32), value).t()}
    return MemoryProvider({f"p{rank % 2}": shard})


OPERATIONS: dict[str, Operation] = {
    **{
        f"{name} {backend}": partial(operation, (backend, 1))
        for name, operation in (
            ("save", save_with),
            ("save_async", save_async_with),
            ("load", load_with),
            ("two stages", load_in_two_stages),
        )
        for backend in ("zarr", "safetensors")
    },
    "save local_replicated": save_local_replicated,
    "load local_replicated": load_local_replicated,
    "local save": save_shards,
    "local save_async": partial(save_shards, is_async=True),
    "local load": load_shards,
    "exchange states": exchange_states,
    "reshard": reshard_state,
    "recover from the first": partial(recover_where, 0),
    "recover from another": partial(recover_where, 2),
}
