"""("local_replicated", 1) through Megatron-Core's save and load, and through our own."""

import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies import LocalOptions
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StrategyError,
)
from dist_ckpt_strategies.strategies.local_replicated import (
    LocalReplicatedLoadShardedStrategy,
    LocalReplicatedSaveShardedStrategy,
)
from tests.support.entries import Entry, load, outcome, prepare, save
from tests.support.ranks import RankDiedError, run_processes
from tests.support.restarts import Wrappers, join_group, run_restartable
from tests.support.system_calls import dying_at_change

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 4
BACKEND = ("local_replicated", 1)


def state_of(tp: int, value: float, *, is_filled: bool = True) -> dict[str, Any]:
    """This rank's share of two arrays and an object, where ``tp`` neighbours divide the rows."""
    rank = dist.get_rank()
    shard, replica = rank % tp, rank // tp
    data = torch.arange(24.0).reshape(8, 3).chunk(tp)[shard] + value
    data = data if is_filled else torch.zeros_like(data)
    state: dict[str, Any] = {"iteration": 7} if is_filled else {}
    state["w"] = ShardedTensor.from_rank_offsets("w", data, (0, shard, tp), replica_id=replica)
    bias = torch.full((3,), value if is_filled else 0.0)
    state["b"] = ShardedTensor.from_rank_offsets("b", bias, replica_id=rank)
    state["rng"] = ShardedObject("rng", {"seed": value}, (1,), (0,), replica_id=rank)
    return state


def require_loaded(found: dict[str, Any], tp: int, value: float) -> None:
    shard = dist.get_rank() % tp
    assert torch.equal(found["w"], torch.arange(24.0).reshape(8, 3).chunk(tp)[shard] + value)
    assert found["b"].tolist() == [value] * 3
    assert (found["iteration"], found["rng"]) == (7, {"seed": value})


def node_of(root: str) -> Path:
    """A directory that stands for this rank's node: each sees its own under one name."""
    return Path(root) / f"node{dist.get_rank() // 2}" / "iter_0000007"


def lose_node_of(culprit: int, directory: Path) -> None:
    dist.barrier()
    if dist.get_rank() == culprit:
        shutil.rmtree(directory)
    dist.barrier()


def through_megatron(rank: int, root: str) -> None:
    """Every rank of a node uses its node's directory, as on machines of their own."""
    prepare(30, local=LocalOptions(replication_jump=2, algo="atomic"))
    directory = node_of(root)
    directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state_of(2, 1.0), str(directory), BACKEND)
    dist.barrier()
    for tp in (2, 4):
        wanted = state_of(tp, 1.0, is_filled=False)
        found = dist_checkpointing.load(wanted, str(directory))
        require_loaded(found, tp, 1.0)
        assert found["w"] is wanted["w"].data
    assert load_sharded_metadata(str(directory)).keys() == {"w", "b", "rng/shard_0_1"}
    assert dist_checkpointing.load_tensors_metadata(str(directory))["w"].global_shape == (8, 3)
    with pytest.raises(StrategyError, match="'w' cannot be removed from a local checkpoint"):
        dist_checkpointing.remove_sharded_tensors(str(directory), "w")
    lose_node_of(3, directory)
    dist_ckpt_strategies.prepare_local_load(directory)
    found = dist_checkpointing.load(state_of(2, 1.0, is_filled=False), str(directory))
    require_loaded(found, 2, 1.0)
    for culprit in (1, 3):
        lose_node_of(culprit, directory)
    with pytest.raises(IncompleteCheckpointError, match=r"no node .* load an older"):
        dist_ckpt_strategies.prepare_local_load(directory)


def test_megatrons_save_and_load_find_it_and_a_lost_node_is_restored(tmp_path: Path) -> None:
    assert run_processes(NUM_RANKS, through_megatron, str(tmp_path)) == [None] * NUM_RANKS


def load_ours(directory: Path, value: float) -> dict[str, Any]:
    found = dist_ckpt_strategies.load(state_of(2, value, is_filled=False), directory)
    assert isinstance(found, dict)
    return found


def through_ours(rank: int, root: str) -> None:
    prepare(30, local=LocalOptions(replication_jump=2))
    directory = node_of(root)
    dist_ckpt_strategies.save(state_of(2, 1.0), directory, BACKEND)
    dist_ckpt_strategies.save(state_of(2, 2.0), directory, BACKEND, overwrite=True)
    lose_node_of(0, directory)
    require_loaded(load_ours(directory, 2.0), 2, 2.0)
    common = directory / "common.pt"
    dist.barrier()
    if rank in {0, 2}:
        common.write_bytes(common.read_bytes() + b"x")
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match="common state"):
        load_ours(directory, 2.0)


