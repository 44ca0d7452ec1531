"""Sharded state dicts through local checkpoints, at the same layout and at others."""

import argparse
import logging
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

import dist_ckpt_strategies
from dist_ckpt_strategies.errors import (
    CheckpointError,
    CoverageError,
    PlanError,
)
from dist_ckpt_strategies.local import (
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
    MCoreTensorAwareStateDict,
)
from tests.support.entries import Failure, outcome, require_on_ranks, require_refused
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

ROWS, COLUMNS = 24, 6
ARRAYS = ("a", "b.c", "bf")
ALGORITHMS = ("atomic", "fully_parallel")


def whole(key: str) -> torch.Tensor:
    found = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(len(key)))
    return found.bfloat16() if key == "bf" else found


def state_of(tp: int, *, is_filled: bool = True) -> dict[str, Any]:
    """This rank's shards where ``tp`` neighbours divide the rows, and others are replicas."""
    rank = dist.get_rank()
    part, replica = rank % tp, rank // tp
    state: dict[str, Any] = {"args": argparse.Namespace(lr=0.5), "iteration": 7}
    for key in ARRAYS:
        data = whole(key).chunk(tp)[part].contiguous()
        data = data if is_filled else torch.full_like(data, -1)
        state[key] = ShardedTensor.from_rank_offsets(key, data, (0, part, tp), replica_id=replica)
    content = {"part": part, "extra": torch.tensor([part, 7])} if is_filled else None
    state["rng"] = ShardedObject("rng", content, (tp,), (part,), replica_id=replica)
    return state


def require_equal(found: dict[str, Any], tp: int, keys: Iterable[str]) -> None:
    part = dist.get_rank() % tp
    assert found.keys() == {"args", "iteration", *keys}
    for key in found.keys() & ARRAYS:
        assert torch.equal(found[key], whole(key).chunk(tp)[part]), key
    if "rng" in found:
        assert found["rng"]["part"] == part
        assert found["rng"]["extra"].tolist() == [part, 7]
    assert (found["args"].lr, found["iteration"]) == (0.5, 7)


def manager_of(root: str) -> LocalCheckpointManager:
    return LocalCheckpointManager(
        Path(root) / f"node{dist.get_rank() % 2}",
        repl_strategy=LazyCliqueReplicationStrategy(1, 2, timeout_s=30),
        timeout_s=30,
    )


def save(_rank: int, root: str) -> list[int]:
    """Save at TP2 by each algorithm; how many tensors this rank keeps."""
    counts = []
    for algo in ALGORITHMS:
        before = state_of(2)
        data = before["a"].data
        state, distribution = MCoreTensorAwareStateDict.from_state_dict(before, algo)
        again, _ = MCoreTensorAwareStateDict.from_state_dict(
            before, algo, cached_metadata=distribution
        )
        assert before["a"].data is data
        counts += [len(list(state.tensors))]
        assert len(list(again.tensors)) == counts[-1]
        manager_of(f"{root}/{algo}").save(again, 7)
    return counts


