"""Requests that make no sense are refused on every rank, by name, and leave nothing finished."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import CheckpointNotFoundError, StorageError
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy
from tests.support.entries import Entry, Failure, load, outcome, prepare, save
from tests.support.ranks import run_processes
from tests.support.sharding import Cut, no_data, on_grid, state_of

pytestmark = pytest.mark.multiprocess


def cuts() -> list[Cut]:
    return [on_grid("w", (8, 4), (4, 2)), on_grid("b", (4,), (1,), num_replicas=4)]


def conflict(rank: int, root: Path) -> Any:
    """On rank 2 a local value stands where the checkpoint has common state."""
    prepare(60)
    save(Entry.OURS, {"iteration": 7, **state_of(rank, cuts())}, root)
    wanted: dict[str, Any] = state_of(rank, cuts(), no_data)
    if rank == 2:
        wanted["iteration"] = LocalNonpersistentObject(8)
    first = outcome(partial(load, Entry.OURS, wanted, root))
    wanted.pop("iteration", None)
    if rank == 2:
        wanted["iteration"] = wanted.pop(next(iter(wanted)))
    return first, outcome(partial(load, Entry.OURS, wanted, root))


def test_values_that_collide_on_one_rank_fail_on_every_rank(tmp_path: Path) -> None:
    results = run_processes(4, conflict, tmp_path / "c")

    for rank, failures in enumerate(results):
        assert isinstance(failures, tuple), failures
        for failure in failures:
            assert isinstance(failure, Failure), (rank, failure)
            assert failure.seconds < 50, (rank, failure)
            assert failure.is_ours
            assert "PlanError" in failure.kinds, failure
            assert "does not fit together" in failure.text, failure
            if rank != 2:
                assert failure.global_rank == 2, failure


def ask_for_what_is_not_there(rank: int, scratch: Path) -> dict[str, Any]:
    prepare(60)
    (scratch / "file").touch()
    places: dict[str, Callable[[], Any]] = {
        "nowhere": partial(load, Entry.OURS, state_of(rank, cuts(), no_data), scratch / "nowhere"),
        "file": partial(load, Entry.OURS, state_of(rank, cuts(), no_data), scratch / "file"),
        "below a file": partial(save, Entry.OURS, state_of(rank, cuts()), scratch / "file" / "c"),
    }
    state = partial(state_of, rank, cuts())
    requests: dict[str, Callable[[], Any]] = {
        "a name": partial(save, Entry.OURS, state(), scratch / "c", sharded_strategy="zarr"),
        "a loader": partial(
            save, Entry.OURS, state(), scratch / "c", sharded_strategy=ZarrLoadShardedStrategy()
        ),
        "a list": partial(dist_ckpt_strategies.save, cast("Any", [state()]), scratch / "c"),
        "too long": partial(save, Entry.OURS, state(), scratch / ("x" * 300)),
        "no path": partial(dist_ckpt_strategies.save, state(), cast("Any", None)),
        "bytes": partial(dist_ckpt_strategies.load, state(), cast("Any", b"c")),
    }
    save(Entry.OURS, state(), scratch / "finished")
    finished = partial(dist_ckpt_strategies.load, state_of(rank, cuts(), no_data))
    requests["an unknown loader"] = partial(finished, scratch / "finished", ("mine", 7))
    requests["another loader"] = partial(finished, scratch / "finished", ("zarr", 2))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    newest = partial(dist_ckpt_strategies.save, state(), scratch / "newest")
    requests |= {
        "no digests": partial(newest, ("zarr", 1), verify_integrity=True),
        "another queue": partial(newest, async_strategy="mine"),
        "other ranks": partial(finished, scratch / "finished", process_group=pairs[rank // 2]),
        "no digests to compare": partial(finished, scratch / "finished", verify_integrity=True),
        "newer save": partial(newest, verify_integrity=True, async_strategy="nvrx"),
        "newer load": partial(
            finished, scratch / "newest", verify_integrity=True, process_group=dist.group.WORLD
        ),
    }
    return {name: outcome(call) for name, call in (places | requests).items()}


def test_a_place_that_is_no_directory_is_named(tmp_path: Path) -> None:
    for result in run_processes(4, ask_for_what_is_not_there, tmp_path):
        for name in ("nowhere", "file"):
            assert CheckpointNotFoundError.__name__ in result[name].kinds
            assert "FileNotFoundError" in result[name].kinds
            assert str(tmp_path / name) in result[name].text
        kinds = {
            "a name": ("StrategyError", "expected a SaveShardedStrategy or a tuple"),
            "a loader": ("StrategyError", "expected a SaveShardedStrategy or a tuple"),
            "a list": ("PlanError", "expected a dict"),
            "too long": ("StorageError", "name is too long"),
            "no digests": ("StrategyError", "verify_integrity: only format ('zarr', 2)"),
            "another queue": ("StrategyError", "async_strategy: expected one of"),
            "other ranks": ("StrategyError", "its 2 ranks are not the 4"),
            "no digests to compare": ("StrategyError", "digests are kept by format ('zarr', 2)"),
            "no path": ("StrategyError", "checkpoint_dir: expected a str or a Path"),
            "bytes": ("StrategyError", "checkpoint_dir: expected a str or a Path"),
        }
        marker = str(tmp_path / "finished" / "metadata.json")
        assert "'mine', 7" in result["an unknown loader"].text
        assert marker not in result["an unknown loader"].text  # it says nothing of the kind
        assert marker in result["another loader"].text
        for name, (kind, words) in kinds.items():
            assert kind in result[name].kinds, result[name]
            assert words in result[name].text, result[name]
        assert isinstance(result["newer load"], dict), result["newer save"]
        assert StorageError.__name__ in result["below a file"].kinds
        assert str(tmp_path / "file") in result["below a file"].text


DATA = torch.ones(2)


class Unpicklable:
    """Something whose own code fails when it is pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("nope")


