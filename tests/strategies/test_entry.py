"""What this package's own ``save`` and ``load`` do beyond Megatron-Core's, and just as they do."""

import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CheckpointExistsError,
    CoverageError,
    MissingDependencyError,
    StorageError,
    UnsafeObjectError,
)
from dist_ckpt_strategies.strategies.common import TorchCommonLoadStrategy
from dist_ckpt_strategies.strategies.safetensors import (
    PackLoadShardedStrategy,
    PackSaveShardedStrategy,
)
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
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
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.ranks import allow_torch_dist
from tests.support.sharding import (
    Cut,
    Part,
    at_random,
    differences,
    no_data,
    on_grid,
    part_of,
    same_bits,
    state_of,
    whole,
    zeros,
)

pytestmark = pytest.mark.multiprocess

TORCH_DIST = ("torch_dist", 1)
SAVERS: dict[Any, Any] = {ZARR: ZarrSaveShardedStrategy, PACKS: PackSaveShardedStrategy}
LOADERS: dict[Any, Any] = {ZARR: ZarrLoadShardedStrategy, PACKS: PackLoadShardedStrategy}
CUTS = [on_grid("w", (8, 4), (4, 2)), on_grid("b", (4,), (1,), num_replicas=4)]


class Homemade:
    """A class of a user's own."""

    def __init__(self) -> None:
        self.value = 5


