"""A save writes where nothing else writes: late calls, kills and refusals harm no checkpoint."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CoverageError,
    IncompleteCheckpointError,
    PlanError,
)
from dist_ckpt_strategies.recovery import load_latest
from dist_ckpt_strategies.strategies.zarr import ZarrSaveShardedStrategy
from tests.cli.commands import run
from tests.support.entries import (
    Entry,
    Failure,
    load,
    outcome,
    prepare,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.ranks import RankDiedError, run_processes
from tests.support.system_calls import before_calls, dying_at_change

pytestmark = pytest.mark.multiprocess

FORMATS = [("zarr", 1), ("zarr", 2)]
TORCH_DIST = ("torch_dist", 1)
ROWS = 1 << 15
LIMIT_S = 3.0


class Foreign:
    """A class that no list of classes allows."""


def state_of(rank: int, size: int, value: float, extra: str = "b") -> dict[str, Any]:
    """Two arrays that ranks share, one under a name of its own, an object and common state."""
    rows = torch.full((ROWS // size, 8), value)
    return {
        "w": ShardedTensor.from_rank_offsets("w", rows, (0, rank, size)),
        "x": ShardedTensor.from_rank_offsets(f"n/{extra}", rows + 0.5, (0, rank, size)),
        "o": ShardedObject("o", value, (size,), (rank,)),
        "value": value,
    }


def value_in(rank: int, size: int, root: Path, extra: str = "b", entry: Entry = Entry.OURS) -> Any:
    """The value that everything in a checkpoint holds; a list where it differs."""
    found = load(entry, state_of(rank, size, -1.0, extra), root)
    values = {*found["w"].unique().tolist(), found["o"], found["value"]}
    values.update((found["x"] - 0.5).unique().tolist())
    return values.pop() if len(values) == 1 else sorted(values)


def values_in(rank: int, size: int, root: Path, extra: str = "b") -> Any:
    """The same, or the Failure."""
    return outcome(partial(value_in, rank, size, root, extra))


# A call of a save that was given up, which storage carries out later


@contextmanager
def one_late_call(call: str, until: Path, *, name: str = "0.0") -> Iterator[None]:
    """The first call for a chunk's file of that name blocks until another file appears.

    What it was asked to do is done then, as on a network file system that had stalled.
    """
    taken: list[str] = []

    def stall(_: str, path: str) -> None:
        if ".partial-" in path and path.endswith(f"/w/{name}") and not taken:
            taken.append(path)
            while not until.exists():
                time.sleep(0.01)

    with before_calls(stall, [call]):
        yield


def save_again_after_a_late_call(
    rank: int, size: int, root: Path, backend: tuple[str, int], call: str, way: str
) -> Any:
    """One save is given up, the next succeeds, then the call of the first is carried out."""
    os.environ["DIST_CKPT_DIRECT_IO"] = "0"
    os.environ["DIST_CKPT_WRITER_PROCESS"] = "0"
    prepare(60)
    woken = root.with_suffix(".woken")
    options: dict[str, Any] = {"timeout_s": LIMIT_S}
    name = {1: "0.0", 2: "c.0.0"}[backend[1]]
    if way == "overwrite":
        dist_ckpt_strategies.save(state_of(rank, size, 0.0), root, backend)
        options["overwrite"] = True
    with one_late_call(call, woken, name=name):
        first = outcome(lambda: saved(way, state_of(rank, size, 1.0), root, backend, options))
        time.sleep(1.0)  # every rank has given up
        kept = values_in(rank, size, root)
        saved(way, state_of(rank, size, 2.0), root, backend, options | {"timeout_s": 60.0})
        dist.barrier()
        before = values_in(rank, size, root)
        woken.touch()
        time.sleep(1.0)
        dist.barrier()
        return first, kept, before, values_in(rank, size, root)


def saved(
    way: str, state: dict[str, Any], root: Path, backend: Any, options: dict[str, Any]
) -> None:
    if way == "async":
        dist_ckpt_strategies.save_async(state, root, backend, **options).wait()
    else:
        dist_ckpt_strategies.save(state, root, backend, **options)


@pytest.mark.parametrize(
    ("backend", "size", "call", "way"),
    [
        (("zarr", 1), 2, "open", "sync"),
        (("zarr", 2), 1, "write", "sync"),
        (("zarr", 2), 2, "open", "overwrite"),
        (("zarr", 1), 1, "write", "overwrite"),
        (("zarr", 2), 2, "write", "async"),
    ],
    ids=str,
)
def test_a_late_call_of_a_failed_save_does_not_reach_the_next_one(
    backend: tuple[str, int], size: int, call: str, way: str, tmp_path: Path
) -> None:
    root = tmp_path / "c"
    for found in run_processes(size, save_again_after_a_late_call, size, root, backend, call, way):
        first, kept, before, after = found
        assert isinstance(first, Failure), found
        assert {"StorageError", "PeerTimeoutError"} & set(first.kinds), first
        assert (before, after) == (2.0, 2.0)
        if way == "overwrite":
            assert kept == 0.0
        else:
            assert "IncompleteCheckpointError" in kept.kinds, kept


# What is refused, and what is replaced when

NUM_SYNCHRONOUS = 3
"""The first tries ask strategies for saves in the background that have none."""


def refuse_with_overwrite(rank: int, root: Path) -> list[Any]:
    """Saves that cannot be carried out, over a finished checkpoint that may be replaced."""
    prepare(60)
    dist_ckpt_strategies.save(state_of(rank, 2, 1.0), root)
    state = partial(state_of, rank, 2)
    unsafe = state(2.0) | {"common": Foreign()}
    unsafe_object = state(2.0) | {"o": ShardedObject("o", Foreign(), (2,), (rank,))}
    gap = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, 0, 2))}
    save, save_async = dist_ckpt_strategies.save, dist_ckpt_strategies.save_async
    tries: list[Callable[[], Any]] = [
        lambda: save_async(state(2.0), root, TORCH_DIST, overwrite=True),
        lambda: save_async(state(2.0), root, ("local_replicated", 1), overwrite=True),
        lambda: save(state(2.0), root, TORCH_DIST, overwrite=True, async_sharded_save=True),
        lambda: save(state(2.0), root, ("nothing", 1), overwrite=True),
    ]
    for backend in (*FORMATS, TORCH_DIST, ("local_replicated", 1)):
        tries += [
            partial(save, unsafe, root, backend, overwrite=True),
            partial(save, gap, root, backend, overwrite=True),
        ]
    for backend in (*FORMATS, ("local_replicated", 1)):
        tries += [partial(save, unsafe_object, root, backend, overwrite=True)]
    for backend in FORMATS:
        tries += [
            partial(save_async, unsafe, root, backend, overwrite=True),
            partial(save_async, unsafe_object, root, backend, overwrite=True),
            partial(save_async, gap, root, backend, overwrite=True),
        ]
    return [(outcome(one), values_in(rank, 2, root)) for one in tries]


def test_a_save_that_is_refused_leaves_the_finished_checkpoint(tmp_path: Path) -> None:
    for found in run_processes(2, refuse_with_overwrite, tmp_path / "c"):
        assert isinstance(found, list), found
        for number, (refused, kept) in enumerate(found):
            assert isinstance(refused, Failure)
            assert kept == 1.0, refused
            if number < NUM_SYNCHRONOUS:
                assert "StrategyError" in refused.kinds
                assert "in the background" in refused.text


# Kills


def killed_at_change(rank: int, root: Path, backends: Any, at: int) -> Any:
    """This process dies at its ``at``-th change of a directory in the last of the saves."""
    prepare(60)
    *earlier, last = backends
    for backend in earlier:
        dist_ckpt_strategies.save(state_of(rank, 1, 1.0, "old"), root, backend)
    with dying_at_change(at):
        state = state_of(rank, 1, 2.0, "new")
        return dist_ckpt_strategies.save(state, root, last, overwrite=bool(earlier))


@pytest.mark.parametrize(
    "backends",
    [*([one] for one in FORMATS), FORMATS, [FORMATS[1], FORMATS[1]]],
    ids=str,
)
def test_a_kill_anywhere_in_a_commit_leaves_the_old_or_the_new_checkpoint(
    backends: Any, tmp_path: Path
) -> None:
    outcomes: list[Any] = []
    for at in range(1, 60):
        root = tmp_path / f"c{at}"
        (ended,) = run_processes(1, killed_at_change, root, backends, at)
        found = values_in(0, 1, root, "new")
        if isinstance(found, Failure):
            found = values_in(0, 1, root, "old")
        outcomes.append("none" if isinstance(found, Failure) else found)
        dist_ckpt_strategies.save(state_of(0, 1, 3.0, "third"), root, overwrite=True)
        assert sorted(path.name for path in root.glob(".*")) == [], at
        assert values_in(0, 1, root, "third") == 3.0, at
        if not isinstance(ended, RankDiedError):
            break
    assert ended is None, "the last save was not killed"
    first = 1.0 if backends[1:] else "none"
    assert set(outcomes) == {first, 2.0}
    assert outcomes == [first] * outcomes.count(first) + [2.0] * outcomes.count(2.0)


def interrupted(root: Path) -> Path:
    """A checkpoint of format 2 that was replacing one of format 1 when it was killed."""
    for at in range(1, 60):
        place = root / f"at{at}" / "iter_0000001"
        run_processes(1, killed_at_change, place, FORMATS, at)
        staged = list(place.glob(".partial-*/metadata.json"))
        if staged and not (place / "metadata.json").exists() and (place / "arrays").exists():
            return place
    pytest.fail("no commit was interrupted")


def test_commands_see_an_interrupted_commit_and_complete_it(tmp_path: Path) -> None:
    place = interrupted(tmp_path)
    assert run("inspect", place).exit_code == 1
    with pytest.raises(IncompleteCheckpointError, match="dist-ckpt verify"):
        dist_ckpt_strategies.convert(place, tmp_path / "converted", "zarr@2")
    for way in ("verify", "prune", "load_latest"):
        copy = tmp_path / way / place.name
        shutil.copytree(place, copy)
        if way == "verify":
            assert run("verify", copy).exit_code == 0
        elif way == "prune":
            assert dist_ckpt_strategies.prune(copy.parent, keep_last=1).removed == ()
        else:
            found = load_latest(None, [copy.parent])
            assert (found.iteration, found.attempts) == (1, ())
        assert (copy / "metadata.json").exists()
        assert list(copy.glob(".*")) == []
        assert not (copy / "n" / "old").exists()


# A directory holds one finished checkpoint, or counts as incomplete; never a mixture

SIZE = 2
UNCHECKED = {"validate_access_integrity": False}


def with_a_gap(rank: int) -> dict[str, Any]:
    """Rank 1's half of the array is nobody's main replica."""
    rows = torch.zeros(2, 3)
    return {"w": ShardedTensor("w", rows, rows.dtype, (2, 3), (4, 3), (2 * rank, 0), None, rank)}


def on_rank_0(rank: int, act: Callable[[], Any]) -> None:
    """Between two barriers."""
    dist.barrier()
    if rank == 0:
        act()
    dist.barrier()


def saves_of_ours_and_megatrons(rank: int, scratch: Path) -> None:
    """In one directory, which is made, one after the other."""
    root = scratch / "a" / "b"
    ours, theirs = partial(save, Entry.OURS), partial(save, Entry.MEGATRON)
    ours(state_of(rank, SIZE, 1.0), root)
    assert value_in(rank, SIZE, root) == 1.0
    gap, over = with_a_gap(rank), partial(ours, root=root, overwrite=True)
    again = partial(ours, state_of(rank, SIZE, 2.0), root)
    require_refused(again, CheckpointExistsError, "overwrite=True")
    require_refused(partial(over, gap), PlanError)
    require_refused(partial(over, gap, **UNCHECKED), CoverageError, key="w")
    assert value_in(rank, SIZE, root) == 1.0
    require_refused(partial(ours, gap, scratch / "gap"), CoverageError, key="w")
    require_refused(partial(value_in, rank, SIZE, scratch / "gap"), CheckpointNotFoundError)

    over(state_of(rank, SIZE, 3.0, "new"))
    assert value_in(rank, SIZE, root, extra="new") == 3.0
    assert not (root / "n" / "b").exists()

    theirs(state_of(rank, SIZE, 4.0), root)
    assert value_in(rank, SIZE, root, entry=Entry.MEGATRON) == 4.0
    require_refused(partial(theirs, with_a_gap(rank), root), CoverageError)
    broken_off = partial(value_in, rank, SIZE, root)
    require_refused(broken_off, IncompleteCheckpointError, "metadata.json", "common.pt")
    other = state_of(rank, SIZE, 6.0, "third")
    require_refused(partial(ours, other, root), CheckpointExistsError, ": n/b;", "overwrite=True")
    theirs(state_of(rank, SIZE, 6.0, "third"), root)
    assert value_in(rank, SIZE, root, extra="third") == 6.0
    assert sorted(path.name for path in (root / "n").iterdir()) == ["third"]


def relative_paths(rank: int, scratch: Path) -> None:
    os.chdir(scratch)
    relative = Path("relative")
    save(Entry.OURS, state_of(rank, SIZE, 5.0), relative)
    (scratch / "a").mkdir(exist_ok=True)
    for place in (relative, scratch / "a" / ".." / relative):
        assert [value_in(rank, SIZE, place, entry=entry) for entry in Entry] == [5.0, 5.0]
    other = partial(save, Entry.OURS, state_of(rank, SIZE, 7.0, "new"))
    on_rank_0(rank, (relative / "metadata.json").unlink)
    require_refused(partial(other, relative), CheckpointExistsError, ": n/b;", "overwrite=True")
    other(relative, overwrite=True)
    assert value_in(rank, SIZE, relative, extra="new") == 7.0


class Other(SaveShardedStrategy):  # type: ignore[misc]
    """A strategy of a user's own, which leaves one file."""

    def __init__(self) -> None:
        super().__init__("other", 1)

    can_handle_sharded_objects = True

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        del sharded_state_dict
        Path(checkpoint_dir, "other").touch()