def wrong_values(rank: int, scratch: Path) -> dict[str, Any]:
    """On rank 1 something does not fit, which Megatron-Core's checks may or may not find."""
    prepare(60)
    shape, dtype, same_size = (state_of(rank, [on_grid("w", (8, 4), (4, 1))]) for _ in range(3))
    for state, change in (
        (shape, lambda data: data.reshape(4, 2)),
        (dtype, torch.Tensor.double),
        (same_size, lambda data: data.view(torch.int32)),
    ):
        (tensor,) = state.values()
        if rank == 1:
            tensor.data = change(tensor.data)
    grid = (1,) if rank == 0 else (2,)
    place, replica = (min(rank, 1),), max(0, rank - 1)
    states: dict[str, dict[str, Any]] = {
        "shape": shape,
        "dtype": dtype,
        "same size": same_size,
        "unpicklable": {"o": ShardedObject("o", Unpicklable() if rank == 1 else 1, (4,), (rank,))},
        "twice": {"o": ShardedObject("o", rank, (1,), (0,))},
        "gap": {"o": ShardedObject("o", rank, (5,), (rank,))},
        "no main replica": {"o": ShardedObject("o", rank, (4,), (rank % 2,), replica_id=1)},
        "grids": {"o": ShardedObject("o", rank, grid, place, replica_id=replica)},
        "twice on 1": {
            "a": ShardedObject("o", rank, (4,), (rank,)),
            "b": ShardedObject("o", rank, (4,), (rank,), replica_id=int(rank != 1)),
        },
        "nowhere": {"o": ShardedObject("", rank, (4,), (rank,))},
        "before": {"o": ShardedObject("o", rank, (4,), (-1 if rank == 1 else rank,))},
        "beyond": {"o": ShardedObject("o", rank, (4,), (5 if rank == 1 else rank,))},
        "no grid": {"o": ShardedObject("o", rank, (), (), replica_id=rank)},
        "number": {"o": ShardedObject(5, rank, (4,), (rank,))},
        "no replica": {
            "w": ShardedTensor(
                "w", DATA, DATA.dtype, (2,), (8,), (2 * rank,), (4,), None if rank == 1 else 0
            )
        },
        "before w": {"w": ShardedTensor("w", DATA, DATA.dtype, (2,), (8,), (2 * rank - 2,), (4,))},
        "beyond w": {"w": ShardedTensor("w", DATA, DATA.dtype, (2,), (8,), (2 * rank + 2,), (4,))},
    }
    seen: dict[str, Any] = {}
    for entry in Entry:
        for name, state in states.items():
            # What Megatron-Core's own check finds it raises on rank 0 alone.
            for checked in (True, False) if entry is Entry.OURS else (False,):
                root = scratch / f"{entry}.{name}.{checked}"
                call = partial(save, entry, dict(state), root, validate_access_integrity=checked)
                seen[f"{entry}, {name}, checked: {checked}"] = outcome(call), root
    return seen


