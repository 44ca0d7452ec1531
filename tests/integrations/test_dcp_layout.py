"""States of DTensors by this package's own save, manager and launcher."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dist_ckpt_strategies
from dist_ckpt_strategies import SavePolicy, Tier, TieredCheckpointManager
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointExistsError,
    PeerError,
    PlanError,
    StorageError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.integrations import dcp
from dist_ckpt_strategies.local import LazyCliqueReplicationStrategy, LocalCheckpointManager
from tests.integrations.test_dcp import Broken, Foreign, plain, values, whole
from tests.support.pages import ROOT, python_blocks
from tests.support.processes import ended
from tests.support.ranks import done_by

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]


# The training of the page

PAGE = ROOT / "docs" / "dcp.md"
(SCRIPT,) = (block for block in python_blocks(PAGE) if "wait_rank()" in block)
FAULT = """
            optimizer.step()
            import os, pathlib
            fault = pathlib.Path(f"fault-{step}-{dist.get_rank()}")
            if fault.exists():
                number = int(fault.read_text())
                fault.unlink()
                os.kill(os.getpid(), number)
"""
AT_THE_END = """
    print("END", {k: v.full_tensor().double().sum().item().hex() for k, v in
                  [*model.state_dict().items(), *enumerate(
                      value for state in optimizer.state.values() for value in state.values()
                      if hasattr(value, "full_tensor"))]}, flush=True)


