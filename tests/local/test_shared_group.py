"""Ranks meet over a process group that a save sends over behind training."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from dist_ckpt_strategies.comm.ballot import Ballot
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.local import CliqueReplicationStrategy, MCoreTensorAwareStateDict
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy
from tests.local.clique_worlds import SAVED, TIMEOUT_S, load, manager_of, outcome, run, state_of

pytestmark = pytest.mark.multiprocess


def clique_of_both() -> CliqueReplicationStrategy:
    """One clique of two ranks, with a process group of its own."""
    group = dist.new_group(range(2))
    return CliqueReplicationStrategy(group, max_bucket_bytes=2000, timeout_s=TIMEOUT_S)


def meet_over_a_group_in_use(rank: int, root: str) -> list[Any]:
    strategy, other = clique_of_both(), clique_of_both()
    group = strategy.local_group
    saver = manager_of(rank, root, strategy, node=rank, session_id="a")
    reader = manager_of(rank, root, node=rank, session_id="a", group=group)
    second = manager_of(rank, root, other, node=rank, session_id="b", group=group)
    seen: list[Any] = []
    for iteration in (1, 2, 3):
        begun = saver.save(state_of(rank, iteration), iteration, is_async=True)
        reader.find_latest()  # whether a save counts that is not finalised is not promised
        seen.append(load(reader, rank))
        seen.append(outcome(begun.wait) if begun else None)
        begun = saver.save(state_of(rank, iteration), iteration, is_async=True)
        beside = second.save(state_of(rank, iteration), iteration, is_async=True)
        seen.extend(outcome(request.wait) for request in (beside, begun) if request is not None)
        seen.append(load(second, rank))
    return seen


def test_a_manager_that_meets_over_a_group_waits_for_a_save_that_sends_over_it(
    tmp_path: Path,
) -> None:
    expected = [seen for n in "123" for seen in (("ok", n), SAVED, SAVED, SAVED, ("ok", n))]

    assert run(2, meet_over_a_group_in_use, tmp_path) == [expected] * 2


def deal_out_over_a_group_in_use(rank: int, root: str) -> list[Any]:
    strategy = clique_of_both()
    saver = manager_of(rank, root, strategy, node=rank)
    data = torch.arange(12.0)
    sharded = {"a": ShardedTensor.from_rank_offsets("a", data, replica_id=rank)}
    seen: list[Any] = []
    for iteration in (1, 2, 3):
        begun = saver.save(state_of(rank, iteration), iteration, is_async=True)
        state, _ = MCoreTensorAwareStateDict.from_state_dict(
            sharded, "fully_parallel", strategy.local_group
        )
        seen.append(len(list(state.tensors)))
        seen.append(outcome(begun.wait) if begun else None)
    return seen


def test_shards_are_dealt_out_over_a_group_once_a_save_no_longer_sends_over_it(
    tmp_path: Path,
) -> None:
    answers = run(2, deal_out_over_a_group_in_use, tmp_path)

    assert answers == [[1, SAVED] * 3, [0, SAVED] * 3]


def vote_over_a_group_in_use(rank: int, root: str) -> list[Any]:
    strategy = clique_of_both()
    saver = manager_of(rank, root, strategy, node=rank)
    ballot = Ballot(strategy.local_group, timeout_s=TIMEOUT_S)
    seen: list[Any] = []
    for iteration in (1, 2, 3):
        begun = saver.save(state_of(rank, iteration), iteration, is_async=True)
        for _ in range(100):  # the save takes its time to begin
            mirrored = ballot.mirror(bytes([rank]))
            seen += [(mirrored, ballot.is_unanimous(iteration))]
        seen.append(outcome(begun.wait) if begun else None)
    return seen


def test_a_step_votes_over_a_group_once_a_save_no_longer_sends_over_it(tmp_path: Path) -> None:
    answers = run(2, vote_over_a_group_in_use, tmp_path)

    votes = [[({1 - rank: bytes([1 - rank])}, True)] * 100 for rank in range(2)]
    assert answers == [[*votes[rank], SAVED] * 3 for rank in range(2)]


def save_elsewhere_over_a_group_in_use(rank: int, root: str) -> list[Any]:
    strategy = clique_of_both()
    saver = manager_of(rank, root, strategy, node=rank)
    zarr = ZarrSaveShardedStrategy(group=strategy.local_group, options=Options(timeout_s=TIMEOUT_S))
    sharded = {"a": ShardedTensor.from_rank_offsets("a", torch.arange(12.0), replica_id=rank)}
    seen: list[Any] = []
    for iteration in (1, 2, 3):
        begun = saver.save(state_of(rank, iteration), iteration, is_async=True)
        to = Path(root) / f"global{iteration}"
        to.mkdir(exist_ok=True)
        seen.append(outcome(partial(zarr.save, sharded, to)))
        seen.append(outcome(begun.wait) if begun else None)
    return seen


def test_a_global_save_goes_over_a_group_once_a_local_one_no_longer_sends_over_it(
    tmp_path: Path,
) -> None:
    assert run(2, save_elsewhere_over_a_group_in_use, tmp_path) == [[SAVED] * 6] * 2
