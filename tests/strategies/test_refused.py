"""Requests that make no sense are refused on every rank, by name, and leave nothing finished."""

import argparse
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
)

import dist_ckpt_strategies
from dist_ckpt_strategies.cli.demo.cpu_stand_ins import cpu_stand_ins
from dist_ckpt_strategies.errors import (
    CheckpointNotFoundError,
    CoverageError,
    PlanError,
    StorageError,
    StrategyError,
)
from dist_ckpt_strategies.local import CliqueReplicationStrategy
from dist_ckpt_strategies.megatron.types import StrategyAction
from dist_ckpt_strategies.strategies.own_load import OwnLoadShardedStrategy
from dist_ckpt_strategies.strategies.registry import resolve
from dist_ckpt_strategies.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy
from dist_ckpt_strategies.strategies.zarr import ZarrLoadShardedStrategy
from tests.support.entries import (
    FORMATS,
    PACKS,
    ZARR,
    Entry,
    default_format,
    load,
    require_on_ranks,
    require_refused,
    save,
)
from tests.support.ranks import allow_torch_dist
from tests.support.sharding import no_data, on_grid, state_of
from tests.support.tensors import WITHOUT_MEMORY

pytestmark = pytest.mark.multiprocess

TORCH_DIST = ("torch_dist", 1)
CUTS = [on_grid("w", (8, 4), (4, 2)), on_grid("b", (4,), (1,), num_replicas=4)]
FITS = "does not fit together"


def values_that_collide(rank: int, scratch: Path) -> None:
    """On rank 2 a local value stands where the checkpoint has common state, and the reverse."""
    root, culprit = scratch / "c", {"global_rank": 2} if rank != 2 else {}
    save(Entry.OURS, {"iteration": 7, **state_of(rank, CUTS)}, root)
    wanted: dict[str, Any] = state_of(rank, CUTS, no_data)
    local = {"iteration": LocalNonpersistentObject(8)} if rank == 2 else {}
    require_refused(partial(load, Entry.OURS, wanted | local, root), PlanError, FITS, **culprit)
    if rank == 2:
        wanted["iteration"] = wanted.pop(next(iter(wanted)))
    require_refused(partial(load, Entry.OURS, wanted, root), PlanError, FITS, **culprit)


def an_option_that_one_rank_cannot_read(rank: int, scratch: Path) -> None:
    """Rank 1 has an environment of its own."""
    state = state_of(rank, CUTS)
    save(Entry.OURS, state, scratch / "c")
    if rank == 1:
        os.environ["DIST_CKPT_IO_THREADS"] = "many"
    said = "DIST_CKPT_IO_THREADS: expected int, found 'many'"
    for call in (
        partial(save, Entry.OURS, state, scratch / "c", overwrite=True),
        partial(load, Entry.OURS, state_of(rank, CUTS, no_data), scratch / "c"),
    ):
        require_refused(call, StrategyError, said, global_rank=1)


