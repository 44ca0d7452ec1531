"""Saves to the nodes' own disks, what is lost, fails or is damaged in between, and loads."""

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt_strategies.errors import PlanError, StrategyError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    LocalCheckpointManager,
    ReplicationStrategy,
)
from tests.local.clique_worlds import (
    SAVED,
    Node,
    Outcome,
    holder_directory,
    iterations_in,
    node_directory,
    outcome,
    partials_in,
    parts_in,
    remove,
    run_threads,
    state_of,
    values_of,
)
from tests.support.leaks import open_files_below, threads_left
from tests.support.processes import until
from tests.support.ranks import run_processes
from tests.support.system_calls import before_calls

LOSSES: dict[str, tuple[int, int, int, Sequence[str]]] = {
    "the first node": (4, 2, 2003, ["node0"]),
    "one of each clique": (4, 2, 1 << 30, ["node0/0", "node1/3"]),
    "all but one of each clique": (
        8, 4, 2003, ["node1/2", "node2/4", "node3/6", "node1/3", "node2/5", "node3/7"],
    ),
    "all nodes but one, uneven cliques": (8, 3, 1 << 30, ["node0", "node1", "node3"]),
}  # fmt: skip
"""Ranks, copies of each shard, bytes of a buffer, and what is gone."""


@pytest.mark.parametrize("lost", LOSSES)
@pytest.mark.slow
def test_one_surviving_member_of_each_clique_is_enough(lost: str, tmp_path: Path) -> None:
    size, factor, bucket, names = LOSSES[lost]
    before = threading.enumerate()

    def body(node: Node) -> list[Outcome]:
        manager = node.manager(factor, bucket=bucket)
        saved = node.save(manager, 5)
        node.once(lambda: remove([tmp_path / name for name in names]))
        return [saved, outcome(manager.find_latest), node.load(manager)]

    assert run_threads(size, body, tmp_path) == [[SAVED, ("ok", "5"), ("ok", "5")]] * size
    assert threads_left(before) == []
    assert open_files_below(tmp_path) == []


def test_a_lost_clique_means_the_save_before_or_an_error_everywhere(tmp_path: Path) -> None:
    root = str(tmp_path)

    def body(node: Node) -> None:
        manager = node.manager(keep=2)
        assert outcome(manager.find_latest) == ("ok", "-1")
        assert node.load(manager)[0] == "CheckpointNotFoundError"
        for iteration in (10, 20):
            node.save(manager, iteration)
        node.once(lambda: remove(parts_in(root, iteration=20, owner=3)))
        assert (outcome(manager.find_latest), node.load(manager)) == (("ok", "10"), ("ok", "10"))
        node.save(manager, 50)
        node.meet()
        assert iterations_in(root) == [10, 50]
        node.meet()
        node.once(lambda: remove([holder_directory(root, one) for one in (1, 3)]))
        assert outcome(manager.find_latest) == ("ok", "-1")
        kind, text = node.load(manager)
        assert kind == "NoReplicasAvailableError"
        assert "iteration 50: no rank has the shards of ranks 1, 3" in text

    run_threads(4, body, tmp_path)


