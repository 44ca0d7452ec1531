"""Cliques over real process groups: copies in memory, saves side by side, and a rank that dies."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException

from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.local import (
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    LazyReplicationStrategyBuilder,
    NoReplicasAvailableError,
)
from tests.local.clique_worlds import (
    SAVED,
    TIMEOUT_S,
    cliques,
    described,
    iterations_in,
    load,
    manager_of,
    node_directory,
    once,
    outcome,
    partials_in,
    parts_in,
    remove,
    save,
    state_of,
    values_of,
)
from tests.support.entries import require_on_ranks
from tests.support.ranks import RankDiedError, run_processes

pytestmark = pytest.mark.multiprocess


def strategy_of(kind: str) -> Any:
    """Cliques 0-2 and 1-3 of four ranks."""
    if kind == "lazy":
        return LazyCliqueReplicationStrategy(2, 2, timeout_s=TIMEOUT_S)
    if kind == "made":
        return cliques()
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    return CliqueReplicationStrategy(group, max_bucket_bytes=2000, timeout_s=TIMEOUT_S)


def exchange(rank: int, kind: str) -> None:
    """Copy the clique's states; then give one away, and get it back."""
    strategy = strategy_of(kind)
    low, high = clique = (rank % 2, rank % 2 + 2)
    copies, ids = strategy.replicate(state_of(rank, 1), f"state {rank}")
    assert ids == [f"state {low}", f"state {high}"]
    for number, copy in zip(clique, copies, strict=True):
        assert described(copy.state_dict) == described(values_of(number, 1))
    held, lost = dict(zip(ids, copies, strict=True)), ids[0]
    available: Any = {number: ids if number > 1 else [] for number in range(4)}
    if kind == "lazy":  # as NVRx hands it on
        available = list(available.values())
    plan = strategy.retrieve_plan(available, [lost])
    entries = [(entry.sender, entry.receiver, entry.id_) for entry in plan.entries]
    assert entries == [(high, low, lost), (high, high, lost)]
    got = strategy.retrieve_execute(plan, {id_: held[id_] for id_ in plan.required_ids()})
    assert list(got) == [lost]
    assert described(got[lost].state_dict) == described(values_of(low, 1))


def ask_for_what_no_rank_has(rank: int) -> None:
    """An error on all members of the clique, and on no other."""
    strategy = strategy_of("made")
    if rank % 2:
        wanted = ["gone"] if rank == 3 else []
        with pytest.raises(NoReplicasAvailableError, match="has a copy of gone, which rank 3") as e:
            strategy.retrieve_plan({0: ["here"], 1: ["here"]}, wanted)
        assert isinstance(e.value, CheckpointingException)
    plan = strategy.retrieve_plan({rank % 2: ["here"]}, ["here"] if rank > 1 else [])
    with pytest.raises(PlanError, match=f"rank {rank % 2}: .*which my_data does not hold"):
        strategy.retrieve_execute(plan, {})


def make_cliques(rank: int) -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    lazy = LazyCliqueReplicationStrategy(2, 2, timeout_s=TIMEOUT_S)
    made = lazy.replication_strategy
    assert lazy.replication_strategy is made
    assert isinstance(lazy, LazyReplicationStrategyBuilder)
    assert (made.global_ranks, made.target_device) == ((rank % 2, rank % 2 + 2), "cpu")
    refused: list[tuple[type[Exception], tuple[int, int], bool, str]] = [
        (PlanError, (1, 3), False, r"4 is not divisible by .* = 3"),
        (PlanError, (2, 3), True, r"3 copies .* nodes of 2 .* makes 2"),
        (PlanError, (1, 0), False, "expected 1 or more, .*replication_factor 0"),
        (PlanError, (rank + 1, 1), False, "replication_jump"),
        (StrategyError, (0, 2), False, "LOCAL_WORLD_SIZE"),
    ]
    for kind, numbers, is_uneven, text in refused:
        with pytest.raises(kind, match=text):
            cliques(numbers[1], numbers[0], allow_uneven=is_uneven)


