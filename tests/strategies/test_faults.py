"""What goes wrong on one rank of four is raised on all four, in time, with rank, key and file."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
class Fault:
    """What one rank alone meets, and how every rank reports it.

    Attributes:
        kind: class of the error.
        names: what the message names, below the checkpoint directory or as it is.
        damage: done to the checkpoint directory, once.
        change: changes the state dict of the culprit.
    """

    kind: type[CheckpointError]
    names: tuple[str, ...]
    damage: Callable[[Path], Any] = lambda _: None
    change: Callable[[dict[str, Any]], Any] = lambda state: state


CHUNK = f"{KEY}/0.0"
OBJECT = f"object.{CULPRIT}/shard_0_1.pt"
NAME = f"{KEY} #0"


def remove(name: str) -> Callable[[Path], Any]:
    return lambda root: (root / name).unlink()


def lock(name: str) -> Callable[[Path], Any]:
    return lambda root: (root / name).chmod(0)


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda root: (root / name).write_bytes(change((root / name).read_bytes()))


def make_directory(root: Path) -> None:
    (root / CHUNK).unlink()
    (root / CHUNK).mkdir()


def want(
    state: dict[str, Any], *, key: str = KEY, shape: tuple[int, int] = (64, 8), data: Any = None
) -> None:
    """Ask for the culprit's array in another way."""
    part = Part(CULPRIT, (0, 0), shape)
    state[NAME] = sharded(Cut(key, shape, torch.float32, (part,)), part, data)


ZARRAY = f"{KEY}/.zarray"
EXTRA_DIM = ShardedTensor.from_rank_offsets(KEY, torch.zeros(64, 8, 1), allow_shape_mismatch=True)

FAULTS = {
    "no .zarray": Fault(ArrayNotFoundError, (KEY,), remove(ZARRAY)),
    ".zarray cannot be opened": Fault(
        StorageError, (KEY, ZARRAY, "permission denied"), lock(ZARRAY)
    ),
    ".zarray is garbage": Fault(
        CorruptCheckpointError, (KEY, ZARRAY), changed(ZARRAY, lambda _: b"{ no longer")
    ),
    "no chunk": Fault(IncompleteCheckpointError, (KEY, CHUNK), remove(CHUNK)),
    "no chunk, into strided memory": Fault(
        IncompleteCheckpointError,
        (KEY, CHUNK),
        remove(CHUNK),
        partial(want, data=torch.zeros(8, 64).t()),
    ),
    "chunk cannot be opened": Fault(StorageError, (KEY, CHUNK, "permission denied"), lock(CHUNK)),
    "chunk is a directory": Fault(StorageError, (KEY, CHUNK), make_directory),
    "chunk cut short": Fault(
        CorruptCheckpointError,
        (KEY, CHUNK, "2043 bytes, expected 2048"),
        changed(CHUNK, lambda content: content[:-5]),
    ),
    "chunk too long": Fault(
        CorruptCheckpointError, (KEY, CHUNK), changed(CHUNK, lambda content: content + b"more")
    ),
    "other shape": Fault(
        ShapeMismatchError,
        (KEY, "(64, 8) in the checkpoint, (63, 8) requested"),
        change=partial(want, shape=(63, 8)),
    ),
    "other number of dims": Fault(
        ShapeMismatchError,
        (KEY, "(64, 8)", "(64, 8, 1)"),
        change=lambda state: state.update({NAME: EXTRA_DIM}),
    ),
    "unknown key": Fault(ArrayNotFoundError, ("own.22", KEY), change=partial(want, key="own.22")),
    "meta device": Fault(
        PlanError, (KEY, "meta"), change=partial(want, data=torch.empty(64, 8, device="meta"))
    ),
    "no object": Fault(ArrayNotFoundError, (OBJECT,), remove(OBJECT)),
    "object cut short": Fault(
        CorruptCheckpointError, (OBJECT,), changed(OBJECT, lambda content: content[:-5])
    ),
    "object of a class not allowed": Fault(
        UnsafeObjectError,
        (OBJECT, "tests.strategies.test_faults.NotAllowed", "allow="),
        lambda root: torch.save({"deep": [NotAllowed()]}, root / OBJECT),
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
    for number, (name, fault) in enumerate(FAULTS.items()):
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
                fault.change(wanted)
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
    for number, (name, fault) in enumerate(FAULTS.items()):
        for way in results[0][name]:
            seen = [result[name][way] for result in results]
            require_failure_everywhere(seen, kind=fault.kind, culprit=CULPRIT, names=fault.names)
            assert {failure.key for failure in seen} <= {seen[0].key}, (name, way)
            assert all(failure.seconds < TIMEOUT_S / 2 for failure in seen), (name, way)
            if "/" in fault.names[0] + fault.names[-1]:
                assert all(f"copy.{number}/" in failure.text for failure in seen), (name, way)


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