def halves(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> dict[str, Any]:
    top, bottom = data.chunk(2)
    return {
        "top": ShardedTensor.from_rank_offsets(f"{key}.top", top, replica_id=replica_id),
        "bottom": ShardedTensor.from_rank_offsets(f"{key}.bottom", bottom, replica_id=replica_id),
    }


def joined(loaded: dict[str, Any]) -> torch.Tensor:
    return torch.cat([loaded["top"], loaded["bottom"]])


def everything(rank: int, *, empty: bool = False) -> dict[str, Any]:
    weight = torch.zeros(4, 2) if empty else torch.arange(8.0).reshape(4, 2) + rank
    return {
        "model": {
            "layers": [
                {"w": tensor}
                for tensor in state_of(rank, CUTS, zeros if empty else part_of).values()
            ],
            "fused": ShardedTensorFactory(f"fused.{rank}", weight, halves, joined),
            "extra": ShardedObject("extra/state", None if empty else {"rank": rank}, (4,), (rank,)),
        },
        "local": LocalNonpersistentObject(f"of rank {rank}" if empty else "not stored"),
        **({} if empty else {"iteration": 7, "args": {"lr": 0.1, "betas": (0.9, 0.95)}}),
    }


def require_everything(rank: int, entry: Entry, root: Path) -> None:
    loaded = load(entry, everything(rank, empty=True), root)
    stored = everything(rank)
    layers = zip(loaded["model"]["layers"], stored["model"]["layers"], strict=True)
    assert all(same_bits(found["w"], tensor["w"].data) for found, tensor in layers)
    assert torch.equal(loaded["model"]["fused"], stored["model"]["fused"].data)
    assert loaded["model"]["extra"] == {"rank": rank}
    assert loaded["local"] == f"of rank {rank}"
    assert (loaded["iteration"], loaded["args"]) == (7, {"lr": 0.1, "betas": (0.9, 0.95)})
    assert loaded["content_metadata"] == {"format": 3}


def each_entry_loads_what_either_saved(rank: int, scratch: Path) -> None:
    for saver in Entry:
        root, content = scratch / saver, {"format": 3, "dp_cp_group": None}
        save(saver, everything(rank), root, content_metadata=content)
        for loader in Entry:
            require_everything(rank, loader, root)
        assert dist_checkpointing.load_content_metadata(str(root)) == {"format": 3}


def arguments_are_left_alone(rank: int, scratch: Path) -> None:
    state, fresh, wanted = everything(rank), everything(rank), everything(rank, empty=True)
    save(Entry.OURS, state, scratch / "c", content_metadata={"format": 3})
    load(Entry.OURS, wanted, scratch / "c")
    assert (list(state), state["args"]) == (list(fresh), fresh["args"])
    for one in (state, wanted):
        assert isinstance(one["local"], LocalNonpersistentObject)
        assert isinstance(one["model"]["fused"], ShardedTensorFactory)


def classes_are_allowed_by_argument_by_strategy_or_by_registration(
    rank: int, scratch: Path
) -> None:
    state = {"mine": Homemade(), "o": ShardedObject("o", Homemade(), (4,), (rank,))}
    root = scratch / "c"
    wanted = {"o": ShardedObject("o", None, (4,), (rank,))}
    ours: Any = partial(load, Entry.OURS, wanted, root)
    loader = LOADERS[default_format()](allow=[Homemade])
    by_strategy = partial(ours, sharded_strategy=loader)

    def require_named(*calls: Callable[[], Any]) -> None:
        for call in calls:
            require_refused(call, UnsafeObjectError, "test_entry.Homemade", "allow=")

    def require_loaded(found: Any) -> None:
        assert (found["mine"].value, found["o"].value) == (5, 5)

    for unsafe in (state, {"o": state["o"]}):
        require_named(partial(save, Entry.OURS, unsafe, root))
    save(Entry.OURS, state, root, allow=[Homemade])
    require_named(ours)
    require_loaded(ours(allow=[Homemade]))
    require_named(ours, by_strategy)  # as before; the common state has a strategy of its own
    require_loaded(by_strategy(common_strategy=TorchCommonLoadStrategy(allow=[Homemade])))
    dist_ckpt_strategies.register(allow=[Homemade], replace=True)
    require_loaded(ours())
    dist_ckpt_strategies.register(allow=[Homemade], replace_common=True)
    require_loaded(load(Entry.MEGATRON, wanted, root))


def one_rank_alone_reads_metadata_and_removes_arrays(rank: int, scratch: Path) -> None:
    root = scratch / "c"
    others = [on_grid(key, (4,), (4,)) for key in ("w.old", "a.w.o")]
    state: dict[str, Any] = state_of(rank, [*CUTS, *others]) | {"iteration": 7}
    for key in ("w.object/of", "o.w.o"):
        state[key] = ShardedObject(key, rank, (4,), (rank,))
    save(Entry.OURS, state, root)
    if rank == 2:
        tensors = dist_checkpointing.load_tensors_metadata(str(root))
        shapes = {key: (tensor.global_shape, tensor.dtype) for key, tensor in tensors.items()}
        expected = {"w": (8, 4), "b": (4,), "w.old": (4,), "a.w.o": (4,)}
        assert shapes == {key: (shape, torch.float32) for key, shape in expected.items()}
        objects = {f"{key}/shard_{n}_4" for key in ("w.object/of", "o.w.o") for n in range(4)}
        assert load_sharded_metadata(str(root)).keys() == expected.keys() | objects
        assert dist_checkpointing.load_common_state_dict(str(root)) == {"iteration": 7}
        dist_checkpointing.remove_sharded_tensors(str(root), "w.o")
        kept = {"b", "w", "a.w.o", *(f"o.w.o/shard_{n}_4" for n in range(4))}
        assert load_sharded_metadata(str(root)).keys() == kept
    dist.barrier()
    opened = dist_ckpt_strategies.open(root)
    assert set(opened.objects) == {f"o.w.o/shard_{n}_4" for n in range(4)}
    assert (opened.objects["o.w.o/shard_3_4"], opened.common) == (3, {"iteration": 7})
    assert not [*root.glob(".removed-*")]
    plain = dist_checkpointing.load_plain_tensors(str(root))
    assert all(same_bits(plain[cut.key], whole(cut)) for cut in [*CUTS, others[1]])


def groups_save_on_their_own_and_errors_name_global_ranks(rank: int, scratch: Path) -> None:
    """Two halves of the world save a checkpoint each, at the same time."""
    half, within = divmod(rank, 2)
    group = dist.new_subgroups(2)[0]
    saver = SAVERS[default_format()](group=group)
    loader = LOADERS[default_format()](group=group)
    cut = on_grid(f"half.{half}", (12, 10), (2, 1), size=2)
    root, elsewhere = scratch / f"half.{half}", scratch / f"objects.{half}"
    for path in (root, elsewhere):
        path.mkdir(exist_ok=True)
    dist.barrier()
    saver.save(state_of(within, [cut]), root)
    assert differences(within, [cut], loader.load(state_of(within, [cut], no_data), root)) == []
    bad = Cut("twice", (4,), torch.float32, (Part(0, (0,), (4,)), Part(1, (0,), (4,))))
    names = (f"on rank {2 * half} ", f"on rank {2 * half + 1} ")
    twice = partial(saver.save, state_of(within, [bad]), root)
    require_refused(twice, CoverageError, *names, "both main replicas")
    value = (lambda: 1) if rank == 3 else 1
    objects = partial(saver.save, {"o": ShardedObject("o", value, (2,), (within,))}, elsewhere)
    if half == 0:
        objects()
    else:
        require_refused(objects, StorageError, global_rank=3)


def a_part_of_the_world_loads_without_a_strategy(rank: int, scratch: Path) -> None:
    """Ranks 2 and 3 load what all have saved; the others do nothing."""
    group, within = dist.new_group([2, 3]), rank - 2
    saved, wanted = on_grid("w", (12, 10), (4, 2)), at_random("w", (12, 10), 8, size=2)
    for backend, is_named in product(FORMATS, (False, True)):
        root = scratch / f"{backend}.{is_named}"
        choice = backend if is_named else None
        dist_ckpt_strategies.save(state_of(rank, [saved]), root, backend)
        for strict in ("raise_all", "assume_ok_unexpected") if within >= 0 else ():
            state = state_of(within, [wanted], no_data)
            how: dict[str, Any] = {"strict": strict, "process_group": group}
            loaded: Any = dist_ckpt_strategies.load(state, root, choice, **how)
            assert differences(within, [wanted], loaded) == []


def torch_dist_through_our_entries_is_torch_dist(rank: int, scratch: Path) -> None:
    allow_torch_dist()
    content = {"content_metadata": {"format": 3}}
    choice = {"sharded_strategy": TORCH_DIST} | content
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        with patch.dict(sys.modules, {"psutil": None}):
            refused = partial(save, Entry.OURS, everything(rank), scratch / "refused", **choice)
            require_refused(refused, MissingDependencyError, "pip install psutil")
        for saver in Entry:
            save(saver, everything(rank), scratch / saver, **choice)
            dist.barrier()
            for loader in Entry:
                require_everything(rank, loader, scratch / saver)
        names = [{path.name for path in (scratch / one).glob("[!.]*")} for one in Entry]
        assert names[0] == names[1]
        assert len({(scratch / one / "metadata.json").read_text() for one in Entry}) == 1
        root = scratch / Entry.OURS
        again = partial(save, Entry.OURS, everything(rank), root)
        require_refused(partial(again, **choice), CheckpointExistsError)
        for how in (content, choice):
            again(overwrite=True, **how)
            dist.barrier()
            for loader in Entry:
                require_everything(rank, loader, root)
            assert (root / "index").exists() == (how is content)
            assert any(root.glob("*.distcp")), "of others, they stay"
        damaged = scratch / Entry.MEGATRON
        if rank == 0:
            min(damaged.glob("__3_*.distcp")).unlink()
        dist.barrier()
        wanted = everything(rank, empty=True)
        require_refused(lambda: load(Entry.OURS, wanted, damaged), CheckpointError, ".distcp")


def ranks_that_do_not_share_a_directory_get_an_error(rank: int, scratch: Path) -> None:
    """They have a directory each, under the same name as far as they can tell."""
    prepare(10)
    root = scratch / f"node{rank // 2}" / "c"
    root.mkdir(parents=True, exist_ok=True)
    call = partial(save, Entry.OURS, state_of(rank, CUTS), root)
    failure = require_refused(call, StorageError, "on a file system that they share")
    assert failure.global_rank == 0
    assert str(scratch / "node0" / "c") in str(failure.path)
    dist.barrier()  # each rank deletes its own
    assert not list(root.rglob("*.safetensors"))
    assert not (root / "metadata.json").exists()


def shards_on_no_grid_need_not_make_up_an_array_that_is_loaded(rank: int, scratch: Path) -> None:
    """They leave gaps, overlap, or are copies alone, as Megatron-Core allows."""

    def on_no_grid(
        begin: int, end: int, replica_id: int = 0, *, scale: float = 1.0
    ) -> dict[str, Any]:
        data = scale * torch.arange(float(begin), float(end))
        shape = (end - begin,), (10,), (begin,)
        return {"w": ShardedTensor("w", data, data.dtype, *shape, None, replica_id)}

    begin, end = ((0, 3), (3, 10))[rank % 2]
    save(Entry.OURS, on_no_grid(begin, end, rank // 2), scratch / "c", sharded_strategy=PACKS)
    for entry, of_rank in product(
        Entry,
        (
            ((0, 3), (4, 7), (4, 6), (9, 10)),
            ((0, 10),) * 4,
            ((0, 3, 1), (3, 10, 1), (0, 3, 2), (3, 10, 2)),
        ),
    ):
        loaded = load(entry, on_no_grid(*of_rank[rank], scale=0.0), scratch / "c")
        assert torch.equal(loaded["w"], on_no_grid(*of_rank[rank])["w"].data)


def a_strategy_of_another_package_may_take_longer_than_storage(rank: int, scratch: Path) -> None:
    allow_torch_dist()

    class Slow(TorchDistSaveShardedStrategy):  # type: ignore[misc]
        def save(self, *args: Any) -> None:
            time.sleep(5)
            super().save(*args)

    with cpu_stand_ins():
        save(Entry.OURS, everything(rank), scratch / "first", sharded_strategy=TORCH_DIST)
        slow = Slow(*TORCH_DIST)
        save(Entry.OURS, everything(rank), scratch / "c", sharded_strategy=slow, timeout_s=4)
        loaded = load(Entry.OURS, everything(rank, empty=True), scratch / "c")
    assert loaded["model"]["extra"] == {"rank": rank}


def factories_and_callers_may_take_longer_than_storage(rank: int, scratch: Path) -> None:
    def nap(found: Any) -> Any:
        time.sleep(2.5)
        return found

    def build(key: str, data: torch.Tensor, replica: int, _range: None) -> Any:
        return nap({"a": ShardedTensor.from_rank_offsets(key, data, replica_id=replica)})

    def state() -> dict[str, Any]:
        factory = ShardedTensorFactory("f", torch.ones(2), build, lambda found: found["a"], rank)
        return {"f": factory, "n": 1}

    more: dict[str, Any] = {"preprocess_common_before_consistancy_check": nap, "timeout_s": 8}
    save(Entry.OURS, state(), scratch / "c", **more)
    assert load(Entry.OURS, state(), scratch / "c", timeout_s=8)["n"] == 1


@pytest.mark.parametrize(
    ("act", "backend"),
    [
        *product(
            [
                each_entry_loads_what_either_saved,
                one_rank_alone_reads_metadata_and_removes_arrays,
            ],
            [ZARR, PACKS],
        ),
        (shards_on_no_grid_need_not_make_up_an_array_that_is_loaded, PACKS),
        (arguments_are_left_alone, PACKS),
        (classes_are_allowed_by_argument_by_strategy_or_by_registration, PACKS),
        (groups_save_on_their_own_and_errors_name_global_ranks, PACKS),
        (torch_dist_through_our_entries_is_torch_dist, PACKS),
        (ranks_that_do_not_share_a_directory_get_an_error, PACKS),
        (a_part_of_the_world_loads_without_a_strategy, ZARR),
        (a_strategy_of_another_package_may_take_longer_than_storage, ZARR),
        (factories_and_callers_may_take_longer_than_storage, PACKS),
    ],
)
def test_the_entries_do_as_megatron_cores_and_more(
    act: Callable[[int, Path], None], backend: tuple[str, int], tmp_path: Path
) -> None:
    require_on_ranks(4, act, tmp_path, default=backend)


# Every value of strict

STORED = [on_grid("w", (8,), (4,)), on_grid("extra", (4,), (4,))]
ASKED: dict[str, dict[int, list[str]]] = {
    "none": {},
    "all": {rank: ["new", "new.o"] for rank in range(4)},
    "some": {2: ["new"], 3: ["new.o"]},
}
"""By rank, keys that no rank stored: of an array, of an object."""


def stored(rank: int) -> dict[str, Any]:
    """An array and an object that will be asked for, and one of each that will not."""
    state: dict[str, Any] = state_of(rank, STORED)
    state["o"] = ShardedObject("o", {"x": rank}, (4,), (rank,))
    state["extra o"] = ShardedObject("extra.o", rank, (4,), (rank,))
    return state


def wanted(rank: int, asked: dict[int, list[str]]) -> dict[str, Any]:
    state: dict[str, Any] = state_of(rank, STORED[:1], zeros)
    state["o"] = ShardedObject("o", None, (4,), (rank,))
    for key in asked.get(rank, ()):
        replica = rank - min(other for other in asked if key in asked[other])
        state[key] = ShardedObject(key, "mine", (1,), (0,), replica)
        if key == "new":
            state[key] = ShardedTensor.from_rank_offsets(key, torch.ones(4), replica_id=replica)
    return state


def described(found: Any) -> Any:
    """What a load gave, without the class of error that a backend chooses."""
    if isinstance(found, Failure):
        return "raised"
    state, *keys = found if isinstance(found, tuple) else (found,)
    values = {name.split(" #")[0]: value for name, value in state.items()}
    return sorted(values), [sorted(each) for each in keys], values["o"], values["w"].tolist()


def expected(rank: int, strict: StrictHandling, asked: dict[int, list[str]]) -> Any:
    """What the documentation of StrictHandling says."""
    refused = (StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED)
    if strict is StrictHandling.RAISE_ALL or (strict in refused and asked):
        return "raised"
    keys = {
        StrictHandling.RETURN_UNEXPECTED: [[], asked.get(rank, [])],
        StrictHandling.RETURN_ALL: [["extra", "extra.o"], asked.get(rank, [])],
    }
    content = part_of(STORED[0], STORED[0].parts[rank]).tolist()
    return ["o", "w"], keys.get(strict, []), {"x": rank}, content


def load_strictly(rank: int, scratch: Path) -> None:
    """In all ways but those that hang in Megatron-Core: a mismatch that only some ranks raise."""
    allow_torch_dist()
    # torch_dist synchronises CUDA and asks for its current device, also for tensors on the CPU.
    with cpu_stand_ins():
        save(Entry.MEGATRON, stored(rank), scratch / "torch_dist", sharded_strategy=TORCH_DIST)
        for own in (ZARR, PACKS):
            save(Entry.MEGATRON, stored(rank), scratch / own[0], sharded_strategy=own)
        ways = [(Entry.OURS, name) for name in ("zarr", "safetensors", "torch_dist")]
        ways.append((Entry.MEGATRON, "safetensors"))
        for case in product(StrictHandling, ways, ASKED):
            strict, (entry, backend), who = case
            if who == "some" and (entry is not Entry.OURS or backend == "torch_dist"):
                continue
            value = strict if rank % 2 else strict.value
            ask = wanted(rank, ASKED[who])
            validate = {} if backend == "zarr" else {"validate_access_integrity": False}
            found = outcome(partial(load, entry, ask, scratch / backend, strict=value, **validate))
            assert described(found) == expected(rank, strict, ASKED[who]), (rank, case)


def test_strict_means_the_same_for_every_entry_and_backend(tmp_path: Path) -> None:
    require_on_ranks(4, load_strictly, tmp_path)


# Objects that are stored for another number of ranks


def of_grid(rank: int, num_ranks: int, size: int, *, is_saved: bool) -> dict[str, Any]:
    """An array, an object whose grid grows with the ranks, and one of each rank that does not."""
    shard = torch.full((8 // size,), 7.0 if is_saved else 0.0)
    state = {"w": ShardedTensor.from_rank_offsets("w", shard, (0, rank % size, size))}
    state["w"].replica_id = rank // size
    state["kept"] = ShardedObject("kept", "stored", (1,), (0,), rank)
    if rank < num_ranks:
        state["rng"] = ShardedObject("rng", "stored", (num_ranks,), (rank,))
    return state


ONE_OF_EACH_KIND = (
    StrictHandling.ASSUME_OK_UNEXPECTED,
    StrictHandling.RAISE_ALL,
    StrictHandling.LOG_ALL,
    StrictHandling.RETURN_ALL,
)


def load_for_another_grid(rank: int, scratch: Path) -> None:
    """Two ranks have a generator of random numbers each; then four, or one, have."""
    allow_torch_dist()
    with cpu_stand_ins():
        for backend in (*FORMATS, TORCH_DIST):
            root = scratch / backend[0] / str(backend[1])
            saved = of_grid(rank, 2, 4, is_saved=True)
            save(Entry.OURS, saved, root, sharded_strategy=backend)
            dist.barrier()
            for strict, num_ranks in product(ONE_OF_EACH_KIND, (4, 1)):
                ask = of_grid(rank, num_ranks, 4, is_saved=False)
                found = outcome(partial(load, Entry.OURS, ask, root, strict=strict))
                case = (backend, strict, num_ranks, rank)
                if strict in ONE_OF_EACH_KIND[:2]:
                    assert isinstance(found, Failure), case
                    assert "rng" in found.text, (case, found)
                    continue
                state, *keys = found if isinstance(found, tuple) else (found,)
                assert "rng" not in state, case
                assert (state["kept"], state["w"].tolist()) == ("stored", [7.0, 7.0]), case
                own = ["rng"] if rank < num_ranks else []
                assert not keys or sorted(keys[1]) == own, (case, keys)


def test_an_object_that_is_stored_for_another_grid_is_left_out_or_named(tmp_path: Path) -> None:
    require_on_ranks(4, load_for_another_grid, tmp_path)


# A rank that sees an old copy of the common state


def of_generation(rank: int, size: int, value: int) -> dict[str, Any]:
    shard = torch.full((2, 2), float(value))
    return {"w": ShardedTensor.from_rank_offsets("w", shard, (0, rank, size)), "iteration": value}


def load_beside_a_stale_copy(rank: int, scratch: Path) -> None:
    """Each rank in turn has the common state of the save before; all else is of the last save."""
    allow_torch_dist()
    size, two_stage = dist.get_world_size(), TwoStageDataParallelLoadShardedStrategy(None)
    ours: list[tuple[Entry, dict[str, Any]]] = [
        (Entry.OURS, {}),
        (Entry.OURS, {"strict": "log_all"}),
    ]
    ways = [*ours, (Entry.MEGATRON, {}), (Entry.OURS, {"sharded_strategy": two_stage})]
    with cpu_stand_ins():
        for backend in (*FORMATS, TORCH_DIST):
            roots = [scratch / f"{backend[0]}{backend[1]}" / name for name in ("old", "new", "mix")]
            for value, root in enumerate(roots[:2]):
                state = of_generation(rank, size, value)
                save(Entry.OURS, state, root, sharded_strategy=backend)
            dist.barrier()
            if rank == 0:
                shutil.copytree(roots[1], roots[2])
                shutil.copy(roots[0] / "common.pt", roots[2])
            dist.barrier()
            of_backend = ours if backend == TORCH_DIST else ways
            for culprit, (entry, options) in product(range(size), of_backend):
                wanted = of_generation(rank, size, -1)
                root = roots[2] if rank == culprit else roots[1]
                if backend == PACKS and entry is Entry.OURS:  # it is read from a pack
                    loaded = load(entry, wanted, root, **options)
                    assert (loaded["iteration"], loaded["w"].unique().tolist()) == (1, [1.0])
                    continue
                found = outcome(partial(load, entry, wanted, root, **options))
                failure = require_failure(found, StorageError, "common.pt")
                assert any(f"{word}{culprit}" in failure.text for word in ("rank ", "ranks ["))


def test_a_stale_copy_of_the_common_state_is_an_error_on_every_rank(tmp_path: Path) -> None:
    require_on_ranks(2, load_beside_a_stale_copy, tmp_path)
