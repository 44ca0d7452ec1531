"""No rank looks up what another makes later: NFS clients repeat for a minute what was missing."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies import ManagerOptions, SavePolicy, TieredCheckpointManager
from dist_ckpt_strategies.comm.torch_communicator import open_communicator
from dist_ckpt_strategies.local import LocalCheckpointManager
from tests.support.entries import FORMATS, PACKS, Entry, load, prepare, save
from tests.support.ranks import run_processes
from tests.support.system_calls import before_calls

LOOKUPS = ("open", "stat", "lstat", "scandir", "listdir")


def state(rank: int) -> dict[str, Any]:
    weight = ShardedTensor.from_rank_offsets("w", torch.ones(4, 8), (0, rank, 2))
    return {"w": weight, "o": ShardedObject("o", {"r": {rank}}, (2,), (rank,)), "step": 1}


def steps(rank: int, scratch: Path) -> dict[str, Callable[[], Any]]:
    """What is done one after the other; each place is new to both ranks."""
    comm = open_communicator(None, timeout_s=60, purpose="test")
    found: dict[str, Callable[[], Any]] = {}
    for stored in FORMATS:
        runs = [scratch / f"{number}-{stored[0]}-{stored[1]}" / "new" for number in range(2)]

        def first_and_second(runs: list[Path] = runs, stored: Any = stored) -> None:
            pending = dist_ckpt_strategies.save_async(state(rank), runs[0] / "iter_1", stored)
            dist_ckpt_strategies.save(state(rank), runs[1] / "iter_1", stored)
            dist_ckpt_strategies.save_async(state(rank), runs[0] / "iter_2", stored).wait(60)
            pending.wait(60)
            save(Entry.MEGATRON, state(rank), runs[0] / "iter_3", sharded_strategy=stored)
            load(Entry.OURS, state(rank), runs[0] / "iter_2")

        def convert(runs: list[Path] = runs, stored: Any = stored) -> None:
            for to in ("zarr@1", "pack"):
                target = scratch / "converted" / f"{stored[1]}-{to}"
                dist_ckpt_strategies.convert(runs[0] / "iter_1", target, to, comm=comm)

        found |= {f"saves of {stored}": first_and_second}
        found |= {f"conversions of {stored}": convert} if stored != PACKS else {}

    def manage() -> None:
        local = LocalCheckpointManager(scratch / "node" / str(rank), timeout_s=60)
        policy = SavePolicy(every_steps=2, local_every_steps=1)
        options = ManagerOptions(timeout_s=60)
        place = scratch / "managed" / "run"
        with TieredCheckpointManager(place, local=local, policy=policy, options=options) as manager:
            assert manager.load_latest(state(rank)) is None
            for step in range(1, 6):
                manager.save(step, state(rank))
            manager.wait()
            assert manager.load_latest(state(rank)) is not None

    return found | {"a manager": manage}


def record_lookups(rank: int, scratch: Path) -> dict[str, list[str]]:
    """The paths that were looked up too early, by step."""
    prepare(60)
    early: dict[str, list[str]] = {}
    exists = os.path.lexists
    missing: set[str] = set()

    def act(_name: str, path: str) -> None:
        if path.startswith(str(scratch)) and not is_asked[0]:
            is_asked[0] = True
            if not exists(path):
                missing.add(path)
            is_asked[0] = False

    is_asked = [False]
    for name, step in steps(rank, scratch).items():
        with before_calls(act, LOOKUPS if rank else ()):
            step()
        dist.barrier()
        own = f"node/{rank}", "/packs/"  # others learn the name of a pack once it is there
        of_other_rank = {path for path in missing if not any(part in path for part in own)}
        early |= {name: found} if (found := [*filter(exists, of_other_rank)]) else {}
    return early


@pytest.mark.multiprocess
def test_no_rank_looks_up_what_another_makes_later(tmp_path: Path) -> None:
    assert run_processes(2, record_lookups, tmp_path, timeout_s=300) == [{}] * 2


@pytest.mark.parametrize("depth", [1, 2])
def test_a_client_that_remembers_what_was_missing_is_asked_again(
    tmp_path: Path, depth: int
) -> None:
    """What was looked up before it was made is there once the directory above is opened."""
    root = tmp_path.joinpath(*("runs", "new", "iter_1")[-depth:])
    dist_ckpt_strategies.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4))}, root)
    hidden = tmp_path / root.relative_to(tmp_path).parts[0]
    away = hidden.rename(tmp_path / "away")

    def act(name: str, path: str) -> None:
        if name == "open" and path == str(tmp_path) and away.exists():
            away.rename(hidden)

    for read in (dist_ckpt_strategies.open, lambda path: dist_ckpt_strategies.load({}, path)):
        with before_calls(act, ["open"]):
            read(root)
        hidden.rename(away)
