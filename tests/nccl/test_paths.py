"""The paths between ranks over NCCL, or its rules in one queue: the worst that they permit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)

from dist_ckpt_strategies import ManagerOptions, TieredCheckpointManager
from dist_ckpt_strategies.comm.base import run_and_gather, run_collectively
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.local import BasicTensorAwareStateDict
from dist_ckpt_strategies.recovery import CheckpointManager
from dist_ckpt_strategies.strategies.registry import StrategyAction, get_default_strategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.local.clique_worlds import (
    cliques,
    load,
    manager_of,
    node_directory,
    once,
    remove,
    save,
)
from tests.support import entries
from tests.support.entries import FORMATS, PACKS, ZARR, Entry, outcome, prepare
from tests.support.memory_provider import MemoryProvider
from tests.support.nccl_rules import join_nccl
from tests.support.ranks import done_by
from tests.support.sharding import Cut, Part, differences, on_grid, part_of, zeros
from tests.support.sharding import state_of as sharded_state_of

pytestmark = pytest.mark.multiprocess

BACKENDS = ["nccl", "cpu:gloo,cuda:nccl"]
LIMIT_S = 120.0
SIZE = 4


def fail_on_one_rank(rank: int) -> None:
    comm = open_communicator(None, timeout_s=20, purpose="test")
    assert run_and_gather(comm, lambda: rank) == [0, 1, 2, 3]

    def step() -> None:
        if rank == 2:
            raise ValueError("on purpose")

    assert outcome(lambda: run_collectively(comm, step)).global_rank == 2


def cuts() -> list[Cut]:
    """A replicated array of several messages, one of which each rank wants some, and others."""
    return [
        on_grid("columns", (17, 9), (1, 3)),
        on_grid("grid", (8, 6), (2, 2)),
        on_grid("everyone", (600, 100), (1, 1), num_replicas=4),
    ]


def on_gpu(cut: Cut, part: Part) -> torch.Tensor:
    return part_of(cut, part).to("cuda")


def zeros_on_gpu(cut: Cut, part: Part) -> torch.Tensor:
    return zeros(cut, part).to("cuda")


def load_in_two_stages(rank: int, root: Path, backend: str, stored: Any, transfer: str) -> None:
    """Groups of two; beside each load's messages the training's group is used too."""
    state = sharded_state_of(rank, cuts(), on_gpu)
    entries.save(Entry.OURS, state, root, sharded_strategy=stored)
    groups = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [2, 3])]
    strategy = TwoStageDataParallelLoadShardedStrategy(
        groups[rank // 2], cpu_transfer=transfer == "cpu"
    )
    loaded = strategy.load(sharded_state_of(rank, cuts(), zeros_on_gpu), root)
    dist.all_reduce(torch.ones(3, device="cuda"))
    found = {name: tensor.cpu() for name, tensor in loaded.items()}
    assert differences(rank, cuts(), found) == []


def save_and_load_fully_parallel(rank: int, root: Path, stored: Any) -> None:
    """Ranks of two groups share the writing and the reading of what they hold alike."""
    held = cuts()[1:]
    groups = [dist.new_group(ranks, backend="nccl") for ranks in ([0, 1], [2, 3])]
    saver = FullyParallelSaveStrategyWrapper(
        get_default_strategy(StrategyAction.SAVE_SHARDED, *stored), groups[rank // 2]
    )
    state = sharded_state_of(rank, held, on_gpu)
    entries.save(Entry.OURS, state, root, sharded_strategy=saver)
    loader = FullyParallelLoadStrategyWrapper(
        get_default_strategy(StrategyAction.LOAD_SHARDED, *stored), groups[rank // 2]
    )
    wanted = sharded_state_of(rank, held, zeros_on_gpu)
    loaded = entries.load(Entry.OURS, wanted, root, sharded_strategy=loader)
    found = {name: tensor.cpu() for name, tensor in loaded.items()}
    assert differences(rank, held, found) == []


def replicate_and_retrieve(rank: int) -> None:
    strategy = cliques(target_device="cuda")
    own = BasicTensorAwareStateDict({"w": torch.full((3000,), float(rank), device="cuda")})
    states, ids = strategy.replicate(own, f"id{rank}")
    members = [rank % 2, rank % 2 + 2]
    assert [state.state_dict["w"].cpu().unique().tolist() for state in states] == [
        [float(member)] for member in members
    ]
    held = {
        id_: BasicTensorAwareStateDict({"w": torch.full((3000,), float(id_[2:]), device="cuda")})
        for id_ in ids
    }
    available = {one: ids for one in strategy.global_ranks if one >= 2}
    plan = strategy.retrieve_plan(available, [] if rank >= 2 else ids)
    got = strategy.retrieve_execute(plan, held)
    found = {id_: state.state_dict["w"].unique().tolist() for id_, state in got.items()}
    assert found == ({f"id{member}": [float(member)] for member in members} if rank < 2 else {})


def lose_a_node(rank: int, root: str) -> None:
    manager = manager_of(rank, root, cliques(target_device="cuda"))
    assert save(manager, rank, 10) == ("ok", "None")
    once(rank, lambda: remove([node_directory(root, 1)]))
    assert load(manager, rank) == ("ok", "10")


def provider(value: float, step: int) -> MemoryProvider:
    return MemoryProvider({"p": {"x": torch.full((5000,), value, device="cuda")}}, step=step)


def values(found: MemoryProvider) -> Any:
    return sorted(set(found.parts()["p"]["x"].tolist()))


def recover(rank: int, backend: str) -> None:
    """Rank 1 has lost its state; the others have committed step 6."""
    replicas = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [2, 3])]
    manager = CheckpointManager(timeout_s=30)
    manager.track(provider(1.0, 6), replica_group=replicas[rank // 2])
    manager.begin_step()
    dist.all_reduce(torch.ones(100, device="cuda"))
    manager.vote()
    if rank == 1:
        manager = CheckpointManager(timeout_s=30)
    new = provider(0.0, 0)
    assert manager.try_checkpointless_load(new), manager.last_failure
    assert (new.step, values(new)) == (7, [2.0])


def all_paths(rank: int, root: Path, backend: str) -> None:
    join_nccl(backend)
    prepare(30)
    fail_on_one_rank(rank)
    replicate_and_retrieve(rank)
    lose_a_node(rank, str(root / "local"))
    recover(rank, backend)
    is_mixed = backend != "nccl"
    loads = [(ZARR, "gpu"), (ZARR, "cpu")]
    if not is_mixed:
        loads = [(ZARR, "gpu"), (PACKS, "gpu"), (PACKS, "cpu")]
    for stored, transfer in loads:
        load_in_two_stages(rank, root / f"{stored}{transfer}", backend, stored, transfer)
    for stored in () if is_mixed else FORMATS:
        save_and_load_fully_parallel(rank, root / f"parallel{stored}", stored)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_path_between_ranks(backend: str, tmp_path: Path) -> None:
    done_by(SIZE, all_paths, tmp_path, backend, timeout_s=LIMIT_S)


def polls_while_the_gpu_is_behind(rank: int, root: Path) -> list[int]:
    """Rank 0's GPU has a step to do that ends once the host has polled; rank 1 is preempted."""
    join_nccl(separate_queues=True)
    store = dist.distributed_c10d._get_default_store()
    group, data = dist.new_group([0, 1], backend="nccl"), torch.zeros(1, device="cuda")
    dist.all_reduce(data, group=group)
    manager = TieredCheckpointManager(root, options=ManagerOptions(timeout_s=40.0, lease_s=8.0))
    manager.save(1, {})
    if rank == 0:
        dist.broadcast(data, 1, group=group, async_op=True).wait()
        manager.save(2, {})
        store.set("polled", "")
    else:
        manager.preempt()
        manager.save(2, {})
        store.wait(["polled"])
        dist.broadcast(data, 1, group=group)
    with pytest.raises(SystemExit):
        manager.save(3, {"step": 3})
    return manager.all_steps()


def test_a_managers_poll_does_not_wait_for_the_gpu(tmp_path: Path) -> None:
    assert done_by(2, polls_while_the_gpu_is_behind, tmp_path) == [[3], [3]]
