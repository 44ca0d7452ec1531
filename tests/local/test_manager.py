"""Saves to the nodes' own disks, what is lost and damaged in between, and loads."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
    save,
    state_of,
)
from tests.support.ranks import RankDiedError, run_processes

pytestmark = pytest.mark.multiprocess

SAVED = ("ok", "None")


def run(size: int, body: Callable[..., Any], root: Path) -> list[Any]:
    """What every rank returns; raises what one of them raised."""
    results = run_processes(size, body, str(root), timeout_s=60)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


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
    return seen


def test_what_one_member_of_each_clique_has_is_enough(tmp_path: Path) -> None:
    expected = [[SAVED, ("ok", str(n)), ("ok", str(n))] for n in range(6)]
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
    seen["latest by headers"] = outcome(manager.find_latest)
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
        assert seen["latest by headers"] == ("ok", "30")
        assert seen["both copies damaged"] == ("ok", "10")
        assert seen["own copy damaged"] == ("ok", "40")
        kind, text = seen["all truncated"]
        assert kind == "NoReplicasAvailableError"
        assert "iteration 40: nobody has the parts of ranks 2" in text
        latest, (kind, text) = seen["clique lost"]
        assert latest == ("ok", "-1")
        assert kind == "NoReplicasAvailableError"
        assert "iteration 50: nobody has the parts of ranks 1, 3" in text


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
    for iteration in (1, 2):
        save(manager, rank, iteration)
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


def test_as_many_saves_are_kept_as_asked_for_and_no_leftovers(tmp_path: Path) -> None:
    for seen in run(4, keep_some, tmp_path):
        assert seen["one kept"] == [2]
        assert seen["two kept"] == [4, 5]
        assert seen["number of files"] == 2 * 8
        assert seen["went back"] == ([4], ("ok", "4"))
        assert seen["with leftovers"] == ("ok", "4")
        assert seen["leftovers"] == ([], [4, 6], ("ok", "6"))


class Unknown:
    """A class that nobody has allowed."""


class Patch(NamedTuple):
    """Something of the operating system that is another on one rank."""

    module: Any
    name: str
    value: Any


def with_patch(patch: Patch | None, action: Callable[[], Outcome]) -> Outcome:
    """What it comes to meanwhile."""
    with pytest.MonkeyPatch.context() as changes:
        if patch is not None:
            changes.setattr(*patch)
        return action()


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(rank: int, root: str) -> dict[str, Any]:
    manager = manager_of(rank, root, cliques())
    state = state_of(rank, 1)
    hollow = state_of(rank, 1)
    hollow.pop_tensors()
    unknown = BasicTensorAwareStateDict({"a": [Unknown()]})
    save(manager, rank, 1)
    seen: dict[str, Any] = {
        "iterations": outcome(lambda: manager.save(state, 2 + rank // 3)),
        "negative": save(manager, rank, -2),
        "class": outcome(lambda: manager.save(unknown if rank == 3 else state, 2)),
        "hollow": outcome(lambda: manager.save(hollow if rank == 3 else state, 2)),
        "no state": outcome(lambda: manager.save({} if rank == 3 else state, 2)),  # type: ignore[arg-type]
    }
    usage = shutil.disk_usage(root)._replace(free=1000)
    rename = os.replace

    def replace(old: Any, new: Any, **options: Any) -> None:
        if "_1_local" in str(new):  # of the two parts of a clique, one has been finished
            no_space()
        rename(old, new, **options)

    patches = {
        "room": Patch(shutil, "disk_usage", lambda _: usage),
        "write": Patch(os, "pwrite", no_space),
        "sync": Patch(os, "fsync", no_space),
        "rename": Patch(os, "replace", replace),
    }
    for name, patch in patches.items():
        on_rank = patch if rank == 3 else None
        seen[name] = with_patch(on_rank, lambda: save(manager, rank, 3))
        dist.barrier()
        seen[f"left by {name}"] = (iterations_in(root), partials_in(root))
        dist.barrier()
    seen["after"] = load(manager, rank)
    alone = manager_of(rank, root)
    on_rank = patches["write"] if rank == 3 else None
    seen["alone"] = with_patch(on_rank, lambda: save(alone, rank, 4))
    dist.barrier()
    seen["left alone"] = (iterations_in(root), partials_in(root))
    seen["in the end"] = (load(alone, rank), save(alone, rank, 5), load(alone, rank))
    return seen


def test_what_fails_on_one_rank_fails_on_all_and_the_save_before_stays(tmp_path: Path) -> None:
    kinds = {
        "iterations": "PlanError",
        "negative": "PlanError",
        "class": "UnsafeObjectError",
        "hollow": "PlanError",
        "no state": "StrategyError",
        "room": "StorageError",
        "write": "StorageError",
        "sync": "StorageError",
        "rename": "StorageError",
        "alone": "StorageError",
    }
    for seen in run(4, fail, tmp_path):
        assert {name: seen[name][0] for name in kinds} == kinds
        assert "rank 3 saves iteration 3, rank 0 saves 2" in seen["iterations"][1]
        assert "which has 1000 left" in seen["room"][1]
        for name in ("write", "sync", "rename"):
            assert "rank 3" in seen[name][1]
        for name in ("room", "write", "sync", "rename"):
            assert seen[f"left by {name}"] == ([1], []), name
        assert seen["after"] == ("ok", "1")
        assert seen["left alone"] == ([1], [])
        assert seen["in the end"] == (("ok", "1"), SAVED, ("ok", "5"))


def run_behind(rank: int, root: str) -> dict[str, Any]:
    manager = manager_of(rank, root, cliques())
    seen: dict[str, Any] = {}
    state = state_of(rank, 1)
    request = manager.save(state, 1, is_async=True)
    assert request is not None
    for tensor in state.tensors:
        if tensor.numel():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0)
    seen["wait"] = outcome(request.wait)
    seen["done"] = request.done()
    seen["overwritten"] = load(manager, rank)
    seen["threads"] = [t.name for t in threading.enumerate() if t.name == "local-save"]
    return seen


def test_a_save_behind_training_keeps_what_was_there_when_it_began(tmp_path: Path) -> None:
    for seen in run(4, run_behind, tmp_path):
        assert (seen["wait"], seen["done"]) == (SAVED, True)
        assert seen["overwritten"] == ("ok", "1")
        assert seen["threads"] == []


def finalise_late(rank: int, root: str) -> dict[str, Any]:
    manager = manager_of(rank, root, cliques())
    seen: dict[str, Any] = {}
    first = manager.save(state_of(rank, 2), 2, is_async=True)
    second = manager.save(state_of(rank, 3), 3, is_async=True)
    assert first is not None
    assert second is not None
    while not second.done():
        time.sleep(0.01)
    dist.barrier()
    seen["late"] = (outcome(first.wait), outcome(second.wait), load(manager, rank))
    seen["late kept"] = iterations_in(root)

    patch = Patch(os, "pwrite", no_space) if rank == 2 else None

    def fail_behind() -> Outcome:
        failing = manager.save(state_of(rank, 4), 4, is_async=True)
        assert failing is not None
        seen["first wait"] = outcome(failing.wait)
        return outcome(failing.wait)

    seen["failure"] = with_patch(patch, fail_behind)
    dist.barrier()
    seen["left"] = (iterations_in(root), partials_in(root), load(manager, rank))

    vanishing = manager.save(state_of(rank, 5), 5, is_async=True)
    assert vanishing is not None
    while not vanishing.done():
        time.sleep(0.01)
    once(rank, lambda: remove(parts_in(root, iteration=5, owner=1)))
    seen["vanished"] = (outcome(vanishing.wait), load(manager, rank))
    return seen


def test_a_save_behind_training_counts_once_it_is_finalised_on_all_ranks(tmp_path: Path) -> None:
    for seen in run(4, finalise_late, tmp_path):
        assert seen["late"] == (SAVED, SAVED, ("ok", "3"))
        assert seen["late kept"] == [3]
        assert seen["first wait"] == seen["failure"]
        kind, text = seen["failure"]
        assert kind == "StorageError"
        assert "rank 2" in text
        assert seen["left"] == ([3], [], ("ok", "3"))
        (kind, text), after = seen["vanished"]
        assert kind == "StorageError"
        assert "ranks 1" in text
        assert after == ("ok", "3")


def die_while_saving(rank: int, root: str) -> Any:
    manager = manager_of(rank, root, cliques())
    save(manager, rank, 1)
    if rank == 3:
        vars(os)["pwrite"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return save(manager, rank, 2)


def go_on(rank: int, root: str) -> dict[str, Any]:
    manager = manager_of(rank, root, cliques())
    seen: dict[str, Any] = {"left": partials_in(root), "loaded": load(manager, rank)}
    seen["saved"] = (save(manager, rank, 2), load(manager, rank))
    seen["left then"] = (partials_in(root), iterations_in(root), len(parts_in(root)))
    return seen


def test_a_rank_that_is_killed_while_it_saves_costs_that_save_only(tmp_path: Path) -> None:
    *others, killed = run_processes(4, die_while_saving, str(tmp_path), timeout_s=60)
    assert isinstance(killed, RankDiedError)
    assert all(kind != "ok" for kind, _ in others), others
    for seen in run(4, go_on, tmp_path):
        assert seen["left"] != []
        assert seen["loaded"] == ("ok", "1")
        assert seen["saved"] == (SAVED, ("ok", "2"))
        assert seen["left then"] == ([], [2], 8)


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


def make_room(rank: int, root: str) -> dict[str, Any]:
    """The disk has room for a save, but not for it and what killed saves have left."""
    manager = manager_of(rank, root, cliques())
    leftover = holder_directory(root, rank) / ".partial-0"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(bytes(1 << 20))
    dist.barrier()
    remove_file = Path.unlink

    def disk_usage(_: Any) -> Any:
        used = sum(path.stat().st_size for path in Path(root).rglob(".partial-*"))
        return usage._replace(free=(5 << 20) - used)

    def slow_unlink(path: Path, *, missing_ok: bool = False) -> None:
        time.sleep(0.2 * rank)
        remove_file(path, missing_ok)

    usage = shutil.disk_usage(root)
    size = 2 << 19
    state = BasicTensorAwareStateDict({"w": torch.zeros(size // 2, dtype=torch.uint8)})
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(shutil, "disk_usage", disk_usage)
        changes.setattr(Path, "unlink", slow_unlink)
        return {"saved": outcome(lambda: manager.save(state, 1))}


def test_what_killed_saves_have_left_is_gone_before_room_is_measured(tmp_path: Path) -> None:
    assert [seen["saved"] for seen in run(4, make_room, tmp_path)] == [SAVED] * 4


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

    def communicator(self, purpose: str) -> Any:
        """See CliqueReplicationStrategy."""
        self.last = Counted(super().communicator(purpose))
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
    assert run(4, count_messages, tmp_path) == [[400_000, 20_000]] * 4


@pytest.mark.parametrize("session_id", ["a/b", "/a", "..", ".", "a/", "a\0b"])
def test_a_session_id_that_leads_elsewhere_is_refused(session_id: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="session_id"):
        LocalCheckpointManager(tmp_path, session_id)


def test_a_manager_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="keep: expected 1 or more"):
        LocalCheckpointManager(tmp_path, keep=0)
