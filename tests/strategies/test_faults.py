"""What goes wrong on one rank of four is raised on all four, in time, with rank, key and file."""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from mmap import ACCESS_READ, mmap
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

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    PeerError,
    PeerTimeoutError,
    PlanError,
    StorageError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.strategies.safetensors import PackLoadShardedStrategy
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy
from tests.support.checkpoints import flip_at, pack_of, tensor_end
from tests.support.disks import (
    fill_disk,
    fill_inodes,
    read_only,
    tiny_ext4,
    tiny_tmpfs,
    without_root,
)
from tests.support.entries import (
    FORMATS,
    PACKS,
    ZARR,
    Entry,
    Failure,
    default_format,
    load,
    outcome,
    prepare,
    require_failure,
    require_failure_everywhere,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.ranks import run_processes
from tests.support.sharding import (
    Cut,
    Part,
    at_random,
    differences,
    no_data,
    on_grid,
    part_of,
    sharded,
    state_of,
)
from tests.support.system_calls import before_calls

pytestmark = pytest.mark.multiprocess

CULPRIT = 2
KEY = "own.2"
TIMEOUT_S = 100.0


class NotAllowed:
    """A class that no list of classes allows."""


def own_cuts() -> list[Cut]:
    alone = [Cut(f"own.{n}", (64, 8), torch.float32, (Part(n, (0, 0), (64, 8)),)) for n in range(4)]
    return [on_grid("shared", (8, 8), (4, 2)), *alone]


def full_state(rank: int, data: Callable[[Cut, Part], Any] = part_of) -> dict[str, Any]:
    own = ShardedObject(f"object.{rank}", {"of rank": rank}, (1,), (0,))
    return state_of(rank, own_cuts(), data) | {"object": own}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A directory that users other than root may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="dist-ckpt-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


ZARRAY, CHUNK = f"{KEY}/.zarray", f"{KEY}/0.0"
OBJECT = f"object.{CULPRIT}/shard_0_1.pt"


def remove(name: str) -> Callable[[Path], Any]:
    return lambda root: (root / name).unlink()


def lock(name: str) -> Callable[[Path], Any]:
    return lambda root: (root / name).chmod(0)


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
    return lambda root: (root / name).write_bytes(change((root / name).read_bytes()))


def make_directory(root: Path) -> None:
    (root / CHUNK).unlink()
    (root / CHUNK).mkdir()


shortened, lengthened = (lambda content: content[:-5]), (lambda content: content + b"more")
not_allowed = "tests.strategies.test_faults.NotAllowed"
DAMAGE: dict[str, tuple[Any, ...]] = {
    "no .zarray": (remove(ZARRAY), ArrayNotFoundError, KEY),
    "locked .zarray": (lock(ZARRAY), StorageError, ZARRAY, "permission denied"),
    "garbage": (changed(ZARRAY, lambda _: b"{ no longer"), CorruptCheckpointError, ZARRAY),
    "no chunk": (remove(CHUNK), IncompleteCheckpointError, CHUNK),
    "no chunk for strided memory": (remove(CHUNK), IncompleteCheckpointError, CHUNK),
    "locked chunk": (lock(CHUNK), StorageError, CHUNK, "permission denied"),
    "chunk is a directory": (make_directory, StorageError, CHUNK),
    "short": (
        changed(CHUNK, shortened),
        CorruptCheckpointError,
        CHUNK,
        "2043 bytes, expected 2048",
    ),
    "chunk too long": (changed(CHUNK, lengthened), CorruptCheckpointError, CHUNK),
    "no object": (remove(OBJECT), ArrayNotFoundError, OBJECT),
    "object cut short": (changed(OBJECT, shortened), CorruptCheckpointError, OBJECT),
    "object of a class not allowed": (
        lambda root: torch.save({"deep": [NotAllowed()]}, root / OBJECT),
        *(UnsafeObjectError, OBJECT, not_allowed, "allow="),
    ),
}
"""What is done to the checkpoint, and how every rank reports it: the class, and what it names."""


def of_pack(act: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Do something to the culprit's pack."""
    return lambda root: act(pack_of(root, CULPRIT))


def make_pack_a_directory(pack: Path) -> None:
    pack.unlink()
    pack.mkdir()


def flip(name: str) -> Callable[[Path], Any]:
    """Change the last byte of a tensor of the culprit's pack."""
    return of_pack(lambda pack: flip_at(pack, tensor_end(pack, name) - 1))


WROTE = f"rank {CULPRIT} wrote it"
said_of_pack = (".safetensors", f"written by rank {CULPRIT}")
DAMAGE_OF_PACKS: dict[str, tuple[Any, ...]] = {
    "no pack": (of_pack(Path.unlink), IncompleteCheckpointError, "does not exist", WROTE),
    "locked pack": (of_pack(lambda p: p.chmod(0)), StorageError, "permission denied"),
    "pack is a directory": (of_pack(make_pack_a_directory), StorageError, ".safetensors"),
    "short pack": (of_pack(lambda p: os.truncate(p, 4200)), CorruptCheckpointError, WROTE),
    "pack of zeros": (
        of_pack(lambda p: p.write_bytes(bytes(p.stat().st_size))),
        *(CorruptCheckpointError, ".safetensors"),
    ),
    "flipped": (flip(f"{KEY}@0.0"), CorruptCheckpointError, KEY, *said_of_pack),
    "flipped for strided memory": (flip(f"{KEY}@0.0"), CorruptCheckpointError, KEY, *said_of_pack),
    "flipped object": (
        flip(f"object.{CULPRIT}#0"),
        *(CorruptCheckpointError, f"object.{CULPRIT}/shard_0_1", *said_of_pack),
    ),
    "flipped digests": (flip("__digests__"), CorruptCheckpointError, ".safetensors"),
}


def want(*shape: int, key: str = KEY, data: Any = None) -> Any:
    """What the culprit asks for in place of its array."""
    part = Part(CULPRIT, (0,) * len(shape), shape)
    return sharded(Cut(key, shape, torch.float32, (part,)), part, data)


another_dim = ShardedTensor.from_rank_offsets(KEY, torch.zeros(64, 8, 1), allow_shape_mismatch=True)
other_shape = "(64, 8) in the checkpoint, (63, 8) requested"
on_meta = torch.empty(64, 8, device="meta")
WANTED: dict[str, tuple[Any, ...]] = {
    "other shape": (want(63, 8), PlanError, KEY, other_shape),
    "another dim": (another_dim, PlanError, KEY, "(64, 8)", "(64, 8, 1)"),
    "unknown key": (want(64, 8, key="own.22"), ArrayNotFoundError, "own.22", KEY),
    "meta device": (want(64, 8, data=on_meta), PlanError, KEY, "meta"),
}
"""What the culprit alone asks for, and how every rank reports it."""


def loaders(entry: Entry) -> dict[str, dict[str, Any]]:
    """How a rank may load: by itself, sharing the reading, in Megatron-Core's wrapper."""
    if entry is Entry.MEGATRON:
        return {"plain": {}}
    is_packs = default_format() == PACKS
    own = PackLoadShardedStrategy() if is_packs else ZarrLoadShardedStrategy()
    wrapper = FullyParallelLoadStrategyWrapper(own, dist.new_subgroups(4)[0])
    return {
        "plain": {},
        "two-stage": {
            "sharded_strategy": TwoStageDataParallelLoadShardedStrategy(dist.new_subgroups(2)[0])
        },
        "wrapped": {"sharded_strategy": wrapper},
    }


def damage_of(backend: Any) -> dict[str, tuple[Any, ...]]:
    return DAMAGE_OF_PACKS if backend == PACKS else DAMAGE


def load_with_faults(
    rank: int, entry: Entry, backend: Any, scratch: Path
) -> dict[tuple[str, str], Any]:
    """What this rank saw by fault and way: of a copy for each damage, and of odd requests."""
    prepare(TIMEOUT_S, default=backend)
    whole, ways = scratch / "whole", loaders(entry)
    save(entry, full_state(rank), whole)
    seen: dict[tuple[str, str], Any] = {}
    for options in ways.values():  # imports what is imported once
        with cpu_stand_ins():
            load(entry, full_state(rank, no_data), whole, **options)

    def load_in_two_ways(name: str, root: Path, odd: Any = None) -> None:
        skipped = ("wrapped", "two-stage")[len({name for name, _ in seen}) % 2]
        for way, options in ((way, ways[way]) for way in ways if way != skipped):
            wanted = full_state(rank, no_data)
            if odd is not None and rank == CULPRIT:
                wanted[f"{KEY} #0"] = odd
            with without_root(), cpu_stand_ins():  # the wrapper goes over CUDA
                seen[name, way] = outcome(partial(load, entry, wanted, root, **options))

    for name, (damage, *_) in damage_of(backend).items():
        root = scratch / f"with {name}"
        if rank == 0:
            shutil.copytree(whole, root)
            damage(root)
        dist.barrier()
        strided = want(64, 8, data=torch.zeros(8, 64).t())
        load_in_two_ways(name, root, strided if "strided" in name else None)
    for name, (odd, *_) in WANTED.items():
        load_in_two_ways(name, whole, odd)
    loaded = load(entry, full_state(rank, no_data), whole)
    assert differences(rank, own_cuts(), loaded) == [], "the group could not be used any more"
    return seen


@pytest.mark.parametrize(
    ("entry", "backend"),
    [(Entry.OURS, ZARR), (Entry.OURS, PACKS), (Entry.MEGATRON, PACKS)],
    ids=str,
)
def test_damage_that_one_rank_meets_is_raised_on_every_rank(
    entry: Entry, backend: Any, scratch: Path
) -> None:
    results = run_processes(4, load_with_faults, entry, backend, scratch)

    for name, way in results[0]:
        seen = [result[name, way] for result in results]
        _, kind, *names = (damage_of(backend) | WANTED)[name]
        require_failure_everywhere(seen, kind=kind, culprit=CULPRIT, names=names)
        assert {failure.key for failure in seen} == {seen[0].key}, (name, way)
        for failure in seen:
            assert failure.seconds < TIMEOUT_S / 2, (name, way)
            assert "/" not in "".join(names) or f"with {name}/" in failure.text, (name, way)


def raises(*_: Any) -> Any:
    raise RuntimeError("the factory is broken")


def build_whole(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> dict[str, Any]:
    return {"whole": ShardedTensor.from_rank_offsets(key, data, replica_id=replica_id)}


def merge_whole(loaded: dict[str, Any]) -> Any:
    return loaded["whole"]


def code_of_the_caller_raises(rank: int, root: Path) -> None:
    bad = rank == CULPRIT

    def factory(build: Any = build_whole, merge: Any = merge_whole) -> Any:
        return ShardedTensorFactory(f"made.{rank}", torch.ones(4), build, merge)

    saves, loads = partial(save, Entry.OURS), partial(load, Entry.OURS, root=root / "fine")
    state = {"f": factory(), "c": 1}
    bad_build = {"f": factory(build=raises if bad else build_whole)}
    bad_common = {"f": factory(), "common": (n for n in range(3)) if bad else 1}
    bad_merge = {"f": factory(merge=raises if bad else merge_whole)}
    preprocess = {"preprocess_common_before_consistancy_check": raises if bad else dict}
    saves(state, root / "fine")
    for number, call in enumerate(
        (
            partial(saves, bad_build, root / "build"),
            partial(saves, bad_common, root / "common"),
            partial(saves, state, root / "preprocess", **preprocess),
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
    require_on_ranks(4, code_of_the_caller_raises, tmp_path, default=PACKS)


def fail_in_common(
    rank: int, entry: Entry, timeout_s: float, how: dict[str, Any], root: Path
) -> Any:
    """Rank 0 cannot write the common state; Megatron-Core's exchange without a timeout is off."""
    prepare(timeout_s, **how)
    root.mkdir(exist_ok=True)
    if rank == 0:
        (root / "common.pt" / "x").mkdir(parents=True)
    dist.barrier()
    state = full_state(rank) | {"iteration": 7}
    return outcome(partial(save, entry, state, root, validate_access_integrity=False))


def test_a_failure_in_megatrons_own_steps_times_out_on_the_others(tmp_path: Path) -> None:
    """Without our common strategy it fails before ours is called, and the others wait for it."""
    first, *others = run_processes(4, fail_in_common, Entry.MEGATRON, 3.0, {}, tmp_path / "c")

    assert isinstance(first, Failure)
    for failure in others:
        assert require_failure(failure, PeerError, global_rank=0).seconds < TIMEOUT_S / 2
    assert any(PeerTimeoutError.__name__ in failure.kinds for failure in others)


@pytest.mark.parametrize(
    ("entry", "how", "backend"),
    [(Entry.OURS, {}, PACKS), (Entry.MEGATRON, {"replace_common": True}, ZARR)],
    ids=str,
)
def test_common_state_that_cannot_be_written_is_raised_on_every_rank(
    entry: Entry, how: dict[str, Any], backend: Any, tmp_path: Path
) -> None:
    root = tmp_path / "c"
    how = how | {"default": backend}
    results = run_processes(4, fail_in_common, entry, TIMEOUT_S, how, root)
    names = (str(root / "common.pt"),)
    require_failure_everywhere(results, kind=StorageError, culprit=0, names=names)
    if entry is Entry.OURS:  # packs have a copy
        require_on_ranks(4, load_without_common, root)


def load_without_common(rank: int, root: Path) -> None:
    loaded = load(Entry.OURS, full_state(rank, no_data), root)
    assert differences(rank, own_cuts(), loaded) == []
    assert loaded["iteration"] == 7


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_memory_that_cannot_be_written_to_is_told_by_its_own_key(
    backend: tuple[str, int], tmp_path: Path
) -> None:
    def state(size: int) -> dict[str, Any]:
        tensors = {f"w{n}": torch.full((size,), float(n)) for n in range(6)}
        return {key: ShardedTensor.from_rank_offsets(key, data) for key, data in tensors.items()}

    for size in (100, 100_000):  # many in one call, and several calls for one
        root, memory = tmp_path / f"{size}", tmp_path / f"{size}.memory"
        dist_ckpt_strategies.save(state(size), root, backend)
        memory.write_bytes(bytes(4 * size))
        with memory.open("rb") as file:
            mapped = mmap(file.fileno(), 0, access=ACCESS_READ)
        wanted = state(size)
        wanted["w4"].data = torch.frombuffer(mapped, dtype=torch.float32)
        act = partial(dist_ckpt_strategies.load, wanted, root)
        require_refused(act, StorageError, "w4: ", "Bad address", key="w4")


# Disks that are full or read-only


def on_bad_disks(rank: int, root: Path, backend: tuple[str, int]) -> None:
    save, save_async = dist_ckpt_strategies.save, dist_ckpt_strategies.save_async
    assembled = [on_grid("large", (60, 20), (4, 2))]
    state = full_state(rank) | state_of(rank, assembled)
    save(state, root / "good", backend)

    def require_failures(name: str, reason: str, *, is_foreseen: bool = False) -> None:
        def in_background() -> None:
            request = save_async(state, root / f"{name} async", backend)
            assert not (is_foreseen and backend == PACKS), "a copy was made for nothing"
            request.wait()

        for call in (lambda: save(state, root / f"{name} now", backend), in_background):
            assert require_refused(call, StorageError, reason).seconds < TIMEOUT_S / 2

    def on_rank_0(step: Callable[[], Any]) -> None:
        if rank == 0:
            step()
        dist.barrier()

    with read_only(root) if rank == 0 else nullcontext():
        dist.barrier()
        require_failures("locked", "read-only")
        dist.barrier()
    for left_nbytes in (0, 40 << 10):  # the second is enough for some of the files
        on_rank_0(partial(fill_disk, root, leaving_nbytes=left_nbytes))
        require_failures(f"full {left_nbytes}", "no space left", is_foreseen=left_nbytes == 0)
        on_rank_0((root / ".ballast").unlink)
    on_rank_0(lambda: fill_inodes(root))
    require_failures("inodes", "no inodes left", is_foreseen=True)
    on_rank_0(lambda: shutil.rmtree(root / ".inodes"))
    wanted = full_state(rank, no_data) | state_of(rank, assembled, no_data)
    loaded = load(Entry.OURS, wanted, root / "good")
    assert differences(rank, [*own_cuts(), *assembled], loaded) == []


@pytest.mark.parametrize("backend", FORMATS, ids=str)
@pytest.mark.parametrize("number", ["ENOSYS", "EXDEV", "EPERM", "EOPNOTSUPP"])
def test_a_file_system_that_does_not_rename_is_named(
    number: str, backend: tuple[str, int], tmp_path: Path
) -> None:
    code = getattr(errno, number)

    def refuse(_name: str, path: str) -> None:
        raise OSError(code, os.strerror(code), path)

    state = state_of(0, [at_random("w", (6, 4), 1)])
    with before_calls(refuse, ("rename", "replace")):
        save = partial(dist_ckpt_strategies.save, state, tmp_path / "c", backend)
        require_refused(save, StorageError, str(tmp_path / "c"), "refuses to rename", "save to")


@pytest.mark.parametrize("backend", FORMATS, ids=str)
def test_only_a_flush_of_a_directory_may_be_unknown_to_the_file_system(
    backend: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIST_CKPT_WHOLE_FLUSH", "0")
    state = state_of(0, [at_random("w", (6, 4), 1)])
    for number, of_directories in ((errno.EINVAL, True), (errno.EIO, True), (errno.EINVAL, False)):

        def fail(_: str, path: str, number: int = number, which: bool = of_directories) -> None:
            if Path(path).is_dir() is which:
                raise OSError(number, os.strerror(number), path)

        root = tmp_path / f"{number} {of_directories}"
        save = partial(dist_ckpt_strategies.save, state, root, backend)
        with before_calls(fail, ("fsync",)):
            if number == errno.EINVAL and of_directories:
                save()
            else:
                require_refused(save, StorageError, str(root), os.strerror(number))


@pytest.mark.parametrize(
    ("disk", "backend"),
    [(tiny_ext4, ("zarr", 1)), (tiny_ext4, PACKS), (tiny_tmpfs, PACKS)],
    ids=["ext4", "ext4 packs", "tmpfs packs"],
)
def test_a_full_or_read_only_disk_fails_every_rank_and_leaves_the_checkpoint_before(
    disk: Any, backend: tuple[str, int], tmp_path: Path
) -> None:
    with disk(tmp_path / "disk") as root:
        require_on_ranks(4, on_bad_disks, root, backend)
        for name in ("metadata.json", "index"):
            found = [path.parent.name for path in root.glob(f"*/{name}")]
            assert found == ["good"] * (name == "metadata.json" or backend == PACKS)