def test_our_own_save_and_load_restore_a_lost_node_by_themselves(tmp_path: Path) -> None:
    assert run_processes(NUM_RANKS, through_ours, str(tmp_path)) == [None] * NUM_RANKS


def killed_while_overwriting(rank: int, root: str, victim: int, at: int) -> Any:
    """One rank dies at its ``at``-th rename or removal of a save over a finished checkpoint."""
    dist_ckpt_strategies.register(local=LocalOptions(replication_jump=1))
    directory = Path(root) / f"node{rank}" / "iter_0000007"
    dist_ckpt_strategies.save(state_of(2, 1.0) | {"value": 1.0}, directory, BACKEND)
    dist.barrier()
    state = state_of(2, 2.0) | {"value": 2.0}
    save = partial(dist_ckpt_strategies.save, overwrite=True, timeout_s=30)
    with dying_at_change(at) if rank == victim else nullcontext():
        return outcome(partial(save, state, directory, BACKEND))


def value_after_a_kill(rank: int, root: str) -> float:
    found = load_ours(Path(root) / f"node{rank}" / "iter_0000007", 0.0)
    require_loaded(found, 2, found["value"])
    return float(found["value"])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_anywhere_in_an_overwrite_leaves_the_old_or_the_new_checkpoint(
    victim: int, tmp_path: Path
) -> None:
    values: list[float] = []
    for at in range(1 + victim, 60, 3):  # every third, of which none is the other victim's
        root = str(tmp_path / str(at))
        ended = run_processes(2, killed_while_overwriting, root, victim, at)
        first, second = run_processes(2, value_after_a_kill, root)
        assert first == second
        values.append(first)
        if not isinstance(ended[victim], RankDiedError):
            break
    assert ended == [None, None], "the last save was not killed"
    assert values == [1.0] * values.count(1.0) + [2.0] * values.count(2.0)
    assert set(values) == {1.0, 2.0}


def with_a_function(rank: int, root: str) -> None:
    """All ranks see one checkpoint directory; their shards are elsewhere.

    Megatron-Core's wrappers share the work among ranks that hold the same.
    """

    def node_directory(global_rank: int) -> Path:
        return Path(root) / f"disk{global_rank // 2}"

    directory = Path(root) / "shared" / "iter_0000003"
    saver = LocalReplicatedSaveShardedStrategy(
        local=LocalOptions(replication_jump=1, algo="fully_parallel"),
        replication_jump=2,
        node_directory=node_directory,
    )
    wrapped = FullyParallelSaveStrategyWrapper(saver)
    save(Entry.MEGATRON, state_of(2, 5.0), directory, sharded_strategy=wrapped)
    dist.barrier()
    assert {path.name for path in directory.glob("[!.]*")} == {"common.pt", "metadata.json"}
    loader = LocalReplicatedLoadShardedStrategy(node_directory=node_directory)
    lose_node_of(0, Path(root) / "disk1")
    wanted = state_of(2, 5.0, is_filled=False)
    ways = {Entry.OURS: loader, Entry.MEGATRON: FullyParallelLoadStrategyWrapper(loader)}
    for entry, way in ways.items():
        with cpu_stand_ins():  # the wrapper moves what it exchanges to CUDA
            asked = state_of(2, 5.0, is_filled=False)
            found = load(entry, asked, directory, sharded_strategy=way)
        require_loaded(found, 2, 5.0)
    lose_node_of(0, Path(root) / "disk0")
    with pytest.raises(CheckpointNotFoundError, match="no local checkpoint below"):
        loader.load({key: wanted[key] for key in ("w", "b")}, directory)


def test_a_function_may_choose_the_directory_of_a_node(tmp_path: Path) -> None:
    assert run_processes(NUM_RANKS, with_a_function, str(tmp_path)) == [None] * NUM_RANKS


def saves_in_each_attempt(rank: int, wrappers: Wrappers, root: str) -> int:
    prepare(30, local=LocalOptions(replication_jump=1))
    attempts: list[int] = []

    @wrappers(max_attempts=4)
    def train() -> None:
        attempts.append(len(attempts))
        join_group("gloo", 60)
        directory = Path(root) / f"node{rank}" / f"iter_{attempts[-1]}"
        directory.mkdir(parents=True)
        value = float(attempts[-1])
        save(Entry.MEGATRON, state_of(2, value), directory, sharded_strategy=BACKEND)
        found = load(Entry.OURS, state_of(2, value, is_filled=False), directory)
        require_loaded(found, 2, value)
        dist.barrier()
        if len(attempts) <= 2 and rank == len(attempts) % 2:
            raise ValueError("this attempt fails after its save")

    train()
    return len(attempts)


def test_a_registered_strategy_saves_again_after_each_restart(tmp_path: Path) -> None:
    assert run_restartable(2, saves_in_each_attempt, str(tmp_path)) == [3, 3]
