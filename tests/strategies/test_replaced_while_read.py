"""A save replaces a checkpoint while ranks or commands read it: no rank gets parts of two saves."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import CheckpointChangedError, StorageError
from dist_ckpt_strategies.formats.scan import scan, verify
from dist_ckpt_strategies.integrations import dcp
from dist_ckpt_strategies.strategies.own_load import OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from tests.support.entries import (
    FORMATS,
    PACKS,
    Entry,
    Failure,
    load,
    outcome,
    prepare,
    require_refused,
)
from tests.support.processes import until
from tests.support.ranks import run_processes
from tests.support.system_calls import before_calls

NUM_ARRAYS = 6
# The first file of an array or manifest follows the common state; then a chunk in the middle.
MOMENTS = (r"(w0/\.zarray|index\.json)$", r"w3/(c\.)?[01]\.0$", r"(shard_0_1\.pt|rank-.*\.bin)$")
MOMENTS_OF_PACKS = (r"c/index$", r"saves/[^/]*/index$", r"\.safetensors$")


def state(value: float, rank: int = 0, size: int = 1) -> dict[str, Any]:
    data = [torch.full((64 // size, 32), value) for _ in range(NUM_ARRAYS)]
    found: dict[str, Any] = {
        f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", tensor, (0, rank, size))
        for n, tensor in enumerate(data)
    }
    blob = ShardedObject("o", {"v": torch.full((9,), value)}, (1,), (0,), replica_id=rank)
    return found | {"o": blob, "step": value}


def values_in(loaded: dict[str, Any]) -> list[float]:
    """All that a checkpoint holds."""
    arrays = [loaded[f"w{n}"] for n in range(NUM_ARRAYS)] + [loaded["o"]["v"]]
    return [loaded["step"], *(v for array in arrays for v in array.unique().tolist())]


def save_anew(root: Path, wanted: dict[str, Any], stored: tuple[str, int]) -> None:
    dist_ckpt_strategies.save(wanted, root, stored, overwrite=True)


@contextmanager
def replaced_at(root: Path, moment: str, replace: Callable[[], None]) -> Iterator[list[str]]:
    """Within the block the first open of such a file below ``root`` waits for another save."""
    seen: list[str] = []
    lock = threading.Lock()

    def act(_name: str, path: str) -> None:
        with lock:
            is_it = not seen and path.startswith(str(root)) and bool(re.search(moment, path))
            seen.extend([path] * is_it)
        if is_it:
            replace()

    with before_calls(act, ("open",)):
        yield seen


def ways(root: Path) -> dict[str, Callable[[dict[str, Any]], Any]]:
    own = OwnLoadShardedStrategy(verify="off")
    two_stage = TwoStageDataParallelLoadShardedStrategy(dist.group.WORLD)
    parallel = FullyParallelLoadStrategyWrapper(own, dist.group.WORLD)
    ours, megatrons = (partial(load, entry, root=root) for entry in (Entry.OURS, Entry.MEGATRON))
    return {
        "ours": ours,
        "unverified": partial(ours, sharded_strategy=own),
        "megatron": megatrons,
        "two-stage": partial(ours, sharded_strategy=two_stage),
        "fully parallel": partial(megatrons, sharded_strategy=parallel),
    }


def load_beside_saves(rank: int, scratch: Path) -> None:
    prepare(60, replace_common=True)
    size = dist.get_world_size()
    for stored in FORMATS:
        moments = MOMENTS_OF_PACKS if stored == PACKS else MOMENTS
        for number, moment in enumerate(moments):
            root = scratch / f"{stored[0]}-{stored[1]}-{number}" / "c"
            for name, act in ways(root).items():
                save_anew(root, state(1.0, rank, size), stored)
                dist.barrier()

                def replace(root: Path = root, stored: tuple[str, int] = stored) -> None:
                    (scratch / "wanted").write_text(f"{root.parent.name} {stored[0]} {stored[1]}")
                    until(lambda: not (scratch / "wanted").exists())

                with (
                    cpu_stand_ins(),
                    replaced_at(root, moment if rank == 0 else "$^", replace) as seen,
                ):
                    found = outcome(partial(act, state(0.0, rank, size)))
                assert bool(seen) == (rank == 0), (stored, moment, name)
                if stored == PACKS and not isinstance(found, Failure):  # it has begun anew
                    assert set(values_in(found)) in ({1.0}, {2.0}), (moment, name)
                else:
                    assert isinstance(found, Failure), (stored, moment, name, found)
                    assert "replaced" in found.text, (stored, moment, name, found)
                    assert found.is_ours, (stored, moment, name, found)
                    assert stored != PACKS or "parallel" in name or name == "megatron", found
                with cpu_stand_ins():
                    again = act(state(0.0, rank, size))
                assert again["step"] == 2.0
                dist.barrier()


@pytest.mark.multiprocess
def test_every_rank_of_a_load_learns_of_it(tmp_path: Path) -> None:
    is_over, wanted = threading.Event(), tmp_path / "wanted"

    def save_on_demand() -> None:
        while not is_over.wait(0.01):
            if wanted.exists() and (text := wanted.read_text()):
                name, *stored = text.split()
                save_anew(tmp_path / name / "c", state(2.0), (stored[0], int(stored[1])))
                wanted.unlink()

    saver = threading.Thread(target=save_on_demand)
    saver.start()
    try:
        found = run_processes(2, load_beside_saves, tmp_path, timeout_s=200)
    finally:
        is_over.set()
        saver.join()
    assert found == [None] * 2


def load_what_each_rank_sees(rank: int, scratch: Path) -> None:
    prepare(12)
    for stored in FORMATS:
        for value, name in enumerate("ab"):
            save_anew(scratch / name, state(value, rank, 2), stored)
        dist.barrier()
        for name, act in ways(scratch / "ab"[rank]).items():
            if name in {"ours", "unverified"}:  # see test_kill_table
                continue
            with cpu_stand_ins():
                found = outcome(partial(act, state(0.0, rank, 2)))
            assert isinstance(found, Failure), (stored, name, found)
            assert "different checkpoints" in found.text, (stored, name, found)


@pytest.mark.multiprocess
def test_ranks_that_open_different_saves_are_refused(tmp_path: Path) -> None:
    assert run_processes(2, load_what_each_rank_sees, tmp_path, timeout_s=300) == [None] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "then"),
    [(("zarr", 1), ("zarr", 1)), (("zarr", 1), PACKS), (PACKS, PACKS)],  # packs stay beside others
    ids=str,
)
def test_a_conversion_and_a_comparison_learn_of_it(
    stored: tuple[str, int], then: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_CKPT_VERIFY", "off")
    root, other, target = (tmp_path / name for name in ("root", "other", "target"))
    save_anew(other, state(1.0), stored)
    acts: list[Callable[[], Any]] = [
        lambda: dist_ckpt_strategies.convert(root, target, "pack"),
        lambda: dist_ckpt_strategies.convert(root, target, "torch_dist"),
        lambda: dist_ckpt_strategies.diff(other, root),
    ]
    moment = MOMENTS_OF_PACKS[-1]
    if stored != PACKS:  # of which a load begins anew
        moment = MOMENTS[1]
        acts.append(lambda: dist_ckpt_strategies.load(state(0.0), root))
    for act in acts:
        save_anew(root, state(1.0), stored)
        with replaced_at(root, moment, partial(save_anew, root, state(2.0), then)):
            require_refused(act, StorageError, str(root), "replaced")
        assert not (target / "metadata.json").exists()


@pytest.mark.slow
def test_verify_learns_of_it(tmp_path: Path) -> None:
    number, found = 0, [""]
    while number == 0 or found[-1]:  # once for each file that it opens, and once without a save
        root, opened = tmp_path / str(number), iter(range(-number, 1000))
        save_anew(root, state(1.0), PACKS)

        def act(_name: str, path: str, root: Path = root, opened: Iterator[int] = opened) -> None:
            if path.startswith(str(root)) and next(opened) == 0:
                save_anew(root, state(2.0), PACKS)

        with before_calls(act, ("open", "scandir")):
            try:
                assert verify(scan(root)) == (), number
            except CheckpointChangedError:
                found.append("replaced")
            else:
                found.append("whole" if next(opened) > 0 else "")
        number += 1
    assert {*found} == {"", "whole", "replaced"}, found


@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.slow
def test_a_load_by_dcp_learns_of_it(stored: tuple[str, int], tmp_path: Path) -> None:
    number, is_over = 0, False
    while not is_over:  # once for each file that the load opens
        root, opened = tmp_path / str(number), iter(range(-number, 1000))
        save_anew(root, state(1.0), stored)

        def act(_name: str, path: str, root: Path = root, opened: Iterator[int] = opened) -> None:
            if path.startswith(str(root)) and next(opened) == 0:
                save_anew(root, state(2.0), stored)

        wanted: dict[str, Any] = {f"w{n}": torch.zeros(64, 32) for n in range(NUM_ARRAYS)}
        wanted["o"] = None
        with before_calls(act, ("open",)):
            found = outcome(partial(dcp.load, wanted, root))
            is_over = next(opened) <= 0
        if isinstance(found, Failure):
            assert "CheckpointChangedError" in found.kinds, found.text
        else:
            values = [wanted[f"w{n}"] for n in range(NUM_ARRAYS)] + [wanted["o"]["v"]]
            assert len({v.mean().item() for v in values}) == 1
        number += 1
    assert number > NUM_ARRAYS // 3
