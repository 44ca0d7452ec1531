"""A strategy takes its last plan again where every rank saves what it saved before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies.comm.base import Message
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.comm.threads import ThreadCommunicator, ThreadWorld, run_ranks
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import CoverageError
from dist_ckpt_strategies.sharded.save_cache import SaveCache
from tests.support.formats import load_format1, save_format1

OPTIONS = Options(timeout_s=60.0)
NUM_RANKS = 3


def state_of(rank: int, rows: int, value: float) -> dict[str, ShardedTensor]:
    tensor = torch.full((rows, 2), value + rank)
    return {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, NUM_RANKS))}


def save(
    comm: ThreadCommunicator, root: Path, memory: SaveCache, rows: int = 4, value: float = 0.0
) -> object:
    """Save, and return the plan that served."""
    save_format1(state_of(comm.rank, rows, value), root, comm, OPTIONS, memory)
    return memory.planned


def loaded(root: Path, rank: int, rows: int) -> torch.Tensor:
    wanted = state_of(rank, rows, -1.0)
    found = load_format1(wanted, root, SoloCommunicator(), OPTIONS)
    tensor: torch.Tensor = found["w"]
    return tensor


def new(tmp_path: Path, name: str) -> Path:
    root = tmp_path / name
    root.mkdir()
    return root


def test_a_second_save_of_the_same_shards_takes_the_plan_again(tmp_path: Path) -> None:
    first, second = new(tmp_path, "first"), new(tmp_path, "second")

    def body(comm: ThreadCommunicator) -> bool:
        memory = SaveCache()
        return save(comm, first, memory) is save(comm, second, memory, value=10.0)

    assert all(run_ranks(NUM_RANKS, body))
    for rank in range(NUM_RANKS):
        assert torch.equal(loaded(first, rank, 4), torch.full((4, 2), 0.0 + rank))
        assert torch.equal(loaded(second, rank, 4), torch.full((4, 2), 10.0 + rank))


def test_other_shards_make_another_plan(tmp_path: Path) -> None:
    first, second = new(tmp_path, "first"), new(tmp_path, "second")

    def body(comm: ThreadCommunicator) -> bool:
        memory = SaveCache()
        return save(comm, first, memory) is save(comm, second, memory, rows=6, value=10.0)

    assert not any(run_ranks(NUM_RANKS, body))
    assert torch.equal(loaded(second, 2, 6), torch.full((6, 2), 12.0))


def test_a_rank_that_has_no_plan_yet_gets_one_and_the_others_go_along(tmp_path: Path) -> None:
    first, second = new(tmp_path, "first"), new(tmp_path, "second")

    def body(comm: ThreadCommunicator) -> bool:
        memory = SaveCache()
        before = save(comm, first, memory)
        if comm.rank == 1:
            memory = SaveCache()
        return save(comm, second, memory, value=10.0) is before

    assert not any(run_ranks(NUM_RANKS, body))
    assert torch.equal(loaded(second, 1, 4), torch.full((4, 2), 11.0))


def test_a_change_on_one_rank_alone_is_found_out(tmp_path: Path) -> None:
    first, second, third = (new(tmp_path, name) for name in ("first", "second", "third"))

    def body(comm: ThreadCommunicator) -> None:
        memory = SaveCache()
        save(comm, first, memory)
        state = {} if comm.rank == 1 else state_of(comm.rank, 4, 0.0)
        with pytest.raises(CoverageError, match="w"):
            save_format1(state, second, comm, OPTIONS, memory)
        save(comm, third, memory, value=20.0)

    run_ranks(NUM_RANKS, body)
    assert torch.equal(loaded(third, 1, 4), torch.full((4, 2), 21.0))


class Counting(ThreadCommunicator):
    """Counts its meetings."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.num_meetings = 0

    def all_gather(self, item: Message) -> list[Message]:
        self.num_meetings += 1
        return super().all_gather(item)


def test_the_plan_costs_its_meetings_once(tmp_path: Path) -> None:
    first, second = new(tmp_path, "first"), new(tmp_path, "second")
    comm = Counting(ThreadWorld(1, 10.0, torch.device("cpu")), 0)
    memory = SaveCache()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 1))}
    save_format1(state, first, comm, OPTIONS, memory)
    before = comm.num_meetings
    save_format1(state, second, comm, OPTIONS, memory)

    assert comm.num_meetings - before == before - 2
