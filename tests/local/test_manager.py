"""Saves to the nodes' own disks, what is lost and damaged in between, and loads."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from tests.local.clique_worlds import (
    SAVED,
    Outcome,
    cliques,
    cut,
    flip,
    holder_directory,
    iterations_in,
    load,
    manager_of,
    node_directory,
    once,
    outcome,
    partials_in,
    parts_in,
    remove,
    run,
    save,
    state_of,
)

pytestmark = pytest.mark.multiprocess


def lose_copies(rank: int, root: str) -> list[Outcome]:
    manager = manager_of(rank, root, cliques())
    losses: list[list[Path]] = [
        [],
        [holder_directory(root, 1)],
        [node_directory(root, 0)],
        [node_directory(root, 1)],
        [holder_directory(root, 0), holder_directory(root, 3)],
        [holder_directory(root, 2), holder_directory(root, 1)],
    ]
    seen = []
    for number, lost in enumerate(losses):
        seen.append(save(manager, rank, number))
        once(rank, lambda lost=lost: remove(lost))  # type: ignore[misc]
        seen.append(outcome(manager.find_latest))
        seen.append(load(manager, rank))
    seen.append(save(manager, rank, len(losses)))
    once(rank, lambda: put_a_file_in_place_of(node_directory(root, 1)))
    seen.append(outcome(manager.find_latest))
    seen.append(load(manager, rank))
    return seen


def put_a_file_in_place_of(directory: Path) -> None:
    """As a disk that cannot be listed any more."""
    remove([directory])
    directory.write_text("no directory")


def test_what_one_member_of_each_clique_has_is_enough(tmp_path: Path) -> None:
    expected = [[SAVED, ("ok", str(n)), ("ok", str(n))] for n in range(7)]
    for seen in run(4, lose_copies, tmp_path):
        assert seen == [one for some in expected for one in some]


def lose_three_nodes(rank: int, root: str) -> list[Outcome]:
    manager = manager_of(rank, root, cliques(3, allow_uneven=True))
    seen = [save(manager, rank, 5), load(manager, rank)]
    once(rank, lambda: remove([node_directory(root, node) for node in (0, 1, 3)]))
    return [*seen, load(manager, rank)]


def test_eight_ranks_in_uneven_cliques_survive_the_loss_of_all_nodes_but_one(
    tmp_path: Path,
) -> None:
    for seen in run(8, lose_three_nodes, tmp_path):
        assert seen == [SAVED, ("ok", "5"), ("ok", "5")]


CLIQUES_OF_EIGHT: dict[int, list[tuple[int, ...]]] = {
    2: [(0, 2), (1, 3), (4, 6), (5, 7)],
    4: [(0, 2, 4, 6), (1, 3, 5, 7)],
}


def lose_members(rank: int, root: str) -> dict[str, Any]:
    """Nodes of two; copies at two ranks, then at four."""
    seen: dict[str, Any] = {}
    for factor in (2, 4):
        manager = manager_of(rank, root, cliques(factor))
        members = CLIQUES_OF_EIGHT[factor]
        losses = {
            "a rank": [holder_directory(root, 5)],
            "a node": [node_directory(root, 2)],
            "all but one of each clique": [
                holder_directory(root, one) for clique in members for one in clique[1:]
            ],
        }
        for number, (name, lost) in enumerate(losses.items()):
            seen[f"{name}, {factor}"] = [save(manager, rank, 10 * factor + number)]
            once(rank, lambda lost=lost: remove(lost))  # type: ignore[misc]
            seen[f"{name}, {factor}"].append(load(manager, rank))
        save(manager, rank, 10 * factor + 9)
        once(rank, lambda: remove([holder_directory(root, one) for one in members[1]]))  # noqa: B023
        seen[f"a clique, {factor}"] = load(manager, rank)[0]
    return seen


def test_eight_ranks_get_back_what_any_member_of_their_clique_has(tmp_path: Path) -> None:
    for seen in run(8, lose_members, tmp_path):
        for factor in (2, 4):
            for number, name in enumerate(("a rank", "a node", "all but one of each clique")):
                assert seen[f"{name}, {factor}"] == [SAVED, ("ok", str(10 * factor + number))]
            assert seen[f"a clique, {factor}"] == "NoReplicasAvailableError"


def lose_a_clique(rank: int, root: str) -> dict[str, Any]:
    strategy = cliques()
    manager = manager_of(rank, root, strategy, keep=2)
    seen: dict[str, Any] = {"empty": (outcome(manager.find_latest), load(manager, rank))}
    for iteration in (10, 20):
        save(manager, rank, iteration)
    once(rank, lambda: remove(parts_in(root, iteration=20, owner=3)))
    seen["previous"] = (outcome(manager.find_latest), load(manager, rank))
    save(manager, rank, 30)
    seen["kept"] = iterations_in(root)
    once(rank, lambda: flip(*parts_in(root, iteration=30, owner=1)))
    seen["latest by descriptions"] = outcome(manager.find_latest)
    seen["both copies damaged"] = load(manager, rank)
    save(manager, rank, 40)
    own = parts_in(root, iteration=40, owner=0)[0]
    assert own.parent == holder_directory(root, 0)
    once(rank, lambda: flip(own))
    seen["own copy damaged"] = load(manager, rank)
    once(rank, lambda: cut(parts_in(root, owner=2), 5000))
    seen["all truncated"] = load(manager, rank)
    save(manager, rank, 50)
    once(rank, lambda: remove([holder_directory(root, one) for one in (1, 3)]))
    seen["clique lost"] = (outcome(manager.find_latest), load(manager, rank))
    return seen


def test_a_lost_clique_means_the_save_before_or_an_error_everywhere(tmp_path: Path) -> None:
    for seen in run(4, lose_a_clique, tmp_path):
        latest, (kind, _) = seen["empty"]
        assert (latest, kind) == (("ok", "-1"), "CheckpointNotFoundError")
        assert seen["previous"] == (("ok", "10"), ("ok", "10"))
        assert seen["kept"] == [10, 30]
        assert seen["latest by descriptions"] == ("ok", "30")
        assert seen["both copies damaged"] == ("ok", "10")
        assert seen["own copy damaged"] == ("ok", "40")
        kind, text = seen["all truncated"]
        assert kind == "NoReplicasAvailableError"
        assert "iteration 40: no rank has the shards of ranks 2" in text
        latest, (kind, text) = seen["clique lost"]
        assert latest == ("ok", "-1")
        assert kind == "NoReplicasAvailableError"
        assert "iteration 50: no rank has the shards of ranks 1, 3" in text


def change_places(rank: int, root: str) -> dict[str, Any]:
    strategy = cliques()
    save(manager_of(rank, root, strategy), rank, 7)
    moved = {
        "no strategy": manager_of(rank, root),
        "other cliques": manager_of(rank, root, cliques(jump=1)),
        "nodes swapped": manager_of(rank, root, strategy, node=1 - rank // 2),
        "all mixed": manager_of(rank, root, strategy, node=(1, 0, 0, 1)[rank]),
        "one node": manager_of(rank, root, strategy, node=1),
    }
    seen: dict[str, Any] = {name: load(manager, rank) for name, manager in moved.items()}
    halves = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    half = manager_of(rank, root, group=halves[rank // 2])
    seen["half the ranks"] = load(half, rank)
    seen["half saves"] = save(half, rank, 8) if rank > 1 else None
    once(rank, lambda: (holder_directory(root, 2) / ".partial-0").write_bytes(b"left"))
    seen["saved"] = save(moved["nodes swapped"], rank, 9)
    seen["loaded"] = load(moved["nodes swapped"], rank)
    seen["left"] = (iterations_in(root), partials_in(root))
    return seen


def test_ranks_find_their_parts_wherever_they_and_the_parts_are(tmp_path: Path) -> None:
    for rank, seen in enumerate(run(4, change_places, tmp_path)):
        for name in ("no strategy", "other cliques", "nodes swapped", "all mixed", "one node"):
            assert seen[name] == ("ok", "7"), name
        kind, text = seen["half the ranks"]
        assert kind == "PlanError"
        assert "was saved by 4 ranks, and 2 load it" in text or rank > 1
        assert rank < 2 or seen["half saves"][0] == "PlanError"
        assert (seen["saved"], seen["loaded"]) == (SAVED, ("ok", "9"))
        assert seen["left"] == ([9], [])


def keep_some(rank: int, root: str) -> dict[str, Any]:
    manager = manager_of(rank, root, cliques())
    seen: dict[str, Any] = {}
    save(manager, rank, 1)
    seen["numpy's number"] = outcome(lambda: manager.save(state_of(rank, 2), np.int64(2)))  # type: ignore[arg-type]
    seen["one kept"] = iterations_in(root)
    again = manager_of(rank, root, manager.repl_strategy, keep=2)
    for iteration in (3, 4, 5):
        save(again, rank, iteration)
    seen["two kept"] = iterations_in(root)
    seen["number of files"] = len(parts_in(root))
    save(again, rank, 4)
    seen["went back"] = (iterations_in(root), load(again, rank))
    (holder_directory(root, rank) / ".partial-0").write_bytes(b"left by a killed save")
    in_the_way = holder_directory(root, rank) / "iter_0000000_0_local_a.part"
    in_the_way.mkdir()
    seen["with leftovers"] = load(again, rank)
    dist.barrier()
    save(again, rank, 6)
    in_the_way.rmdir()
    dist.barrier()
    seen["leftovers"] = (partials_in(root), iterations_in(root), load(again, rank))
    return seen


def test_as_many_saves_are_kept_as_requested_and_no_stale_files(tmp_path: Path) -> None:
    for seen in run(4, keep_some, tmp_path):
        assert seen["numpy's number"] == SAVED
        assert seen["one kept"] == [2]
        assert seen["two kept"] == [4, 5]
        assert seen["number of files"] == 2 * 8
        assert seen["went back"] == ([4], ("ok", "4"))
        assert seen["with leftovers"] == ("ok", "4")
        assert seen["leftovers"] == ([], [4, 6], ("ok", "6"))


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        """What unpickling runs."""
        return Path.touch, (self.trace,)


def keep_apart(rank: int, root: str) -> dict[str, Any]:
    strategy = cliques()
    one = manager_of(rank, root, strategy, session_id="one")
    other = manager_of(rank, root, strategy, session_id="other")
    save(one, rank, 11)
    seen: dict[str, Any] = {"other": (outcome(other.find_latest), load(other, rank)[0])}
    save(other, rank, 5)
    seen["both"] = (load(one, rank), load(other, rank))

    def move_over() -> None:
        for node in (0, 1):
            found = node_directory(root, node)
            for path in (found / "one").glob("*/*.part"):
                shutil.copy(path, found / "other" / path.parent.name / path.name)

    once(rank, move_over)
    seen["copied"] = (outcome(other.find_latest), load(other, rank))

    def put_bombs() -> None:
        for path in list(Path(root).glob("node*/one/*/*.part")):
            newer = path.name.replace("iter_0000011", "iter_0000012")
            path.with_name(newer).write_bytes(pickle.dumps(Bomb(Path(root) / "trace")))
            if path.parent.name == "2":
                path.write_bytes(pickle.dumps(Bomb(Path(root) / "trace")))

    once(rank, put_bombs)
    seen["bombs"] = (outcome(one.find_latest), load(one, rank), (Path(root) / "trace").exists())
    return seen


def test_sessions_are_kept_apart_and_foreign_files_count_as_absent(tmp_path: Path) -> None:
    for seen in run(4, keep_apart, tmp_path):
        assert seen["other"] == (("ok", "-1"), "CheckpointNotFoundError")
        assert seen["both"] == (("ok", "11"), ("ok", "5"))
        assert seen["copied"] == (("ok", "5"), ("ok", "5"))
        assert seen["bombs"] == (("ok", "11"), ("ok", "11"), False)


@dataclass
class Counted:
    """A communicator that notes the largest of its messages."""

    inner: Communicator
    largest_nbytes: int = 0

    def __getattr__(self, name: str) -> Any:
        """Everything else is the other communicator's."""
        return getattr(self.inner, name)

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See Communicator."""
        self.largest_nbytes = max([self.largest_nbytes, *(len(send.data) for send in sends)])
        self.inner.exchange(sends, receives)


class CountingCliques(CliqueReplicationStrategy):
    """Cliques whose last communicator can be asked."""

    last: Any = None

    def communicator(self, purpose: str, detail: str = "") -> Any:
        """See CliqueReplicationStrategy."""
        self.last = Counted(super().communicator(purpose, detail))
        return self.last


def count_messages(rank: int, root: str) -> list[int]:
    seen = []
    for bound in (1 << 20, 20_000):
        strategy = CountingCliques.from_replication_params(2, 2, max_bucket_bytes=bound)
        manager = manager_of(rank, root, strategy, max_bucket_bytes=512)
        manager.save(BasicTensorAwareStateDict({"w": torch.zeros(100_000)}), bound)
        assert isinstance(strategy, CountingCliques)
        seen.append(strategy.last.largest_nbytes)
    return seen


def test_the_bound_on_what_travels_in_a_save_is_the_strategys(tmp_path: Path) -> None:
    for of_large_bound, of_small_bound in run(4, count_messages, tmp_path):
        assert of_large_bound > 400_000
        assert of_small_bound == 20_000


def call_something_else(rank: int, root: str) -> list[Outcome]:
    manager = manager_of(rank, root, cliques())
    seen = [save(manager, rank, 1)]
    seen.append(load(manager, rank) if rank == 2 else save(manager, rank, 2))
    seen.append(outcome(manager.find_latest) if rank == 0 else load(manager, rank))
    seen.append(load(manager, rank))
    return seen


def test_ranks_that_call_other_methods_than_each_other_all_learn_it(tmp_path: Path) -> None:
    found = run(4, call_something_else, tmp_path)

    for rank, (_, second, third, last) in enumerate(found):
        assert second[0] == third[0] == "PlanError", (rank, second, third)
        assert "ranks [0, 1, 3] in local save of iteration 2 below" in second[1]
        assert "ranks [2] in load of a local checkpoint below" in second[1]
        assert "ranks [0] in search for local checkpoints below" in third[1]
        assert last == found[0][-1]


def save_in_other_sessions(rank: int, root: str) -> Outcome:
    manager = manager_of(rank, root, cliques(), session_id="b" if rank == 1 else "a")
    return save(manager, rank, 1)


def test_copies_in_another_session_would_be_of_no_use_so_that_no_rank_saves(tmp_path: Path) -> None:
    for kind, message in run(4, save_in_other_sessions, tmp_path):
        assert kind == "PlanError"
        assert "ranks [0, 2, 3] in local save in session 'a' of iteration 1" in message
        assert "ranks [1] in local save in session 'b' of iteration 1" in message
    assert not list(tmp_path.rglob("iter_*"))


@pytest.mark.parametrize("session_id", ["a/b", "/a", "..", ".", "a/", "a\0b", None, 3])
def test_a_session_id_that_leads_elsewhere_is_refused(session_id: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="session_id"):
        LocalCheckpointManager(tmp_path, session_id)


@pytest.mark.parametrize("name", ["keep", "max_bucket_bytes"])
def test_a_manager_that_keeps_or_sends_nothing_is_refused(name: str, tmp_path: Path) -> None:
    for number in (0, -1):
        with pytest.raises(PlanError, match=f"{name}: expected 1 or more"):
            LocalCheckpointManager(tmp_path, **{name: number})  # type: ignore[arg-type]
