"""However ranks hold arrays and whatever they request, each gets what was saved, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.sharded.async_save import SaveCache
from dist_ckpt_strategies.strategies.zarr import EitherFormatLoadShardedStrategy
from dist_ckpt_strategies.two_stage.load import CheckpointLoad
from tests.support.formats import save_format1, save_format2
from tests.support.sharding import (
    ALL_DTYPES,
    Cut,
    Part,
    at_random,
    on_grid,
    part_of,
    replicated,
    same_bits,
    sharded,
    state_of,
)
from tests.support.thread_ranks import ThreadCommunicator, run_ranks

OPTIONS = Options(timeout_s=20, max_inflight_bytes=20_000)
"""So little memory that a few kilobytes take several rounds."""


@dataclass(frozen=True, slots=True)
class Request:
    """A box that a rank asks for, and the memory it has for it."""

    cut: Cut
    part: Part
    layout: str

    def data(self) -> torch.Tensor | None:
        """New memory, none, or memory that needs a copy."""
        shape = self.part.shape
        if self.layout == "none":
            return None
        if self.layout == "transposed":
            return torch.zeros(shape[::-1], dtype=self.cut.dtype).permute(
                tuple(range(len(shape)))[::-1]
            )
        return torch.zeros(shape, dtype=self.cut.dtype)


def random_cuts(num_ranks: int, chance: random.Random) -> list[Cut]:
    """Arrays that were saved on grids or in random boxes, of any dtype, small and larger ones."""
    found = [Cut("scalar", (), torch.float32, (Part(0, (), ()),), ())]
    for number in range(chance.randint(1, 5)):
        shape = tuple(chance.choice([1, 2, 6, 12, 60]) for _ in range(chance.randint(1, 3)))
        dtype = chance.choice(ALL_DTYPES)
        if chance.random() < 0.5:
            grid = tuple(chance.choice([g for g in (1, 2, 3) if n % g == 0]) for n in shape)
            found.append(on_grid(f"g{number}", shape, grid, size=num_ranks, dtype=dtype))
        else:
            parts, seed = chance.randint(1, 5), chance.randrange(99)
            found.append(
                at_random(f"r{number}", shape, parts, size=num_ranks, dtype=dtype, seed=seed)
            )
    return found


def random_requests(cuts: list[Cut], num_ranks: int, chance: random.Random) -> list[list[Request]]:
    """Each array either cut anew, replicated or not, or in boxes that overlap as they please."""
    requests: list[list[Request]] = [[] for _ in range(num_ranks)]
    for cut in cuts:
        for rank, part in requested_parts(cut, num_ranks, chance):
            layout = chance.choice(["own", "none", "transposed"])
            requests[rank].append(Request(cut, part, layout))
    return requests


def requested_parts(cut: Cut, num_ranks: int, chance: random.Random) -> Iterator[tuple[int, Part]]:
    way = chance.choice(["all", "parts", "replicated parts", "boxes"])
    if way == "all" or not cut.shape:
        for rank in range(num_ranks):
            yield rank, Part(rank, (0,) * len(cut.shape), cut.shape, rank)
    elif way == "boxes":
        for rank in range(num_ranks):
            for _ in range(chance.randint(0, 2)):
                offset = tuple(chance.randrange(extent) for extent in cut.shape)
                shape = tuple(
                    chance.randint(1, n - o) for n, o in zip(cut.shape, offset, strict=True)
                )
                yield rank, Part(rank, offset, shape)
    else:
        seed = chance.randrange(99)
        parts = at_random(cut.key, cut.shape, num_ranks, size=num_ranks, seed=seed)
        for part in (replicated(parts, size=num_ranks) if "repl" in way else parts).parts:
            yield part.rank, part


def state_requested(requests: list[Request]) -> dict[str, ShardedTensor]:
    return {
        f"{n}": sharded(Cut(w.cut.key, w.cut.shape, w.cut.dtype, ()), w.part, w.data())
        for n, w in enumerate(requests)
    }


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([1, 2, 3, 4, 8]))
def test_ranks_that_read_alone_and_together_get_what_was_saved(seed: int, num_ranks: int) -> None:
    chance = random.Random(seed)
    cuts = random_cuts(num_ranks, chance)
    requests = random_requests(cuts, num_ranks, chance)
    strategy = EitherFormatLoadShardedStrategy(options=OPTIONS)
    save = chance.choice([save_format1, save_format2])
    with TemporaryDirectory() as folder:
        root = Path(folder)

        def save_and_load(comm: ThreadCommunicator) -> Any:
            save(state_of(comm.rank, cuts), root, comm, OPTIONS, SaveCache())
            load = CheckpointLoad(
                strategy, root, state_requested(requests[comm.rank]), comm, OPTIONS
            )
            load.prepare()
            return load.run(strategy.allowed)[0]

        results = run_ranks(num_ranks, save_and_load, timeout_s=20)
        for own, together in zip(requests, results, strict=True):
            alone = strategy.load_by(Communicator(), state_requested(own), root)
            assert list(together) == list(alone)
            for name, wanted in zip(alone, own, strict=True):
                expected = part_of(wanted.cut, wanted.part)
                assert same_bits(alone[name], expected)
                assert same_bits(together[name], expected)