def test_ranks_find_their_parts_wherever_they_and_the_parts_are(tmp_path: Path) -> None:
    root = str(tmp_path)

    def body(node: Node) -> None:
        node.save(node.manager(), 7)
        moved = {
            "no strategy": node.manager(0),
            "other cliques": node.manager(jump=1),
            "nodes swapped": node.manager(node=1 - node.rank // 2),
            "all mixed": node.manager(node=(1, 0, 0, 1)[node.rank]),
            "one node": node.manager(node=1),
        }
        for name, manager in moved.items():
            assert node.load(manager) == ("ok", "7"), name
        left = holder_directory(root, 2) / ".partial-0"
        node.once(lambda: left.write_bytes(b"left"))
        assert node.save(moved["nodes swapped"], 9) == SAVED
        assert node.load(moved["nodes swapped"]) == ("ok", "9")
        node.meet()
        assert (iterations_in(root), partials_in(root)) == ([9], [])

    run_threads(4, body, tmp_path)


@pytest.mark.slow
def test_as_many_saves_are_kept_as_asked_for_and_no_stale_files(tmp_path: Path) -> None:
    root = str(tmp_path)

    def body(node: Node) -> None:
        own = holder_directory(root, node.rank)
        manager = node.manager()
        node.save(manager, 1)
        number: Any = np.int64(2)
        assert outcome(lambda: manager.save(state_of(node.rank, 2), number)) == SAVED
        node.meet()
        assert iterations_in(root) == [2]
        again = node.manager(keep=2)
        for iteration in (3, 4, 5):
            node.save(again, iteration)
        node.meet()
        assert (iterations_in(root), len(parts_in(root))) == ([4, 5], 2 * 8)
        node.meet()
        node.save(again, 4)
        node.meet()
        assert (iterations_in(root), len(parts_in(root))) == ([4], 8)  # of the later save of 4
        assert node.load(again) == ("ok", "4")
        (own / ".partial-0").write_bytes(b"left by a killed save")
        in_the_way = own / "iter_0000000_0_local_a.safetensors"
        in_the_way.mkdir()
        node.save(again, 6)
        node.meet()
        in_the_way.rmdir()
        node.meet()
        assert (partials_in(root), iterations_in(root)) == ([], [4, 6])
        assert node.load(again) == ("ok", "6")

    run_threads(4, body, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["pread", "listdir"])
def test_nothing_is_removed_or_taken_for_absent_since_it_cannot_be_read_now(  # noqa: PLR0915
    call: str, tmp_path: Path
) -> None:
    """Of rank 1's state of 20, node 0 has a damaged copy, and node 1 one that fails to be read."""
    root, failing = str(tmp_path), threading.Event()
    holder = str(holder_directory(root, 3))

    def fail(_: str, path: str) -> None:
        is_it = path.startswith(f"{holder}/iter_0000020")
        if call == "listdir":  # only once the shards of 30 are written: a save begins with one
            is_begun = any(Path(holder).glob(".partial-*")) or 10 not in iterations_in(root)
            is_it = path == holder and is_begun
        if failing.is_set() and is_it:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def body(node: Node) -> None:
        manager = node.manager(keep=2)
        for iteration in (10, 20):
            node.save(manager, iteration)
        (copy,) = holder_directory(root, 1).glob("iter_0000020_1_*")
        node.once(lambda: copy.write_bytes(b"damaged"))
        node.once(failing.set)
        assert node.save(manager, 30) == SAVED
        node.once(failing.clear)
        assert [len(parts_in(root, iteration=one)) for one in (10, 20, 30)] == [8, 8, 8]
        node.once(lambda: remove(parts_in(root, iteration=30)))
        assert node.load(manager) == ("ok", "20")
        node.save(manager, 30)
        node.meet()
        assert iterations_in(root) == [20, 30]
        node.once(lambda: remove([one for one in parts_in(root) if str(one.parent) != holder]))
        node.once(failing.set)
        kind, text = node.load(manager)
        assert kind == "NoReplicasAvailableError"
        assert os.strerror(errno.EIO) in text

    with before_calls(fail, [call]):
        run_threads(4, body, tmp_path)


def test_sessions_are_kept_apart_and_foreign_files_count_as_absent(tmp_path: Path) -> None:
    def move_over() -> None:
        for path in tmp_path.glob("node*/one/*/*.safetensors"):
            shutil.copy(path, path.parents[2] / "other" / path.parent.name / path.name)
            newer = path.name.replace("iter_0000011", "iter_0000012")
            path.with_name(newer).write_bytes(b"of another program")

    def body(node: Node) -> None:
        one, other = node.manager(session_id="one"), node.manager(session_id="other")
        node.save(one, 11)
        assert node.load(other)[0] == "CheckpointNotFoundError"
        node.save(other, 5)
        node.once(move_over)
        for manager, newest in ((one, "11"), (other, "5")):
            assert (outcome(manager.find_latest), node.load(manager)) == (("ok", newest),) * 2

    run_threads(4, body, tmp_path)


class Unknown:
    """A class that is not allowed."""


def saves_beside(rank: int, root: Path) -> list[Any]:
    """Body of a process, which is a job of its own; the second comes while the first saves."""
    manager = LocalCheckpointManager(root, "run")

    def save(iteration: int) -> Any:
        manager = LocalCheckpointManager(root, "run")  # as in an attempt of its own
        return outcome(lambda: manager.save(state_of(rank, iteration), iteration))

    if rank == 0:
        manager.save(state_of(rank, 10), 10)
        (root / "saved").touch()
        until((root / "refused").exists)
        return [save(20), manager.find_latest()]
    until((root / "saved").exists)
    found = save(5), manager.find_latest()
    (root / "refused").touch()
    until(lambda: save(5)[0] == "ok")  # once the other has ended
    return [*found, manager.find_latest()]


@pytest.mark.multiprocess
def test_a_second_job_of_a_session_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    first, second = run_processes(2, saves_beside, tmp_path, makes_group=False)

    assert first == [("ok", "None"), 20]
    (kind, text), *found = second
    assert (kind, found) == ("CheckpointChangedError", [10, 5])
    assert "another job saves local checkpoints here" in text


def test_a_request_that_fails_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    def body(node: Node) -> None:
        manager, state, hollow = node.manager(), state_of(node.rank, 1), state_of(node.rank, 1)
        hollow.pop_tensors()
        node.save(manager, 1)
        for kind, text, own, iteration in (
            ("PlanError", "rank 3 saves iteration 3 with is_async=False, rank 0 iter", state, 3),
            ("PlanError", "2.5", state, 2.5),
            ("PlanError", "hollow", hollow, 2),
            ("StrategyError", "a dict cannot be saved", {}, 2),
            ("UnsafeObjectError", "Unknown", BasicTensorAwareStateDict({"a": [Unknown()]}), 2),
            (
                "StorageError",
                ".a[1] cannot",
                BasicTensorAwareStateDict({"a": [1, threading.Lock()]}),
                2,
            ),
        ):
            given: Any = (own, iteration) if node.rank == 3 else (state, 2)
            found = outcome(partial(manager.save, *given))
            assert found[0] == kind, (text, found)
            assert text in found[1], (text, found)
        assert node.save(manager, -2)[0] == "PlanError"
        unknown = BasicTensorAwareStateDict({"a": [Unknown()]})
        request = manager.save(unknown if node.rank == 3 else state, 2, is_async=True)
        assert request is not None
        kind, text = outcome(request.wait)
        assert (kind, "rank 3: " in text, "Unknown" in text) == ("UnsafeObjectError", True, True)
        assert node.load(manager) == ("ok", "1")
        assert partials_in(str(tmp_path)) == []

    run_threads(4, body, tmp_path)


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begin(node: Node, manager: LocalCheckpointManager, iteration: int) -> Any:
    """A save in the background, of a state that changes once it has begun."""
    state = state_of(node.rank, iteration)
    request = manager.save(state, iteration, is_async=True)
    for tensor in state.tensors:
        if tensor.numel():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0)
    state.state_dict["array"][:] = 0
    return request