def load(_rank: int, root: str) -> None:
    for algo in ALGORITHMS:
        loaded, _ = manager_of(f"{root}/{algo}").load()
        for tp in (1, 2, 4)[: dist.get_world_size()]:
            wanted = state_of(tp, is_filled=False)
            if tp != 2:
                del wanted["rng"]
            keys = wanted.keys() - {"args", "iteration"}
            require_equal(loaded.to_state_dict(wanted, algo=algo), tp, keys)
            assert torch.equal(wanted["a"].data, torch.full_like(wanted["a"].data, -1))


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_a_state_comes_back_in_any_layout_on_any_number_of_ranks_though_a_node_is_lost(
    old: int, new: int, tmp_path: Path
) -> None:
    atomic, parallel = zip(*run_processes(old, save, str(tmp_path)), strict=True)
    assert atomic == (len(ARRAYS),) * old
    assert (sum(parallel), max(parallel)) == (6, -(-6 // old))
    for algo in ALGORITHMS:
        shutil.rmtree(tmp_path / algo / "node1")

    assert run_processes(new, load, str(tmp_path)) == [None] * new


def change_the_sharding(rank: int) -> None:
    """Shards move, one is new, and one is left out, though the distribution is given."""

    def shards(step: int) -> dict[str, Any]:
        part, size = (rank + step) % 4, 4
        found = torch.full((2,), float(part))
        state = {"moves": ShardedTensor.from_rank_offsets("moves", found, (0, part, size))}
        if step:
            state["new"] = ShardedTensor.from_rank_offsets("new", found, (0, rank, size))
        return state

    first, known = MCoreTensorAwareStateDict.from_state_dict(shards(0))
    second, known = MCoreTensorAwareStateDict.from_state_dict(shards(1), cached_metadata=known)
    assert (len(list(first.tensors)), len(list(second.tensors))) == (1, 2)
    lacking = shards(1)
    if rank == 2:
        del lacking["new"]
    found = outcome(
        lambda: MCoreTensorAwareStateDict.from_state_dict(lacking, cached_metadata=known)
    )
    assert isinstance(found, Failure)
    assert "CoverageError" in found.kinds


def ask_for_nothing(rank: int) -> None:
    """Megatron-LM does so before it has a model; here also one rank alone does."""
    state, _ = MCoreTensorAwareStateDict.from_state_dict(state_of(2), "fully_parallel")
    nothings: tuple[dict[str, Any] | None, ...] = (None, {})
    for nothing in nothings:
        require_equal(state.to_state_dict(nothing), 2, ())
    wanted = None if rank == 3 else state_of(2, is_filled=False)
    require_equal(state.to_state_dict(wanted), 2, () if rank == 3 else (*ARRAYS, "rng"))


def ask_for_an_object_of_another_rank(rank: int) -> None:
    def state(place: int) -> dict[str, Any]:
        return {"own": ShardedObject("own", {rank}, (4,), (place % 4,))}

    found = MCoreTensorAwareStateDict.from_state_dict(state(rank))[0].to_state_dict(state(rank + 1))
    assert found["own"] == {(rank + 1) % 4}


def ask_for_an_object_of_another_grid(rank: int) -> None:
    def wanted(size: int) -> dict[str, Any]:
        kept = ShardedObject("kept", "stored", (1,), (0,), rank)
        return {"own": ShardedObject("own", {rank}, (size,), (rank,)), "kept": kept}

    state, _ = MCoreTensorAwareStateDict.from_state_dict(wanted(4))
    for strict in StrictHandling:
        load = partial(  # not validated: four ranks have half of that grid
            state.to_state_dict, wanted(8), validate_access_integrity=False, strict=strict
        )
        if strict in REFUSING:
            require_refused(load, CheckpointError, "own")
        else:
            assert load() == {"kept": "stored"}


def ask_for_what_cannot_be_had(rank: int) -> None:
    state, _ = MCoreTensorAwareStateDict.from_state_dict(state_of(2), "atomic")
    strange = {"x": ShardedTensor.from_rank_offsets("x", torch.zeros(2), (0, rank, 4))}
    longer = {"a": ShardedTensor.from_rank_offsets("a", torch.zeros(7, COLUMNS), (0, rank, 4))}
    of_none = {"gap": ShardedTensor.from_rank_offsets("gap", torch.zeros(2), (0, rank, 5))}
    make = partial(MCoreTensorAwareStateDict.from_state_dict, of_none)
    load, shapes = state.to_state_dict, "a: shape (24, 6) in the checkpoint, (28, 6) requested"
    require_refused(partial(load, strange), CoverageError, "x: rank 0 wants", key="x")
    require_refused(make, CoverageError, "gap: main replicas cover 8 of 10", key="gap")
    require_refused(partial(load, longer), PlanError, shapes, key="a")
    shard = torch.zeros(6, COLUMNS)
    into = {"a": ShardedTensor.from_rank_offsets("a", shard, (0, rank, 4))}
    if rank == 1:
        shard.untyped_storage().resize_(0)
    require_refused(partial(state.load_into, into), PlanError, "rank 1: a: ", "released", key="a")
    require_refused(partial(load, {}, algo="magic"), PlanError, "one of atomic, fully_parallel")


REFUSING = {
    StrictHandling.ASSUME_OK_UNEXPECTED,  # what no rank has cannot be loaded
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
}


def ask(rank: int) -> None:
    """Body of a rank."""
    change_the_sharding(rank)
    ask_for_nothing(rank)
    ask_for_an_object_of_another_rank(rank)
    ask_for_an_object_of_another_grid(rank)
    ask_for_what_cannot_be_had(rank)


def test_each_rank_gets_what_it_asks_for_or_all_raise() -> None:
    require_on_ranks(4, ask)


def layers(num: int, tp: int, dtype: torch.dtype, **changes: Any) -> Any:
    """Stacked layers of 1e20, whose columns ``tp`` ranks divide and others replicate."""
    rank = dist.get_rank()
    data = torch.full((num, 8 // tp), 1e20).to(dtype)
    return ShardedTensor.from_rank_offsets(
        "layers", data, (1, rank % tp, tp), replica_id=rank // tp, **changes
    )


def other(key: str, shape: tuple[int, ...] = (3,)) -> Any:
    return ShardedTensor.from_rank_offsets(key, torch.ones(shape), replica_id=dist.get_rank())


def held(name: str) -> Any:
    return ShardedObject(name, {"is": name}, (1,), (0,), replica_id=dist.get_rank())


def requests() -> dict[str, Callable[[], dict[str, Any]]]:
    """State dicts to load, each made anew, by what is special about them."""
    size = dist.get_world_size()

    def cast(dtype: torch.dtype, tp: int) -> dict[str, Any]:
        return {"layers": layers(4, tp, dtype)}

    def of_another_shape() -> dict[str, Any]:
        found = other("b")
        found.data = torch.zeros(2)
        return {"layers": layers(4, 1, torch.bool), "b": found}

    def of_one_rank() -> dict[str, Any]:
        new = ShardedTensor.from_rank_offsets("new", torch.ones(3))
        return {"b": other("b")} | ({"new": new} if dist.get_rank() == 1 else {})

    tps = (1, 2, 4)[: size.bit_length()]
    return {
        f"{d} tp{tp}": partial(cast, d, tp) for tp, d in zip(cycle(tps), CAST_TO, strict=False)
    } | {
        "fewer layers": lambda: {"b": other("b"), "layers": layers(2, 1, torch.float32)},
        "more layers": lambda: {"b": other("b"), "layers": layers(5, size, torch.float32)},
        "other dims": lambda: {"b": other("b", (3, 1))},
        "padded": lambda: {"layers": layers(6, 1, torch.float32, allow_shape_mismatch=True)},
        "a key that is not stored": lambda: {"b": other("b"), "c": other("c")},
        "a key that one rank alone requests": of_one_rank,
        "an object that is not stored": lambda: {"b": other("b"), "o": held("o")},
        "keys that are not requested": lambda: {"b": other("b")},
        "shared memory": lambda: {"b": replace(other("b"), data=torch.zeros(1).expand(3))},
        "data of another shape": of_another_shape,
    }


def result_of(load: Callable[..., Any], wanted: dict[str, Any]) -> Any:
    """What is loaded, or the kind of the error and what is in the tensors then."""
    found = outcome(partial(load, wanted))
    if isinstance(found, Failure):
        data = [value.data.double().tolist() for value in wanted.values() if "o" not in value.key]
        differs = re.findall("(dtype|shape) .* in the checkpoint", found.text)
        return differs * ("PlanError" in found.kinds), data
    return (described(found[0]), *found[1:]) if isinstance(found, tuple) else described(found)


def compare_with_a_global_load(rank: int, root: str) -> None:
    """The same state, saved to both tiers at TP1, is converted, warned of and refused alike."""
    directory, place = Path(root) / "iter_0000001", Path(root) / "local"
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dist_ckpt_strategies").addHandler(handler)
    kept = {"layers": layers(4, 1, torch.float32), "b": other("b"), "rng": held("rng")}
    dist_ckpt_strategies.save(kept, directory, ("safetensors", 1))
    state, _ = MCoreTensorAwareStateDict.from_state_dict(kept, "fully_parallel")
    LocalCheckpointManager(place, timeout_s=30).save(state, 1)
    stored, _ = LocalCheckpointManager(place, timeout_s=30).load()
    for (name, make), (strict, is_strict) in product(requests().items(), HOW):
        is_of_keys = name.startswith(("a key", "an object", "keys"))
        if not is_of_keys and (strict, is_strict) not in HOW[:2]:
            continue  # the keys are those that are stored
        how = {"strict": strict, "strict_dtype": is_strict}
        results = []
        for load in (
            partial(dist_ckpt_strategies.load, checkpoint_dir=directory),
            stored.load_into,
        ):
            texts.clear()
            found = result_of(partial(load, **how), make())
            results.append((found, sum("converted to the dtype" in text for text in texts)))
        if name == "data of another shape":  # which of several errors comes first is open
            results = [data for ((_, data), _) in results]
        assert results[0] == results[1], (name, strict, is_strict)


def described(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (str(value.dtype), value.double().tolist()) if torch.is_tensor(value) else value
        for key, value in state.items()
    }


CAST_TO = (torch.bool, torch.int64, torch.bfloat16, torch.float8_e5m2)
HOW = [("raise_all", True), *((strict.value, False) for strict in StrictHandling)]


def test_a_local_load_allows_and_refuses_what_a_global_load_does(tmp_path: Path) -> None:
    require_on_ranks(4, compare_with_a_global_load, str(tmp_path))


def test_a_hollow_state_shows_what_it_holds_and_gives_no_data() -> None:
    wanted = {"a": ShardedTensor.from_rank_offsets("a", torch.arange(4.0)), "iteration": 5}
    state, _ = MCoreTensorAwareStateDict.from_state_dict(wanted, "atomic")
    tensors = state.pop_tensors()
    iteration, tensor = state.values()
    assert (iteration, tensor.key, tensor.data) == (5, "a", None)
    for use in (lambda: state.state_dict, lambda: state.to_state_dict(wanted)):
        with pytest.raises(PlanError, match="hollow"):
            use()
    state.insert_tensors(tensors)

    assert set(state.state_dict) == {"a", "iteration"}
