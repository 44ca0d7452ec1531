"""Saves that fail, in the background or not: an error on all ranks, and the save before stays."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
)
from tests.local.clique_worlds import (
    SAVED,
    TIMEOUT_S,
    Outcome,
    cliques,
    iterations_in,
    load,
    manager_of,
    once,
    outcome,
    partials_in,
    parts_in,
    remove,
    run,
    save,
    state_of,
)
from tests.support.ranks import RankDiedError, run_processes

pytestmark = pytest.mark.multiprocess


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
        "half": outcome(lambda: manager.save(state, 2.5 if rank == 3 else 2)),  # type: ignore[arg-type]
        "class": outcome(lambda: manager.save(unknown if rank == 3 else state, 2)),
        "hollow": outcome(lambda: manager.save(hollow if rank == 3 else state, 2)),
        "no state": outcome(lambda: manager.save({} if rank == 3 else state, 2)),  # type: ignore[arg-type]
    }
    rename = os.replace

    def replace(old: Any, new: Any, **options: Any) -> None:
        if "_1_local" in str(new):  # of the two shards of a clique, one has been finished
            no_space()
        rename(old, new, **options)

    patches = {
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
        "half": "PlanError",
        "class": "UnsafeObjectError",
        "hollow": "PlanError",
        "no state": "StrategyError",
        "write": "StorageError",
        "sync": "StorageError",
        "rename": "StorageError",
        "alone": "StorageError",
    }
    for seen in run(4, fail, tmp_path):
        assert {name: seen[name][0] for name in kinds} == kinds
        assert "rank 3 saves iteration 3, rank 0 saves 2" in seen["iterations"][1]
        for name in ("write", "sync", "rename"):
            assert "rank 3" in seen[name][1]
        for name in ("write", "sync", "rename"):
            assert seen[f"left by {name}"] == ([1], []), name
        assert seen["after"] == ("ok", "1")
        assert seen["left alone"] == ([1], [])
        assert seen["in the end"] == (("ok", "1"), SAVED, ("ok", "5"))


def save_differently(rank: int, root: str) -> tuple[Outcome, Outcome]:
    """Only rank 1 saves in the background."""
    manager = manager_of(rank, root, cliques())
    refused = outcome(lambda: manager.save(state_of(rank, 1), 1, is_async=rank == 1))
    return refused, save(manager, rank, 2)


def test_ranks_that_differ_in_is_async_are_told_so_at_once(tmp_path: Path) -> None:
    for refused, after in run(4, save_differently, tmp_path):
        assert refused[0] == "PlanError"
        assert "rank 1 saves with is_async=True, rank 0 with is_async=False" in refused[1]
        assert after == SAVED


def run_behind(rank: int, root: str) -> dict[str, Any]:
    manager = manager_of(rank, root, cliques())
    seen: dict[str, Any] = {}
    state = state_of(rank, 1)
    request = manager.save(state, 1, is_async=True)
    assert request is not None
    for tensor in state.tensors:
        if tensor.numel():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(0)
    state.state_dict["array"][:] = 0
    seen["wait"] = outcome(request.wait)
    seen["done"] = request.done()
    seen["overwritten"] = load(manager, rank)
    on_rank = Patch(tempfile, "mkstemp", no_space) if rank == 3 else None
    again = state_of(rank, 2)
    seen["no mark"] = with_patch(
        on_rank, lambda: outcome(lambda: manager.save(again, 2, is_async=True))
    )
    everybody = manager_of(rank, root, CliqueReplicationStrategy(None, timeout_s=TIMEOUT_S))
    seen["default group"] = outcome(lambda: everybody.save(again, 2, is_async=True))
    seen["still there"] = load(manager, rank)
    seen["threads"] = [t.name for t in threading.enumerate() if t.name == "local-save"]
    return seen


def test_a_save_in_the_background_keeps_what_was_there_when_it_began(tmp_path: Path) -> None:
    for seen in run(4, run_behind, tmp_path):
        assert (seen["wait"], seen["done"]) == (SAVED, True)
        assert seen["overwritten"] == seen["still there"] == ("ok", "1")
        assert seen["no mark"][0] == "StorageError"
        assert seen["default group"][0] == "StrategyError"
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


def test_a_save_in_the_background_counts_once_it_is_finalised_on_all_ranks(tmp_path: Path) -> None:
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
    *others, killed = run_processes(4, die_while_saving, str(tmp_path))
    assert isinstance(killed, RankDiedError)
    assert all(kind != "ok" for kind, _ in others), others
    for seen in run(4, go_on, tmp_path):
        assert seen["left"] != []
        assert seen["loaded"] == ("ok", "1")
        assert seen["saved"] == (SAVED, ("ok", "2"))
        assert seen["left then"] == ([], [2], 8)
