"""Every ``strict`` value does with ("zarr", 1) what it does with torch_dist."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from tests.support.entries import Entry, Failure, load, outcome, prepare, save
from tests.support.ranks import run_processes
from tests.support.sharding import Cut, Part, on_grid, part_of, sharded, state_of, zeros

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

pytest.importorskip("psutil", reason="without it torch_dist of Megatron-Core 0.16.1 hangs")

TORCH_DIST = ("torch_dist", 1)


def stored(rank: int) -> dict[str, Any]:
    """An array and an object that will be asked for, and one of each that will not."""
    state: dict[str, Any] = state_of(rank, [on_grid("w", (8,), (4,)), on_grid("extra", (4,), (4,))])
    state["o"] = ShardedObject("o", {"x": rank}, (4,), (rank,))
    state["extra o"] = ShardedObject("extra.o", rank, (4,), (rank,))
    return state


def wanted(rank: int, *, unexpected: bool) -> dict[str, Any]:
    """The array and object; on rank 2 perhaps an array, on rank 3 an object that nobody stored."""
    state: dict[str, Any] = state_of(rank, [on_grid("w", (8,), (4,))], zeros)
    state["o"] = ShardedObject("o", None, (4,), (rank,))
    if unexpected and rank == 2:
        part = Part(rank, (0,), (4,))
        state["new"] = sharded(Cut("new", (4,), torch.float32, (part,), (1,)), part, torch.ones(4))
    if unexpected and rank == 3:
        state["new o"] = ShardedObject("new.o", "mine", (1,), (0,))
    return state


def described(found: Any) -> Any:
    """What a load gave, without the class of error that a backend chooses."""
    if isinstance(found, Failure):
        return "raised"
    state, *keys = found if isinstance(found, tuple) else (found,)
    values = {name.split(" #")[0]: value for name, value in state.items()}
    return sorted(values), [sorted(each) for each in keys], values["o"], values["w"].tolist()


Seen = dict[tuple[str, str, bool, bool], Any]


def load_strictly(rank: int, scratch: Path) -> Seen:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    prepare(60)
    seen: Seen = {}
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        save(Entry.MEGATRON, stored(rank), scratch / "torch_dist", sharded_strategy=TORCH_DIST)
        save(Entry.MEGATRON, stored(rank), scratch / "zarr")
        for backend in ("zarr", "torch_dist"):
            for entry in Entry:
                for strict in StrictHandling:
                    for unexpected in (False, True):
                        ask = partial(wanted, rank, unexpected=unexpected)
                        options = {"strict": strict if rank % 2 else strict.value}
                        found = outcome(partial(load, entry, ask(), scratch / backend, **options))
                        key = (strict.value, entry.value, unexpected, backend == "torch_dist")
                        seen[key] = described(found)
    return seen


def expected(rank: int, strict: StrictHandling, *, unexpected: bool) -> Any:
    """By the documentation of StrictHandling."""
    own_unexpected = {2: ["new"], 3: ["new.o"]}.get(rank, []) if unexpected else []
    missing = ["extra", "extra.o"]
    part = on_grid("w", (8,), (4,)).parts[rank]
    values = {"x": rank}, part_of(on_grid("w", (8,), (4,)), part).tolist()
    fails = {
        StrictHandling.ASSUME_OK_UNEXPECTED: unexpected,
        StrictHandling.RAISE_UNEXPECTED: unexpected,
        StrictHandling.RAISE_ALL: True,
    }
    if fails.get(strict):
        return "raised"
    keys = {
        StrictHandling.RETURN_UNEXPECTED: [[], own_unexpected],
        StrictHandling.RETURN_ALL: [missing, own_unexpected],
    }
    return ["o", "w"], keys.get(strict, []), *values


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_processes(4, load_strictly, tmp_path_factory.mktemp("strict"), timeout_s=150)


@pytest.mark.parametrize("strict", list(StrictHandling), ids=lambda strict: strict.value)
def test_ours_does_what_the_documentation_says(strict: StrictHandling, results: list[Any]) -> None:
    for rank, seen in enumerate(results):
        assert isinstance(seen, dict), seen
        for unexpected in (False, True):
            right = expected(rank, strict, unexpected=unexpected)
            assert seen[strict.value, "ours", unexpected, False] == right, (rank, unexpected)


@pytest.mark.parametrize("strict", list(StrictHandling), ids=lambda strict: strict.value)
def test_both_entries_do_what_torch_dist_does(strict: StrictHandling, results: list[Any]) -> None:
    for rank, seen in enumerate(results):
        for unexpected in (False, True):
            theirs = seen[strict.value, Entry.MEGATRON.value, unexpected, True]
            for entry in Entry:
                for backend in ("zarr", "torch_dist"):
                    found = seen[strict.value, entry.value, unexpected, backend == "torch_dist"]
                    assert found == theirs, (rank, unexpected, entry, backend)
