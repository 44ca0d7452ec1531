"""Every ``strict`` value does with ("zarr", 1) what it does with torch_dist."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from tests.support.entries import Entry, Failure, load, outcome, prepare, save
from tests.support.ranks import allow_torch_dist, run_processes
from tests.support.sharding import Cut, Part, on_grid, part_of, sharded, state_of, zeros

pytestmark = pytest.mark.multiprocess

pytest.importorskip("psutil", reason="without it torch_dist of Megatron-Core 0.16.1 hangs")

TORCH_DIST = ("torch_dist", 1)


def stored(rank: int) -> dict[str, Any]:
    """An array and an object that will be asked for, and one of each that will not."""
    state: dict[str, Any] = state_of(rank, [on_grid("w", (8,), (4,)), on_grid("extra", (4,), (4,))])
    state["o"] = ShardedObject("o", {"x": rank}, (4,), (rank,))
    state["extra o"] = ShardedObject("extra.o", rank, (4,), (rank,))
    return state


class Unexpected(StrEnum):
    """Which ranks ask for keys that nobody stored."""

    NONE = "none"
    ALL = "all"
    SOME = "ranks 2 and 3"


def unexpected_keys(rank: int, unexpected: Unexpected) -> list[str]:
    """An array on rank 2, an object on rank 3, or both everywhere."""
    return {
        Unexpected.NONE: [],
        Unexpected.ALL: ["new", "new.o"],
        Unexpected.SOME: {2: ["new"], 3: ["new.o"]}.get(rank, []),
    }[unexpected]


def wanted(rank: int, unexpected: Unexpected) -> dict[str, Any]:
    """An array and an object of the checkpoint, and perhaps more."""
    state: dict[str, Any] = state_of(rank, [on_grid("w", (8,), (4,))], zeros)
    state["o"] = ShardedObject("o", None, (4,), (rank,))
    keys = unexpected_keys(rank, unexpected)
    if "new" in keys:
        part = Part(rank, (0,), (4,), replica=0 if unexpected is Unexpected.SOME else rank)
        state["new"] = sharded(Cut("new", (4,), torch.float32, (part,), (1,)), part, torch.ones(4))
    if "new.o" in keys:
        replica = 0 if unexpected is Unexpected.SOME else rank
        state["new o"] = ShardedObject("new.o", "mine", (1,), (0,), replica)
    return state


def described(found: Any) -> Any:
    """What a load gave, without the class of error that a backend chooses."""
    if isinstance(found, Failure):
        return "raised"
    state, *keys = found if isinstance(found, tuple) else (found,)
    values = {name.split(" #")[0]: value for name, value in state.items()}
    return sorted(values), [sorted(each) for each in keys], values["o"], values["w"].tolist()


@dataclass(frozen=True)
class Case:
    """One call of ``load``."""

    strict: StrictHandling
    entry: Entry
    backend: str
    unexpected: Unexpected


def cases() -> Iterator[Case]:
    """All of them, but for what hangs in Megatron-Core: a mismatch that only some ranks raise."""
    for case in product(StrictHandling, Entry, ("zarr", "torch_dist"), Unexpected):
        found = Case(*case)
        ours = (Entry.OURS, "zarr")
        if found.unexpected is not Unexpected.SOME or (found.entry, found.backend) == ours:
            yield found


def load_strictly(rank: int, scratch: Path) -> dict[Case, Any]:
    allow_torch_dist()
    prepare(60)
    seen = {}
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        save(Entry.MEGATRON, stored(rank), scratch / "torch_dist", sharded_strategy=TORCH_DIST)
        save(Entry.MEGATRON, stored(rank), scratch / "zarr")
        for case in cases():
            strict = case.strict if rank % 2 else case.strict.value
            ask = wanted(rank, case.unexpected)
            seen[case] = outcome(
                partial(load, case.entry, ask, scratch / case.backend, strict=strict)
            )
    return {case: described(found) for case, found in seen.items()}


def expected(rank: int, case: Case) -> Any:
    """What the documentation of StrictHandling says."""
    missing, unexpected = ["extra", "extra.o"], unexpected_keys(rank, case.unexpected)
    fails = {
        StrictHandling.ASSUME_OK_UNEXPECTED: case.unexpected is not Unexpected.NONE,
        StrictHandling.RAISE_UNEXPECTED: case.unexpected is not Unexpected.NONE,
        StrictHandling.RAISE_ALL: True,
    }
    if fails.get(case.strict):
        return "raised"
    keys = {
        StrictHandling.RETURN_UNEXPECTED: [[], unexpected],
        StrictHandling.RETURN_ALL: [missing, unexpected],
    }
    cut = on_grid("w", (8,), (4,))
    content = part_of(cut, cut.parts[rank]).tolist()
    return ["o", "w"], keys.get(case.strict, []), {"x": rank}, content


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_processes(4, load_strictly, tmp_path_factory.mktemp("strict"))


@pytest.mark.parametrize("strict", list(StrictHandling), ids=lambda strict: strict.value)
def test_strict_means_the_same_for_every_entry_and_backend(
    strict: StrictHandling, results: list[Any]
) -> None:
    for rank, seen in enumerate(results):
        assert isinstance(seen, dict), seen
        for case, found in seen.items():
            if case.strict is strict:
                assert found == expected(rank, case), (rank, case)