def save_side_by_side(rank: int, root: str) -> None:
    """Two managers with one strategy, each with a save under way, and a copy in memory beside."""
    strategy = cliques()
    managers = [manager_of(rank, root, strategy, session_id=name) for name in "ab"]
    for iteration in (1, 2):
        requests = [m.save(state_of(rank, iteration), iteration, is_async=True) for m in managers]
        time.sleep(0.5 * (rank // 2))  # the others meet this one's save first
        states, _ = strategy.replicate(state_of(rank, iteration), "beside")
        assert len(states) == 2
        assert [outcome(one.wait) for one in requests if one is not None] == [SAVED] * 2
        assert [load(manager, rank) for manager in managers] == [("ok", str(iteration))] * 2


def refuse(rank: int, root: str) -> None:
    """What ranks call differently, each at once and on all; then all goes on."""
    strategy = cliques()
    manager = manager_of(rank, root, strategy)
    state = state_of(rank, 1)
    assert save(manager, rank, 1) == SAVED
    kind, text = outcome(lambda: manager.save(state, 2, is_async=rank == 1))
    assert kind == "PlanError"
    assert "rank 1 saves iteration 2 with is_async=True, rank 0 iteration 2 with" in text
    kind, text = load(manager, rank) if rank == 2 else save(manager, rank, 2)
    assert kind == "PlanError"
    assert "ranks [0, 1, 3] in local save of iteration 2 below" in text
    assert "ranks [2] in load of a local checkpoint below" in text
    session = manager_of(rank, root, strategy, session_id="b" if rank == 1 else "a")
    kind, text = save(session, rank, 1)
    assert kind == "PlanError"
    assert "ranks [1] in local save in session 'b' of iteration 1" in text
    everybody = manager_of(rank, root, CliqueReplicationStrategy(None, timeout_s=TIMEOUT_S))
    assert outcome(lambda: everybody.save(state, 2, is_async=True))[0] == "StrategyError"
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = manager_of(rank, root, group=halves[rank // 2])
    kind, text = load(half, rank)
    assert kind == "PlanError"
    assert rank > 1 or "was saved by 4 ranks, and 2 load it" in text
    assert rank < 2 or save(half, rank, 8)[0] == "PlanError"
    once(rank, lambda: remove([node_directory(root, 1)]))
    assert load(manager, rank) == ("ok", "1")


def use_cliques(rank: int, root: str) -> None:
    """Body of a rank."""
    for kind in ("group", "made", "lazy"):
        exchange(rank, kind)
    ask_for_what_no_rank_has(rank)
    make_cliques(rank)
    save_side_by_side(rank, f"{root}/beside")
    refuse(rank, f"{root}/refused")


def test_cliques_over_process_groups(tmp_path: Path) -> None:
    require_on_ranks(4, use_cliques, str(tmp_path))


def die_while_saving(rank: int, root: str) -> Any:
    manager = manager_of(rank, root, cliques())
    save(manager, rank, 1)
    if rank == 3:
        vars(os)["pwrite"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return save(manager, rank, 2)


def go_on(rank: int, root: str) -> None:
    manager = manager_of(rank, root, cliques())
    assert partials_in(root) != []
    assert load(manager, rank) == ("ok", "1")
    assert (save(manager, rank, 2), load(manager, rank)) == (SAVED, ("ok", "2"))
    assert (partials_in(root), iterations_in(root), len(parts_in(root))) == ([], [2], 8)


def test_a_rank_that_is_killed_while_it_saves_costs_that_save_only(tmp_path: Path) -> None:
    *others, killed = run_processes(4, die_while_saving, str(tmp_path))
    assert isinstance(killed, RankDiedError)
    assert all(kind != "ok" for kind, _ in others), others
    require_on_ranks(4, go_on, str(tmp_path))
