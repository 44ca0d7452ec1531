"""Every ``strict`` value does with ("zarr", 1) what it does with torch_dist."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from tests.support.entries import Entry, Failure, load, outcome, require_on_ranks, save
from tests.support.ranks import allow_torch_dist
from tests.support.sharding import Cut, Part, on_grid, part_of, sharded, state_of, zeros

pytest.importorskip("psutil", reason="without it torch_dist of Megatron-Core 0.16.1 hangs")

TORCH_DIST = ("torch_dist", 1)
STORED = [on_grid("w", (8,), (4,)), on_grid("extra", (4,), (4,))]
ASKED: dict[str, dict[int, list[str]]] = {
    "none": {},
    "all": {rank: ["new", "new.o"] for rank in range(4)},
    "some": {2: ["new"], 3: ["new.o"]},
}
"""By rank, keys that no rank stored: of an array, of an object."""


def stored(rank: int) -> dict[str, Any]:
    """An array and an object that will be asked for, and one of each that will not."""
    state: dict[str, Any] = state_of(rank, STORED)
    state["o"] = ShardedObject("o", {"x": rank}, (4,), (rank,))
    state["extra o"] = ShardedObject("extra.o", rank, (4,), (rank,))
    return state


def wanted(rank: int, asked: dict[int, list[str]]) -> dict[str, Any]:
    state: dict[str, Any] = state_of(rank, STORED[:1], zeros)
    state["o"] = ShardedObject("o", None, (4,), (rank,))
    for key in asked.get(rank, ()):
        replica = rank - min(other for other in asked if key in asked[other])
        if key == "new":
            part = Part(rank, (0,), (4,), replica)
            cut = Cut(key, (4,), torch.float32, (part,), (1,))
            state[key] = sharded(cut, part, torch.ones(4))
        else:
            state[key] = ShardedObject(key, "mine", (1,), (0,), replica)
    return state


def described(found: Any) -> Any:
    """What a load gave, without the class of error that a backend chooses."""
    if isinstance(found, Failure):
        return "raised"
    state, *keys = found if isinstance(found, tuple) else (found,)
    values = {name.split(" #")[0]: value for name, value in state.items()}
    return sorted(values), [sorted(each) for each in keys], values["o"], values["w"].tolist()


def expected(rank: int, strict: StrictHandling, asked: dict[int, list[str]]) -> Any:
    """What the documentation of StrictHandling says."""
    refused = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED)
    if strict is StrictHandling.RAISE_ALL or (strict in refused and asked):
        return "raised"
    keys = {
        StrictHandling.RETURN_UNEXPECTED: [[], asked.get(rank, [])],
        StrictHandling.RETURN_ALL: [["extra", "extra.o"], asked.get(rank, [])],
    }
    content = part_of(STORED[0], STORED[0].parts[rank]).tolist()
    return ["o", "w"], keys.get(strict, []), {"x": rank}, content


def load_strictly(rank: int, scratch: Path) -> None:
    """In all ways but those that hang in Megatron-Core: a mismatch that only some ranks raise."""
    allow_torch_dist()
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        save(Entry.MEGATRON, stored(rank), scratch / "torch_dist", sharded_strategy=TORCH_DIST)
        save(Entry.MEGATRON, stored(rank), scratch / "zarr")
        for case in product(StrictHandling, Entry, ("zarr", "torch_dist"), ASKED):
            strict, entry, backend, who = case
            if who == "some" and (entry, backend) != (Entry.OURS, "zarr"):
                continue
            value = strict if rank % 2 else strict.value
            ask = wanted(rank, ASKED[who])
            found = outcome(partial(load, entry, ask, scratch / backend, strict=value))
            assert described(found) == expected(rank, strict, ASKED[who]), (rank, case)


@pytest.mark.multiprocess
def test_strict_means_the_same_for_every_entry_and_backend(tmp_path: Path) -> None:
    require_on_ranks(4, load_strictly, tmp_path)
