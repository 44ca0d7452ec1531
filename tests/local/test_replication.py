"""Replication strategies by themselves: copies in memory, plans, and who is in a clique."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException

from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LazyCliqueReplicationStrategy,
    LazyReplicationStrategyBuilder,
    LocalCheckpointManager,
    NoReplicasAvailableError,
    ReplicationStrategy,
)
from tests.local.clique_worlds import (
    SAVED,
    cliques,
    described,
    load,
    manager_of,
    outcome,
    run,
    state_of,
    values_of,
)
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

TIMEOUT_S = 60.0


def strategy_of(kind: str) -> ReplicationStrategy:
    """Cliques 0-2 and 1-3 of four ranks."""
    if kind == "lazy":
        return LazyCliqueReplicationStrategy(2, 2, timeout_s=TIMEOUT_S)
    if kind == "made":
        return CliqueReplicationStrategy.from_replication_params(2, 2, timeout_s=TIMEOUT_S)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[dist.get_rank() % 2]
    return CliqueReplicationStrategy(group, max_bucket_bytes=2000, timeout_s=TIMEOUT_S)


def exchange(rank: int, kind: str) -> list[Any]:
    """Copy the clique's states; then give one away, and get it back."""
    strategy: Any = strategy_of(kind)
    before = values_of(rank, 1)
    copies, ids = strategy.replicate(BasicTensorAwareStateDict(before), f"state {rank}")
    clique = [rank % 2, rank % 2 + 2]
    for number, copy in zip(clique, copies, strict=True):
        assert described(copy.state_dict) == described(values_of(number, 1))
    held = dict(zip(ids, copies, strict=True))
    mine, other = ids[clique.index(rank)], ids[1 - clique.index(rank)]
    available: Any = {number: ids if number > 1 else [] for number in range(4)}
    if kind == "lazy":  # as NVRx hands it on
        available = list(available.values())
    plan = strategy.retrieve_plan(available, [mine] if rank < 2 else [other])
    assert plan.required_ids() == plan.required_ids(rank)
    got = strategy.retrieve_execute(plan, {id_: held[id_] for id_ in plan.required_ids()})
    for found in got.values():
        assert described(found.state_dict) == described(values_of(rank % 2, 1))
    entries = [(entry.sender, entry.receiver, entry.id_) for entry in plan.entries]
    return [ids, sorted(got), entries]


@pytest.mark.parametrize("kind", ["group", "made", "lazy"])
def test_a_clique_copies_its_states_and_gives_them_back(kind: str) -> None:
    found = run_processes(4, exchange, kind)

    for rank, result in enumerate(found):
        low, high = rank % 2, rank % 2 + 2
        lost = f"state {low}"
        assert result == [
            [lost, f"state {high}"],
            [lost],
            [(high, low, lost), (high, high, lost)],
        ], result


def ask_for_what_nobody_has(rank: int) -> list[str]:
    strategy = strategy_of("made")
    messages = []
    wanted = ["gone"] if rank == 3 else []
    if rank % 2:
        with pytest.raises(NoReplicasAvailableError) as caught:
            strategy.retrieve_plan({0: ["here"], 1: ["here"]}, wanted)
        assert isinstance(caught.value, CheckpointingException)
        messages.append(str(caught.value))
    plan = strategy.retrieve_plan({rank % 2: ["here"]}, ["here"] if rank > 1 else [])
    with pytest.raises(PlanError) as refused:
        strategy.retrieve_execute(plan, {})
    return [*messages, str(refused.value)]


def test_what_no_rank_has_is_an_error_on_all_members_of_the_clique_and_no_other() -> None:
    found = run_processes(4, ask_for_what_nobody_has)

    assert [len(messages) for messages in found] == [1, 2, 1, 2]
    for rank, messages in enumerate(found):
        assert f"rank {rank % 2}: " in messages[-1]
        assert "which my_data does not hold" in messages[-1]
        assert all("no rank has a copy of gone, which rank 3" in m for m in messages[:-1])


def make_cliques(rank: int) -> list[str]:
    lazy = LazyCliqueReplicationStrategy(2, 2, timeout_s=TIMEOUT_S)
    made = lazy.replication_strategy
    assert lazy.replication_strategy is made
    assert isinstance(lazy, LazyReplicationStrategyBuilder)
    assert (lazy.replication_jump, lazy.replication_factor) == (2, 2)
    messages = []
    for kind, numbers in [(PlanError, (1, 3)), (PlanError, (rank + 1, 1)), (StrategyError, (0, 2))]:
        with pytest.raises(kind) as caught:
            CliqueReplicationStrategy.from_replication_params(*numbers, timeout_s=TIMEOUT_S)
        messages.append(str(caught.value))
    return [str(made.global_ranks), made.target_device, *messages]


def test_cliques_are_made_once_and_numbers_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    for rank, found in enumerate(run_processes(4, make_cliques)):
        members, device, uneven, different, unknown = found
        assert (members, device) == (str((rank % 2, rank % 2 + 2)), "cpu")
        assert "4" in uneven
        assert "replication_jump" in different
        assert "LOCAL_WORLD_SIZE" in unknown


class NoClique(ReplicationStrategy):
    """A strategy that cannot say who is in a clique."""

    def replicate(self, local_ckpt: Any, id_: str) -> Any:
        return [local_ckpt], [id_]

    def retrieve_plan(self, globally_available_ids: Any, wanted: Any) -> Any:
        raise NotImplementedError

    def retrieve_execute(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_a_manager_refuses_a_strategy_that_names_no_ranks(tmp_path: Any) -> None:
    manager = LocalCheckpointManager(tmp_path, repl_strategy=NoClique())

    with pytest.raises(StrategyError, match="NoClique cannot say which ranks keep copies"):
        manager.save(BasicTensorAwareStateDict({"w": torch.ones(1)}), 1)


def save_side_by_side(rank: int, root: str) -> list[Any]:
    """Two managers with one strategy, each with a save under way, and a copy in memory beside."""
    strategy = cliques()
    managers = [manager_of(rank, root, strategy, session_id=name) for name in "ab"]
    seen: list[Any] = []
    for iteration in (1, 2, 3):
        requests = [m.save(state_of(rank, iteration), iteration, is_async=True) for m in managers]
        states, _ = strategy.replicate(state_of(rank, iteration), "beside")
        seen.append(len(states))
        seen.extend(outcome(request.wait) for request in requests if request is not None)
        seen.extend(load(manager, rank) for manager in managers)
    return seen


def test_managers_share_a_strategy_and_their_saves_do_not_mix(tmp_path: Path) -> None:
    expected: list[Any] = []
    for iteration in "123":
        expected += [2, SAVED, SAVED, ("ok", iteration), ("ok", iteration)]

    assert run(4, save_side_by_side, tmp_path) == [expected] * 4