def arguments_that_make_no_sense(rank: int, scratch: Path) -> None:
    (scratch / "file").touch()
    state: Any = state_of(rank, CUTS)
    wanted = state_of(rank, CUTS, no_data)
    finished = scratch / "finished"
    save(Entry.OURS, state, finished)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, other_half = halves[rank // 2], halves[1 - rank // 2]
    saves: Any = partial(dist_ckpt_strategies.save, state)
    loads: Any = partial(dist_ckpt_strategies.load, wanted)
    save_anything: Any = dist_ckpt_strategies.save
    new = scratch / "new"
    no_strategy = "expected a SaveShardedStrategy or a tuple"
    no_path = "checkpoint_dir: expected a str or a Path"
    for call, kind, words in (
        (partial(loads, scratch / "nowhere"), CheckpointNotFoundError, str(scratch / "nowhere")),
        (partial(loads, scratch / "file"), CheckpointNotFoundError, str(scratch / "file")),
        (partial(saves, scratch / "file" / "c"), StorageError, str(scratch / "file")),
        (partial(saves, scratch / ("x" * 300)), StorageError, "name is too long"),
        (partial(saves, None), StrategyError, no_path),
        (partial(loads, b"c"), StrategyError, no_path),
        (partial(saves, new, "zarr"), StrategyError, no_strategy),
        (partial(saves, new, ZarrLoadShardedStrategy()), StrategyError, no_strategy),
        (partial(save_anything, [state], new), PlanError, "expected a dict"),
        *(
            (
                partial(save_anything, {"l": (value,)}, new, kind, allow=[type(value)]),
                PlanError,
                f": {value.key}: a {type(value).__name__} in a tuple",
            )
            for value in (next(iter(state.values())), ShardedObject("o", 1, (4,), (rank,)))
            for kind in (ZARR, PACKS)
        ),
        (partial(loads, finished, ("mine", 7)), StrategyError, "'mine', 7"),
        (
            partial(loads, finished, ("safetensors", 1)),
            StrategyError,
            str(finished / "metadata.json"),
        ),
        (
            partial(saves, new, ("zarr", 1), verify_integrity=True),
            StrategyError,
            "verify_integrity: only format ('safetensors', 1)",
        ),
        (partial(saves, new, async_strategy="mine"), StrategyError, "expected one of"),
        (
            partial(loads, finished, ZarrLoadShardedStrategy(), process_group=half),
            StrategyError,
            "its 2 ranks are not the 4",
        ),
        (
            partial(loads, finished, process_group=other_half),
            StrategyError,
            "is not in the process",
        ),
        (
            partial(loads, finished, verify_integrity=True),
            StrategyError,
            "digests are kept by format ('safetensors', 1)",
        ),
        (partial(loads, finished, verify="off"), StrategyError, "1), which ZarrLoad"),
        (
            partial(loads, finished, OwnLoadShardedStrategy(), verify_integrity=True),
            StrategyError,
            "found ('zarr', 1)",
        ),
    ):
        require_refused(call, kind, words)
    saves(new, verify_integrity=True, async_strategy="nvrx")
    assert isinstance(loads(new, verify_integrity=True, process_group=dist.group.WORLD), dict)
    require_refused(partial(loads, new, verify="all"), StrategyError, "one of off, read")


def ranks_that_do_not_agree(rank: int, scratch: Path) -> None:
    """One rank uses another strategy, or asks for other cliques."""
    is_odd, state = rank == 3, state_of(rank, CUTS)
    dist_ckpt_strategies.save(state, scratch / "c")
    two_stage = TwoStageDataParallelLoadShardedStrategy(None) if is_odd else None
    saves = partial(dist_ckpt_strategies.save, state)
    two_kinds: list[Any] = [
        partial(saves, scratch / "new", kinds[is_odd])
        for kinds in ((ZARR, PACKS), (PACKS, TORCH_DIST))
    ]
    loads = partial(dist_ckpt_strategies.load, state_of(rank, CUTS, no_data))
    cliques = partial(CliqueReplicationStrategy.from_replication_params, 2, 2 - is_odd)
    for call, kind, words in (
        *((call, PlanError, "; ranks [3] in a save by ") for call in two_kinds),
        (partial(loads, scratch / "c", two_stage), PlanError, "; ranks [3] in a load by "),
        (
            partial(loads, scratch / "c", **({"strict": "raise_all"} if is_odd else {})),
            PlanError,
            "to a load the same strict, on all ranks",
        ),
        (cliques, PlanError, "rank 3 asks for other cliques than rank 0"),
    ):
        require_refused(call, kind, words)


class Unpicklable:
    """Something whose own code fails when it is pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("nope")


def one_object(*args: Any, **options: Any) -> dict[str, Any]:
    return {"o": ShardedObject("o", *args, **options)}


def one_tensor(
    offset: int, replica_id: Any = 0, size: int = 8, dtype: Any = torch.float32
) -> dict[str, Any]:
    data = torch.ones(2, dtype=dtype)
    return {"w": ShardedTensor("w", data, dtype, (2,), (size,), (offset,), None, replica_id)}


def with_other_data(rank: int, change: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    state = state_of(rank, [on_grid("w", (8, 4), (4, 1))])
    if rank == 1:
        (tensor,) = state.values()
        tensor.data = change(tensor.data)
    return state


TAKEN_BY_PACKS = {"no grid", "nowhere"}
"""Keys and offsets are not parts of paths there."""

ON_NO_GRID = {"overlap"}
"""Format ("zarr", 1) says that first; see test_save_load."""

SAID = {
    "gap": "first element not covered: (4,), which no rank holds",
    "a copy alone": "first element not covered: (2,), which only copies hold (rank 1)",
    "other shape": "(16,) of float32 on rank 2",
    "other dtype": "float16 on rank 2",
}
"""By the check of our own saves."""

KINDS = {
    "twice on 1": CoverageError,
    "overlap": CoverageError,
    "hole": CoverageError,
    "beyond w": CoverageError,
    "unpicklable": StorageError,
}


def wrong_states(rank: int) -> dict[str, tuple[dict[str, Any], dict[str, Any], str]]:
    """States in which something does not fit on rank 1, and what the message has to say of each.

    Megatron-Core's checks may or may not find it.
    """
    bad, of_o, of_w = rank == 1, {"key": "o"}, {"key": "w"}
    w_of_1, says = of_w | {"global_rank": 1}, "but the ShardedTensor says"
    odd = Unpicklable() if bad else 1
    nope = "o/shard_1_4 cannot be saved: ValueError: nope"
    size, dtype = (16, torch.float16) if rank == 2 else (8, torch.float32)
    no_replica = "w: expected a number or several as replica_id, found None"
    grid, place, replica = (1,) if rank == 0 else (2,), (min(rank, 1),), max(0, rank - 1)
    again = ShardedObject("o", rank, (4,), (rank,), replica_id=int(not bad))
    return {
        "shape": (with_other_data(rank, lambda data: data.reshape(4, 2)), w_of_1, says),
        "dtype": (with_other_data(rank, torch.Tensor.double), w_of_1, says),
        "same size": (with_other_data(rank, lambda data: data.view(torch.int32)), w_of_1, says),
        "none": (with_other_data(rank, lambda _: None), w_of_1, "rank 1: w: "),
        "sparse": (with_other_data(rank, torch.Tensor.to_sparse), w_of_1, "rank 1: w: "),
        "meta": (with_other_data(rank, lambda data: data.to("meta")), w_of_1, "rank 1: w: "),
        "unpicklable": (one_object(odd, (4,), (rank,)), {"global_rank": 1}, nope),
        "twice": (one_object(rank, (1,), (0,)), of_o, " rank 1"),
        "gap": (one_object(rank, (5,), (rank,)), of_o, " rank 1"),
        "no main replica": (one_object(rank, (4,), (rank % 2,), replica_id=1), of_o, ""),
        "grids": (one_object(rank, grid, place, replica_id=replica), of_o, " rank 1"),
        "twice on 1": (one_object(rank, (4,), (rank,)) | {"again": again}, of_o, ""),
        "nowhere": ({"o": ShardedObject("", rank, (4,), (rank,))}, {}, ""),
        "before": (one_object(rank, (4,), (-1 if bad else rank,)), {}, ""),
        "beyond": (one_object(rank, (4,), (5 if bad else rank,)), {}, ""),
        "no grid": (one_object(rank, (), (), replica_id=rank), {}, ""),
        "number": ({"o": ShardedObject(5, rank, (4,), (rank,))}, {}, ""),
        "no replica": (one_tensor(2 * rank, None if bad else 0), w_of_1, no_replica),
        "a copy alone": (one_tensor(2 * rank, int(bad)), of_w, "w: "),
        "before w": (one_tensor(2 * rank - 2), of_w, "w: rank "),
        "beyond w": (one_tensor(2 * rank + 2), of_w, "w: rank 3 holds [8:10]"),
        "hole": (one_tensor(2 * rank, size=9), of_w, "w: main replicas cover 8 of 9"),
        "overlap": (one_tensor(min(2 * rank, 5)), of_w, "and [5:7] on rank 3"),
        "other shape": (one_tensor(2 * rank, size=size), of_w, "(16,) on rank 2, (8,) on rank 0"),
        "other dtype": (one_tensor(2 * rank, dtype=dtype), of_w, "on rank 2,"),
    }


def tensors_without_memory(rank: int, scratch: Path) -> None:
    """On rank 1 a tensor to save, or to load into, is not in memory of its own."""
    groups = [dist.new_subgroups(2)[0], dist.new_subgroups(4)[0]]
    allow_torch_dist()
    for backend in (*FORMATS, TORCH_DIST):
        loader = resolve(StrategyAction.LOAD_SHARDED, None, backend)
        wrapped = FullyParallelLoadStrategyWrapper(loader, groups[1])
        ways = [None, wrapped]
        if backend != TORCH_DIST:
            ways.append(TwoStageDataParallelLoadShardedStrategy(groups[0]))
        root, options = scratch / backend[0] / str(backend[1]), {"sharded_strategy": backend}
        with cpu_stand_ins():
            save(Entry.OURS, with_other_data(rank, torch.clone), root, **options)
            for name, (make, said) in WITHOUT_MEMORY.items():
                new, bad = scratch / "new" / f"{backend} {name}", with_other_data(rank, make)
                calls: list[Callable[[], Any]] = [
                    partial(save, Entry.OURS, bad, new / str(Entry.OURS), **options)
                ]
                calls += [partial(load, Entry.OURS, bad, root, sharded_strategy=w) for w in ways]
                if backend != TORCH_DIST:
                    calls.append(partial(dist_ckpt_strategies.save_async, bad, new, backend))
                    calls.append(partial(save, Entry.MEGATRON, bad, new / "theirs", **options))
                    calls.append(partial(load, Entry.MEGATRON, bad, root))
                for call in calls:
                    require_refused(call, PlanError, said, "rank 1: w: ", key="w", global_rank=1)


def common_state_objects_and_factories_without_memory(rank: int, scratch: Path) -> None:
    new, good = scratch / "new", torch.ones(2)
    whole = {"f": ShardedTensorFactory("f", good, halves, torch.cat, rank)}
    save(Entry.OURS, whole, scratch / "c")
    for make, said in (WITHOUT_MEMORY[name] for name in ("released", "cut short", "meta")):
        args = argparse.Namespace(t=[make(good)] if rank == 0 else [good])
        held = {"t": make(good) if rank == 1 else good}
        made = {"f": ShardedTensorFactory("f", held["t"], halves, torch.cat, rank)}
        for call, words in (
            (partial(save, Entry.OURS, {"args": args}, new), "rank 0: common state: args.t[0]: "),
            (partial(save, Entry.OURS, one_object(held, (4,), (rank,)), new), "o/shard_1_4: t: "),
            (partial(save, Entry.OURS, made, new), "rank 1: f: "),
            (partial(load, Entry.OURS, made, scratch / "c"), "rank 1: f: "),
        ):
            require_refused(call, PlanError, said, words)


def halves(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> list[Any]:
    parts = enumerate(data.chunk(2))
    return [sharded_whole(f"{key}.{number}", part, replica_id) for number, part in parts]


def tied_weights(rank: int, scratch: Path) -> None:
    """Two names of one memory are loaded, unless the checkpoint holds two values."""
    for backend, is_tied in product(FORMATS, (True, False)):
        data, root = torch.full((2, 3), torch.nan).T, scratch / f"{backend} {is_tied}"
        values = {"a": torch.ones(3, 2), "b": torch.full((3, 2), 1.0 if is_tied else 2.0)}
        held = {key: sharded_whole(key, value, rank) for key, value in values.items()}
        save(Entry.OURS, held, root, sharded_strategy=backend, overwrite=True)
        wanted = {key: sharded_whole(key, data, rank) for key in "ab"}
        call = partial(load, Entry.OURS, wanted, root)
        if is_tied:
            assert torch.equal(call()["a"], values["a"])
        else:
            require_refused(call, PlanError, "for which the checkpoint holds other values")


def a_load_of_shards_that_do_not_fit(rank: int, scratch: Path) -> None:
    """Nobody is the main replica of a part, then two are, after a load of a sharding that fits."""
    save(Entry.OURS, state_of(rank, CUTS), scratch)
    load(Entry.OURS, state_of(rank, CUTS, no_data), scratch)
    for index, replica in ((0, 1), (-1, 0)):
        wanted: dict[str, Any] = state_of(rank, CUTS, no_data)
        if rank == 2:
            [*wanted.values()][index].replica_id = replica
        call = partial(load, Entry.OURS, wanted, scratch)
        require_refused(call, CoverageError, "main replica")
        assert call(validate_access_integrity=False).keys() == wanted.keys()


def sharded_whole(key: str, data: torch.Tensor, rank: int) -> Any:
    return ShardedTensor.from_rank_offsets(key, data, replica_id=rank)


def states_that_do_not_fit(rank: int, scratch: Path) -> None:
    """What Megatron-Core's own check finds it raises on rank 0 alone; ours is called with it."""
    for entry, (name, (state, values, words)) in product(Entry, wrong_states(rank).items()):
        checked = entry is Entry.OURS
        is_packs = default_format() == PACKS
        if name in (TAKEN_BY_PACKS if is_packs else ON_NO_GRID):
            continue
        root = scratch / f"{entry}.{name}"
        call = partial(save, entry, dict(state), root, validate_access_integrity=checked)
        require_refused(call, KINDS.get(name, PlanError), SAID.get(name, words), **values)
        assert not (root / "metadata.json").exists(), name
        dist.barrier()
        assert [p for p in root.rglob("*.safetensors") if not name.startswith("unp")] == [], name
        dist.barrier()


@pytest.mark.parametrize(
    ("act", "backend"),
    [
        (states_that_do_not_fit, ZARR),
        (states_that_do_not_fit, PACKS),
        (values_that_collide, PACKS),
        (an_option_that_one_rank_cannot_read, PACKS),
        (common_state_objects_and_factories_without_memory, PACKS),
        (arguments_that_make_no_sense, ZARR),
        (ranks_that_do_not_agree, ZARR),
        (tensors_without_memory, ZARR),
        (tied_weights, ZARR),
        (a_load_of_shards_that_do_not_fit, PACKS),
    ],
)
def test_invalid_arguments_are_refused_on_every_rank(
    act: Callable[[int, Path], None], backend: Any, tmp_path: Path
) -> None:
    require_on_ranks(4, act, tmp_path, default=backend)


def test_ranks_without_a_process_group_do_not_save_each_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")

    for save_alone in (dist_ckpt_strategies.save, dist_ckpt_strategies.save_async):
        with pytest.raises(StrategyError, match="there are 4 ranks: each would save alone"):
            save_alone({"step": 1}, tmp_path / "c")
    assert list(tmp_path.iterdir()) == []

    monkeypatch.delenv("RANK")  # not of torchrun
    dist_ckpt_strategies.save({"step": 1}, tmp_path / "c")


def test_a_process_alone_may_load_a_part_as_with_megatron(tmp_path: Path) -> None:
    whole = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
    dist_ckpt_strategies.save({"w": whole}, tmp_path)
    for strict in ("assume_ok_unexpected", "raise_all"):
        part = ShardedTensor.from_rank_offsets("w", torch.zeros(2), (0, 1, 2))
        loaded: Any = dist_ckpt_strategies.load({"w": part}, tmp_path, strict=strict)
        assert loaded["w"].tolist() == [2.0, 3.0]