def test_what_does_not_fit_is_refused_on_every_rank_and_never_finished(tmp_path: Path) -> None:
    results = run_processes(4, wrong_values, tmp_path, timeout_s=120)

    for result in results:
        assert isinstance(result, dict), result
        for name, (found, root) in result.items():
            if "no main replica" in name and "checked: False" in name:
                continue  # nothing says that there should have been an object
            assert isinstance(found, Failure), (name, found)
            assert not (root / "metadata.json").exists(), name
            if "ours" in name or "checked: False" in name:
                assert found.is_ours, (name, found)
            require_words(name.split(", ")[1], found)


def require_words(state: str, found: Failure) -> None:
    """What the message has to say of one of the states of ``wrong_values``."""
    if state == "unpicklable":
        assert "o/shard_1_4 cannot be saved: ValueError: nope" in found.text
        assert found.global_rank == 1
    if state in {"shape", "dtype", "same size"}:
        assert "but the ShardedTensor says" in found.text
        assert (found.key, found.global_rank) == ("w", 1)
    if state in {"twice", "gap", "no main replica", "grids"}:
        assert found.key == "o", (state, found)
    if state in {"twice", "gap", "grids"}:
        assert " on rank 1" in found.text or " and rank 1 " in found.text, (state, found)
    if state == "twice on 1":
        assert "DuplicateWriterError" in found.kinds, found
        assert found.key == "o"
    if state == "no replica":
        assert "w: expected a number or several as replica_id, found None" in found.text
        assert (found.key, found.global_rank) == ("w", 1)
    if state in {"before w", "beyond w"}:
        assert "w: rank " in found.text, (state, found)
        assert found.key == "w"


def set_options_badly(rank: int, root: Path) -> Any:
    """Rank 1 has an environment of its own."""
    prepare(60)
    state = state_of(rank, cuts())
    save(Entry.OURS, state, root)
    if rank == 1:
        os.environ["DIST_CKPT_IO_THREADS"] = "many"
    return outcome(partial(save, Entry.OURS, state, root, overwrite=True)), outcome(
        partial(load, Entry.OURS, state_of(rank, cuts(), no_data), root)
    )


def test_an_option_that_one_rank_cannot_read_fails_on_every_rank(tmp_path: Path) -> None:
    for rank, failures in enumerate(run_processes(4, set_options_badly, tmp_path / "c")):
        assert isinstance(failures, tuple), failures
        for failure in failures:
            assert isinstance(failure, Failure), (rank, failure)
            assert failure.seconds < 50, (rank, failure)
            assert "StrategyError" in failure.kinds, failure
            assert "DIST_CKPT_IO_THREADS: expected int, found 'many'" in failure.text, failure
            assert failure.global_rank == 1, failure
