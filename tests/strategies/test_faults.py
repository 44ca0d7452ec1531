"""What goes wrong on one rank of four is raised on all four, in time, with rank, key and file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PeerTimeoutError,
    PlanError,
    ShapeMismatchError,
    StorageError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy
from tests.faults.injection import limited_file_size
from tests.support.entries import (
    Entry,
    Failure,
    load,
    outcome,
    prepare,
    require_failure_everywhere,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.groups import group_of_size
from tests.support.ranks import run_processes
from tests.support.sharding import (
    Cut,
    Part,
    differences,
    no_data,
    on_grid,
    part_of,
    sharded,
    state_of,
)

pytestmark = pytest.mark.multiprocess

by_entry = pytest.mark.parametrize(
    ("entry", "engine"), [(Entry.OURS, "tensorstore"), (Entry.MEGATRON, "zarr")], ids=str
)

CULPRIT = 2
KEY = "own.2"
NOBODY = 65534
TIMEOUT_S = 100.0


class NotAllowed:
    """A class that no list of classes allows."""


def own_cuts() -> list[Cut]:
    """An array that all share, and one for each rank alone."""
    alone = [Cut(f"own.{n}", (64, 8), torch.float32, (Part(n, (0, 0), (64, 8)),)) for n in range(4)]
    return [on_grid("shared", (8, 8), (4, 2)), *alone]


def full_state(
    rank: int, data: Callable[[Cut, Part], torch.Tensor | None] = part_of
) -> dict[str, Any]:
    """The arrays, an object for each rank, and common state."""
    state: dict[str, Any] = state_of(rank, own_cuts(), data)
    state["object"] = ShardedObject(f"object.{rank}", {"of rank": rank}, (1,), (0,))
    state["iteration"] = 7
    return state


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that users other than root may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="dist-ckpt-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@contextmanager
def without_root() -> Iterator[None]:
    """The block runs as nobody, in this process alone; permissions mean nothing to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@dataclass(frozen=True)
class LoadFault:
    """What one rank alone meets, and how every rank reports it.

    Attributes:
        kind: class of the error.
        names: what the message names, below the checkpoint directory or as it is.
        damage: done to the checkpoint directory, once.
        request: changes the state dict of the rank that will fail.
    """

    kind: type[CheckpointError]
    names: tuple[str, ...]
    damage: Callable[[Path], Any] = lambda _: None
    request: Callable[[dict[str, Any]], Any] = lambda state: state


CHUNK = f"{KEY}/0.0"
OBJECT = f"object.{CULPRIT}/shard_0_1.pt"
NAME = f"{KEY} #0"


def remove(name: str, root: Path) -> None:
    (root / name).unlink()


def truncate(name: str, root: Path) -> None:
    os.truncate(root / name, (root / name).stat().st_size - 5)


def lengthen(name: str, root: Path) -> None:
    with (root / name).open("ab") as file:
        file.write(b"more")


def lock(name: str, root: Path) -> None:
    (root / name).chmod(0)


def make_directory(name: str, root: Path) -> None:
    (root / name).unlink()
    (root / name).mkdir()


def scribble(name: str, root: Path) -> None:
    (root / name).write_bytes(b"{ no longer what it was")