def wrapped_and_foreign_strategies(rank: int, scratch: Path) -> None:
    """Strategies that are not ours, or wrapped, remove nothing unasked."""
    wrapped, root = FullyParallelSaveStrategyWrapper(ZarrSaveShardedStrategy()), scratch / "c"
    save(Entry.OURS, state_of(rank, SIZE, 1.0), root)
    over = partial(save, Entry.OURS, root=root, sharded_strategy=wrapped, overwrite=True)
    require_refused(partial(over, with_a_gap(rank), **UNCHECKED), CoverageError)
    assert value_in(rank, SIZE, root) == 1.0
    over(state_of(rank, SIZE, 2.0, "new"))
    assert value_in(rank, SIZE, root, extra="new") == 2.0
    on_rank_0(rank, (root / "metadata.json").unlink)
    before = set(root.rglob("*"))
    without = partial(save, Entry.OURS, state_of(rank, SIZE, 3.0), root)
    require_refused(partial(without, sharded_strategy=wrapped), CheckpointExistsError)
    without(sharded_strategy=Other())
    assert before <= set(root.rglob("*"))


def megatron_after_an_interrupted_commit(rank: int, scratch: Path) -> None:
    """Our save breaks off while it moves its files into place; Megatron-Core's comes after it."""
    root = scratch / "c"
    save(Entry.OURS, state_of(rank, SIZE, 1.0), root)
    with before_calls(break_off, ["rename", "replace"]):
        broken = outcome(partial(save, Entry.OURS, state_of(rank, SIZE, 2.0), root, overwrite=True))
    assert isinstance(broken, Failure)
    dist.barrier()
    assert len(list(root.glob(".partial-*/metadata.json"))) == 1
    save(Entry.MEGATRON, state_of(rank, SIZE, 3.0), root)
    assert value_in(rank, SIZE, root) == 3.0


def break_off(_: str, path: str) -> None:
    """Of the moves from the staged place to the final one, the first fails."""
    if "/.partial-" in path and (Path(path).parent / "metadata.json").exists():
        raise OSError("on purpose")


@pytest.mark.parametrize(
    "act",
    [
        saves_of_ours_and_megatrons,
        relative_paths,
        wrapped_and_foreign_strategies,
        megatron_after_an_interrupted_commit,
    ],
)
def test_what_is_loaded_is_one_finished_checkpoint(
    act: Callable[[int, Path], None], tmp_path: Path
) -> None:
    require_on_ranks(SIZE, act, tmp_path)