@pytest.mark.slow
def test_a_save_in_the_background_keeps_what_was_there_and_counts_once_all_ranks_finalise_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path)

    def body(node: Node) -> None:
        manager = node.manager()
        both = begin(node, manager, 2), begin(node, manager, 3)
        until(both[1].done)
        node.meet()
        assert [outcome(one.wait) for one in both] == [SAVED, SAVED]
        assert node.load(manager) == ("ok", "3")
        assert iterations_in(root) == [3]
        vanishing = begin(node, manager, 5)
        until(vanishing.done)
        assert iterations_in(root) == [3]
        node.once(lambda: remove([*holder_directory(root, 1).glob(".partial-*")]))
        failure = outcome(vanishing.wait)
        assert "rank 1: " in failure[1]
        node.meet()
        assert (iterations_in(root), partials_in(root)) == ([3], [])
        assert outcome(vanishing.wait) == failure
        node.once(lambda: monkeypatch.setattr(tempfile, "mkstemp", full))
        assert outcome(lambda: begin(node, manager, 6))[0] == "StorageError"
        assert node.load(manager) == ("ok", "3")

    before = threading.enumerate()
    run_threads(4, body, tmp_path)
    assert threads_left(before) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 9])
def test_a_byte_that_changes_on_the_way_never_gets_in(number: int, tmp_path: Path) -> None:
    root = str(tmp_path)

    def save_all(node: Node) -> Outcome:
        return node.save(node.manager(), 5)

    def load_all(node: Node) -> Outcome:
        return node.load(node.manager(0))

    for kind, text in run_threads(4, save_all, tmp_path, flipped=(2, number)):
        assert kind == "CorruptCheckpointError"
        assert "rank 0 sent" in text or "rank 2" in text
    assert parts_in(root) == []

    assert run_threads(4, save_all, tmp_path) == [SAVED] * 4
    remove([node_directory(root, 1)])  # rank 2 gets its state from rank 0
    for kind, _ in run_threads(4, load_all, tmp_path, flipped=(2, number)):
        assert kind == "NoReplicasAvailableError"
    assert run_threads(4, load_all, tmp_path) == [("ok", "5")] * 4


def test_a_manager_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    session_id: Any
    for session_id in ("a/b", "/a", "..", ".", "a/", "a\0b", None, 3):
        with pytest.raises(PlanError, match="session_id"):
            LocalCheckpointManager(tmp_path, session_id)
    for name in ("keep", "max_bucket_bytes"):
        for number in (0, -1):
            options: Any = {name: number}
            with pytest.raises(PlanError, match=f"{name}: expected 1 or more"):
                LocalCheckpointManager(tmp_path, **options)
    methods = dict.fromkeys(ReplicationStrategy.__abstractmethods__)
    strategy: Any = type("NoClique", (ReplicationStrategy,), methods)
    manager = LocalCheckpointManager(tmp_path, repl_strategy=strategy())
    with pytest.raises(StrategyError, match="NoClique cannot say which ranks keep copies"):
        manager.save(BasicTensorAwareStateDict(values_of(0, 1)), 1)