if __name__"""


def train(
    root: Path, nproc: int, faults: Mapping[str, int] = MappingProxyType({})
) -> tuple[int, set[str], str]:
    """Exit code of the launcher, what the ranks ended with, and the output."""
    root.mkdir(exist_ok=True)
    code = SCRIPT.replace("\n            optimizer.step()\n", FAULT)
    (root / "train.py").write_text(code.replace("\n\nif __name__", AT_THE_END))
    for name, number in faults.items():
        (root / f"fault-{name}").write_text(str(number))
    launcher = (sys.executable, "-W", "ignore", "-m", "dist_ckpt_strategies.cli", "run")
    variables = {"GLOO_SOCKET_IFNAME": "lo"}
    done = ended(*launcher, "--nproc", str(nproc), "train.py", cwd=root, variables=variables)
    text = done.stdout + done.stderr
    assert not list(root.glob("fault-*")), text
    return done.returncode, set(re.findall(r"END .*", done.stdout)), text


@pytest.mark.long
def test_the_training_of_the_page_ends_with_the_same_bits_after_faults(tmp_path: Path) -> None:
    code, whole_run, text = train(tmp_path / "whole", 1)
    assert (code, len(whole_run)) == (0, 1), text

    # One rank is killed, with a save in the background maybe under way, and replaced; then the job
    # is preempted at a step that the policy does not save. It is resumed on fewer ranks.
    code, _, text = train(tmp_path / "faults", 2, {"5-1": 9, "7-1": 15})
    assert code == 143, text
    assert "killed by SIGKILL" in text
    code, resumed, text = train(tmp_path / "faults", 1)
    assert (code, resumed) == (0, whole_run), text
    steps = set(re.findall(r"step (\d+):", text)) & set(map(str, range(1, 10)))
    assert steps == {"9"}, "it goes on where it was preempted"


# Layouts


def state(seed: int) -> dict[str, Any]:
    """FSDP2 over tensor parallelism, with a module apart from it, and keys of some ranks only."""
    torch.manual_seed(seed)
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.Linear(10, 5), torch.nn.LayerNorm(5)
    )
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    own = {"state": torch.full((3,), float(seed + rank)), "n": rank * seed}
    found = {"model": model.state_dict(), "step": seed, f"random_{rank}": own}
    if rank >= size // 2:
        tensor = torch.arange(9.0) * seed
        found["stage"] = {"w": distribute_tensor(tensor, mesh["tp"], [Shard(0)]), "o": [seed]}
    return found


def manager_of(root: Path, rank: int) -> TieredCheckpointManager:
    node = LocalCheckpointManager(
        root / f"node{rank}", repl_strategy=LazyCliqueReplicationStrategy(1, 2)
    )
    policy = SavePolicy(every_steps=10, local_every_steps=1)
    return TieredCheckpointManager(root / "run", local=node, policy=policy)


def save_in_background(rank: int, root: Path) -> Any:
    filled = values(rank, is_filled=True)
    dcp.async_save(filled, root / "values").wait()
    held = state(3)
    layout, expected = dcp.shard_layout(held), whole(held)
    request = dcp.async_save(held, root / "state")
    with manager_of(root, rank) as manager:
        assert manager.save(1, lambda: layout.shards(held))
        held["model"]["2.weight"].to_local().zero_()
    request.wait()
    with pytest.raises(PlanError, match=r"^new: not in the layout"):
        layout.shards(held | {"new": torch.ones(2)})
    return plain(filled), expected


def load_both_ways(rank: int, root: Path) -> Any:
    by_dcp, by_load = (values(rank, is_filled=False) for _ in range(2))
    dcp.load(by_dcp, root / "values")
    layout = dcp.shard_layout(by_load)
    shards = layout.shards(by_load)
    layout.restore(by_load, dist_ckpt_strategies.load(shards, root / "values"))  # type: ignore[arg-type]
    found = plain(by_dcp)
    assert plain(by_load) == found
    if dist.get_world_size() == 2:
        return found, None
    by_dcp, by_manager = state(4), state(5)
    dcp.load(by_dcp, root / "state")
    layout = dcp.shard_layout(by_manager)
    with manager_of(root, rank) as manager:
        loaded = manager.load_latest(layout.shards(by_manager))
        assert loaded is not None
        assert loaded.tier is Tier.LOCAL
        layout.restore(by_manager, loaded.state)
    assert whole(by_manager) == whole(by_dcp)
    return found, whole(by_dcp)


def test_what_is_saved_without_dcp_is_loaded_by_it_and_the_reverse(tmp_path: Path) -> None:
    saved = done_by(4, save_in_background, tmp_path)

    assert done_by(4, load_both_ways, tmp_path) == saved
    assert done_by(2, load_both_ways, tmp_path) == [(value, None) for value, _ in saved[:2]]


# Failures


def fail_in_background(rank: int, root: Path) -> None:
    os.environ["DIST_CKPT_WRITER_PROCESS"] = "0"  # the limit is of this process

    def state_of(value: float) -> dict[str, Any]:
        line = init_device_mesh("cpu", (2,))
        return {"w": distribute_tensor(torch.full((6,), value), line, [Shard(0)])}

    def raised(kind: type[CheckpointError], bad: dict[str, Any], **options: Any) -> CheckpointError:
        with pytest.raises(kind) as failure:
            dcp.async_save(state_of(2) | bad, root / "good", **options).wait()
        return failure.value

    dcp.async_save(state_of(1), root / "good").wait()
    error = raised(UnsafeObjectError, {"f": Foreign()} if rank == 1 else {})
    assert (error.global_rank, isinstance(error, PeerError)) == (1, rank == 0)
    assert error.key == "f/shard_0_1", "as Megatron-Core names objects"
    sparse = {"s": torch.eye(3).to_sparse()} if rank == 1 else {}
    error = raised(PlanError, sparse)
    assert (error.global_rank, error.key) == (1, "s")
    assert raised(CheckpointExistsError, {}, overwrite=False).global_rank == 0
    assert raised(CheckpointError, {"loader": Broken(rank)}).key == "loader"
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    error = raised(StorageError, {})
    assert (error.global_rank, isinstance(error, PeerError)) == (1, rank == 0)
    assert str(error.path).endswith(".safetensors")
    found = state_of(0)
    dcp.load(found, root / "good")
    assert found["w"].full_tensor().tolist() == [1] * 6


def test_failures_in_the_background_are_raised_on_every_rank(tmp_path: Path) -> None:
    done_by(2, fail_in_background, tmp_path)
