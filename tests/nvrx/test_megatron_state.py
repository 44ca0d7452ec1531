"""Megatron-Core's own MCoreTensorAwareStateDict in local checkpoints, where NVRx is installed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import UnsafeObjectError
from dist_ckpt_strategies.local import CliqueReplicationStrategy
from dist_ckpt_strategies.megatron.types import tensor_aware_class
from tests.local.test_mcore_state_dict import ARRAYS, manager_of, require_equal
from tests.local.test_mcore_state_dict import state_of as shared_state_of
from tests.support.ranks import done_by, run_processes

pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext")

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 4
TIMEOUT_S = 40.0


class Unknown:
    """A class that is not allowed."""


def state_of(iteration: int, *, is_filled: bool = True) -> dict[str, Any]:
    """Replicated rows, and a tensor of its own shape on each rank."""
    rank = dist.get_rank()
    own = torch.full((3, rank + 1), float(iteration * is_filled))
    return shared_state_of(2, is_filled=is_filled) | {
        "own": ShardedTensor.from_rank_offsets(f"own.{rank}", own)
    }


def save_and_load(rank: int, root: str, algo: str) -> None:
    """Save, also asynchronously; lose every other rank's directory; load, and refuse an object."""
    megatrons = tensor_aware_class()
    manager = manager_of(root)
    with cpu_stand_ins():  # Megatron-Core's exchange moves to CUDA and synchronises it
        state, cached = megatrons.from_state_dict(state_of(1), algo)
        manager.save(state, 1)
        state, _ = megatrons.from_state_dict(state_of(2), algo, cached_metadata=cached)
        request = manager.save(state, 2, is_async=True)
        assert request is not None
        request.wait()
        dist.barrier()
        if rank % 2:
            shutil.rmtree(manager.local_ckpt_dir)
        dist.barrier()
        assert manager.find_latest() == 2
        loaded, _ = manager.load()
        assert type(loaded) is megatrons
        loaded.restore_tensor_device()
        wanted = state_of(2, is_filled=False)
        found = loaded.to_state_dict(wanted, algo=algo)
        require_equal(found, 2, (*ARRAYS, "rng", "own"))
        assert torch.equal(found["own"], torch.full((3, rank + 1), 2.0))
    strange = state_of(3)
    strange["rng"].data = Unknown() if rank == 2 else None
    state, _ = megatrons.from_state_dict(strange, "atomic")
    with pytest.raises(UnsafeObjectError, match=r"(?s)rank 2: .*test_megatron_state\.Unknown"):
        manager.save(state, 3)
    assert manager.find_latest() == 2


def test_megatrons_state_is_saved_lost_and_found_again(tmp_path: Path) -> None:
    done_by(NUM_RANKS, save_and_load, str(tmp_path), "fully_parallel")


def replicate(rank: int) -> list[Any]:
    from nvidia_resiliency_ext.checkpointing.local.replication import group_utils  # noqa: PLC0415

    state, _ = tensor_aware_class().from_state_dict(state_of(rank + 1), "atomic")
    group: Any = group_utils.GroupWrapper(dist.group.WORLD)
    strategy = CliqueReplicationStrategy(group, timeout_s=TIMEOUT_S)
    copies, ids = strategy.replicate(state, f"part {rank}")
    plan = strategy.retrieve_plan({0: ids[:1], 1: ids[1:]}, [ids[1 - rank]])
    got = strategy.retrieve_execute(plan, {ids[rank]: state})
    are_megatrons = [type(copy) is tensor_aware_class() for copy in copies]
    return [ids, are_megatrons, list(map(first_value, copies)), first_value(got[ids[1 - rank]])]


def first_value(state: Any) -> float:
    return float(state.sharded_state_dict["own"].data[0, 0])


def test_a_clique_of_nvrxs_group_exchanges_states_of_megatrons() -> None:
    common = [["part 0", "part 1"], [True, True], [1.0, 2.0]]
    assert run_processes(2, replicate) == [[*common, 2.0], [*common, 1.0]]