def flip_middle(name: str, root: Path) -> None:
    content = bytearray((root / name).read_bytes())
    content[len(content) // 2] ^= 0x40
    (root / name).write_bytes(content)


def store_unsafe(name: str, root: Path) -> None:
    torch.save({"deep": [NotAllowed()]}, root / name)


def want(
    state: dict[str, Any], *, key: str = KEY, shape: tuple[int, int] = (64, 8), data: Any = None
) -> None:
    """Ask for the culprit's array in another way."""
    part = Part(CULPRIT, (0, 0), shape)
    state[NAME] = sharded(Cut(key, shape, torch.float32, (part,)), part, data)


ZARRAY = f"{KEY}/.zarray"
EXTRA_DIM = ShardedTensor.from_rank_offsets(KEY, torch.zeros(64, 8, 1), allow_shape_mismatch=True)

LOAD_FAULTS = {
    "no .zarray": LoadFault(ArrayNotFoundError, (KEY,), partial(remove, ZARRAY)),
    ".zarray cannot be opened": LoadFault(
        StorageError, (KEY, ZARRAY, "permission denied"), partial(lock, ZARRAY)
    ),
    ".zarray is garbage": LoadFault(
        CorruptCheckpointError, (KEY, ZARRAY), partial(scribble, ZARRAY)
    ),
    "no chunk": LoadFault(IncompleteCheckpointError, (KEY, CHUNK), partial(remove, CHUNK)),
    "no chunk, into strided memory": LoadFault(
        IncompleteCheckpointError,
        (KEY, CHUNK),
        partial(remove, CHUNK),
        partial(want, data=torch.zeros(8, 64).t()),
    ),
    "chunk cannot be opened": LoadFault(
        StorageError, (KEY, CHUNK, "permission denied"), partial(lock, CHUNK)
    ),
    "chunk is a directory": LoadFault(StorageError, (KEY, CHUNK), partial(make_directory, CHUNK)),
    "chunk cut short": LoadFault(
        CorruptCheckpointError, (KEY, CHUNK, "2043 bytes, expected 2048"), partial(truncate, CHUNK)
    ),
    "chunk too long": LoadFault(CorruptCheckpointError, (KEY, CHUNK), partial(lengthen, CHUNK)),
    "other shape": LoadFault(
        ShapeMismatchError,
        (KEY, "(64, 8) in the checkpoint, (63, 8) requested"),
        request=partial(want, shape=(63, 8)),
    ),
    "other number of dims": LoadFault(
        ShapeMismatchError,
        (KEY, "(64, 8)", "(64, 8, 1)"),
        request=lambda state: state.update({NAME: EXTRA_DIM}),
    ),
    "unknown key": LoadFault(
        ArrayNotFoundError, ("own.22", KEY), request=partial(want, key="own.22")
    ),
    "meta device": LoadFault(
        PlanError, (KEY, "meta"), request=partial(want, data=torch.empty(64, 8, device="meta"))
    ),
    "no object": LoadFault(ArrayNotFoundError, (OBJECT,), partial(remove, OBJECT)),
    "object cut short": LoadFault(CorruptCheckpointError, (OBJECT,), partial(truncate, OBJECT)),
    "object with a flipped bit": LoadFault(
        CorruptCheckpointError, (OBJECT,), partial(flip_middle, OBJECT)
    ),
    "object of a class not allowed": LoadFault(
        UnsafeObjectError,
        (OBJECT, "tests.strategies.test_faults.NotAllowed", "allow="),
        partial(store_unsafe, OBJECT),
    ),
}


def loaders(entry: Entry) -> dict[str, Any]:
    """How a rank may load: by itself, sharing the reading, in Megatron-Core's wrapper."""
    if entry is Entry.MEGATRON:
        return {"plain": None}
    return {
        "plain": None,
        "two-stage": TwoStageDataParallelLoadShardedStrategy(group_of_size(2)),
        "wrapped": FullyParallelLoadStrategyWrapper(ZarrLoadShardedStrategy(), group_of_size(4)),
    }


def load_with_faults(rank: int, entry: Entry, engine: str, scratch: Path) -> dict[str, Any]:
    """One finished checkpoint, a copy for each fault, and what each rank saw in each way."""
    prepare(TIMEOUT_S, engine)
    whole, ways = scratch / "whole", loaders(entry)
    save(entry, full_state(rank), whole)
    seen: dict[str, Any] = {}
    for number, (name, fault) in enumerate(LOAD_FAULTS.items()):
        root = scratch / f"copy.{number}"
        if rank == 0:
            shutil.copytree(whole, root)
            fault.damage(root)
        dist.barrier()
        seen[name] = {}
        for way, strategy in ways.items():
            wanted = full_state(rank, no_data)
            wanted.pop("iteration")
            if rank == CULPRIT:
                fault.request(wanted)
            options = {"sharded_strategy": strategy} if strategy else {}
            with without_root(), cpu_stand_ins():  # the wrapper goes over CUDA
                seen[name][way] = outcome(partial(load, entry, wanted, root, **options))
    loaded = load(entry, full_state(rank, no_data), whole)
    seen["afterwards"] = differences(rank, own_cuts(), loaded)
    return seen


@by_entry
def test_damage_that_one_rank_meets_is_raised_on_every_rank(
    entry: Entry, engine: str, scratch: Path
) -> None:
    results = run_processes(4, load_with_faults, entry, engine, scratch)

    for result in results:
        assert isinstance(result, dict), result
        assert result["afterwards"] == [], "the group could not be used any more"
    for number, (name, fault) in enumerate(LOAD_FAULTS.items()):
        for way in results[0][name]:
            seen = [result[name][way] for result in results]
            require_failure_everywhere(seen, kind=fault.kind, culprit=CULPRIT, names=fault.names)
            assert {failure.key for failure in seen} <= {seen[0].key}, (name, way)
            assert all(failure.seconds < TIMEOUT_S / 2 for failure in seen), (name, way)
            if "/" in fault.names[0] + fault.names[-1]:
                assert all(f"copy.{number}/" in failure.text for failure in seen), (name, way)


@dataclass(frozen=True)
class SaveFault:
    """What stands in one rank's way when it saves.

    Attributes:
        obstruct: done to the directory before the save.
        kind: class of the error.
        names: what the message names.
        hinder: around the save on the culprit.
        change: changes the state dict of the culprit.
        mend: undoes what would be in the way of another save.
        culprit: the rank that notices.
    """

    kind: type[CheckpointError]
    names: tuple[str, ...]
    obstruct: Callable[[Path], Any] = lambda _: None
    hinder: Callable[[], Any] = nullcontext
    change: Callable[[dict[str, Any]], Any] = lambda state: state
    mend: Callable[[Path], Any] = lambda _: None
    culprit: int = CULPRIT


def put_file(name: str, root: Path) -> None:
    root.mkdir()
    (root / name).write_text("in the way")


def put_directory(name: str, root: Path) -> None:
    (root / name / "something").mkdir(parents=True)


def cannot_be_pickled(state: dict[str, Any]) -> None:
    state["object"].data = {"a generator": (n for n in range(3))}


SAVE_FAULTS = {
    "a file where the array goes": SaveFault(
        StorageError,
        (KEY,),
        partial(put_file, KEY),
        mend=lambda root: (root / KEY).unlink(),
        culprit=0,
    ),
    "a directory where the chunk goes": SaveFault(
        StorageError,
        (KEY, CHUNK),
        partial(put_directory, CHUNK),
        mend=lambda root: shutil.rmtree(root / KEY, ignore_errors=True),
        culprit=0,
    ),
    "no permission": SaveFault(StorageError, ("permission denied",), hinder=without_root),
    "files limited": SaveFault(StorageError, (KEY, CHUNK), hinder=partial(limited_file_size, 1024)),
    "an object that cannot be pickled": SaveFault(
        StorageError,
        (f"object.{CULPRIT}", "cannot be saved", "generator"),
        change=cannot_be_pickled,
    ),
    "a file where the object goes": SaveFault(
        StorageError,
        (f"object.{CULPRIT}",),
        partial(put_file, f"object.{CULPRIT}"),
        mend=lambda root: (root / f"object.{CULPRIT}").unlink(),
        culprit=0,
    ),
}


def save_with_faults(rank: int, entry: Entry, engine: str, scratch: Path) -> dict[str, Any]:
    prepare(TIMEOUT_S, engine)
    seen: dict[str, Any] = {}
    for number, (name, fault) in enumerate(SAVE_FAULTS.items()):
        root = scratch / f"save.{number}"
        if rank == 0:
            fault.obstruct(root)
        dist.barrier()
        state = full_state(rank)
        hinder: Any = nullcontext()
        if rank == CULPRIT:
            fault.change(state)
            hinder = fault.hinder()
        with hinder:
            seen[name] = outcome(partial(save, entry, state, root))
        dist.barrier()
        seen[f"{name}: marker"] = (root / "metadata.json").exists()
        if rank == 0:
            fault.mend(root)
        dist.barrier()
        save(entry, full_state(rank), root)
        loaded = load(entry, full_state(rank, no_data), root)
        seen[f"{name}: again"] = differences(rank, own_cuts(), loaded)
        seen[f"{name}: remains"] = [str(path) for path in root.rglob(".partial-*")]
    return seen


@by_entry
def test_what_hinders_one_rank_in_saving_is_raised_on_every_rank(
    entry: Entry, engine: str, scratch: Path
) -> None:
    results = run_processes(4, save_with_faults, entry, engine, scratch)

    for name, fault in SAVE_FAULTS.items():
        assert all(isinstance(result, dict) for result in results), results
        seen = [result[name] for result in results]
        require_failure_everywhere(seen, kind=fault.kind, culprit=fault.culprit, names=fault.names)
        assert all(failure.seconds < TIMEOUT_S / 2 for failure in seen), name
        for result in results:
            assert result[f"{name}: marker"] is False
            assert result[f"{name}: again"] == []
            assert result[f"{name}: remains"] == []


def raise_in_build(*_: Any) -> Any:
    raise RuntimeError("the factory is broken")


def build_whole(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> dict[str, Any]:
    return {"whole": ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)}


def merge_whole(loaded: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = loaded["whole"]
    return found


def code_of_the_caller_raises(rank: int, root: Path) -> None:
    """On one rank: factories, preprocessing, odd values."""
    bad = rank == CULPRIT

    def factory(build: Any = build_whole, merge: Any = merge_whole) -> Any:
        return ShardedTensorFactory(f"made.{rank}", torch.ones(4), build, merge)

    ours, loads = partial(save, Entry.OURS), partial(load, Entry.OURS, root=root / "fine")
    state = {"f": factory(), "c": 1}
    bad_build = {"f": factory(build=raise_in_build) if bad else factory()}
    bad_common = {"f": factory(), "common": (n for n in range(3)) if bad else 1}
    bad_merge = {"f": factory(merge=raise_in_build) if bad else factory()}
    preprocess = {"preprocess_common_before_consistancy_check": raise_in_build if bad else dict}
    ours(state, root / "fine")
    for number, call in enumerate(
        (
            partial(ours, bad_build, root / "build"),
            partial(ours, bad_common, root / "common"),
            partial(ours, state, root / "preprocess", **preprocess),
            partial(loads, bad_build),
            partial(loads, bad_merge),
            partial(loads, {"f": factory()}, strict="no such" if bad else "log_all"),
        )
    ):
        if bad:
            assert isinstance(outcome(call), Failure), number
        else:
            require_refused(call, CheckpointError, global_rank=CULPRIT)
    assert torch.equal(loads({"f": factory()})["f"], torch.ones(4))


def test_callers_code_that_raises_on_one_rank_fails_on_every_rank(tmp_path: Path) -> None:
    require_on_ranks(4, code_of_the_caller_raises, tmp_path)


def fail_in_common(
    rank: int, entry: Entry, timeout_s: float, how: dict[str, Any], root: Path
) -> Any:
    """Rank 0 cannot write the common state.

    Without our common strategy Megatron-Core does so before our strategy is called, and the other
    ranks wait for it. Its own exchange, which has no timeout of ours, is off.
    """
    prepare(timeout_s, **how)
    root.mkdir(exist_ok=True)
    if rank == 0:
        (root / "common.pt" / "x").mkdir(parents=True)
    dist.barrier()
    return outcome(partial(save, entry, full_state(rank), root, validate_access_integrity=False))


def test_a_failure_in_megatrons_own_steps_times_out_on_the_others(tmp_path: Path) -> None:
    first, *others = run_processes(4, fail_in_common, Entry.MEGATRON, 3.0, {}, tmp_path / "c")

    assert isinstance(first, Failure)
    for failure in others:
        assert isinstance(failure, Failure), failure
        assert "PeerError" in failure.kinds, failure
        assert failure.is_megatrons
        assert failure.global_rank == 0, failure
        assert failure.seconds < 50
    assert any(PeerTimeoutError.__name__ in failure.kinds for failure in others)


@pytest.mark.parametrize(
    ("entry", "how"), [(Entry.OURS, {}), (Entry.MEGATRON, {"replace_common": True})], ids=str
)
def test_common_state_that_cannot_be_written_is_raised_on_every_rank(
    entry: Entry, how: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "c"
    results = run_processes(4, fail_in_common, entry, TIMEOUT_S, how, root)
    names = (str(root / "common.pt"),)
    require_failure_everywhere(results, kind=StorageError, culprit=0, names=names)
