"""Sharded state dicts through local checkpoints, at the same layout and at others."""

from __future__ import annotations

import argparse
import logging
import shutil
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.errors import CoverageError, PlanError
from dist_ckpt_strategies.local import (
    LazyCliqueReplicationStrategy,
    LocalCheckpointManager,
    MCoreTensorAwareStateDict,
)
from tests.support.entries import Failure, outcome
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

ROWS, COLUMNS = 24, 6
ALGORITHMS = ("atomic", "fully_parallel")


def whole(key: str, iteration: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, key)) + iteration)
    found = torch.randn(ROWS, COLUMNS, generator=generator)
    return found.bfloat16() if key == "bf" else found


def state_of(tp: int, iteration: int, *, is_filled: bool = True) -> dict[str, Any]:
    """This rank's shards where ``tp`` neighbours divide the rows, and others are replicas."""
    rank = dist.get_rank()
    part, replica = rank % tp, rank // tp
    state: dict[str, Any] = {"args": argparse.Namespace(lr=0.5), "iteration": iteration}
    for key in ("a", "b.c", "bf"):
        data = whole(key, iteration).chunk(tp)[part].contiguous()
        data = data if is_filled else torch.full_like(data, -1)
        state[key] = ShardedTensor.from_rank_offsets(key, data, (0, part, tp), replica_id=replica)
    content = {"part": part, "extra": torch.tensor([part, iteration])} if is_filled else None
    state["rng"] = ShardedObject("rng", content, (tp,), (part,), replica_id=replica)
    return state


def require_equal(found: dict[str, Any], tp: int, iteration: int, *, has_rng: bool = True) -> None:
    part = dist.get_rank() % tp
    for key in ("a", "b.c", "bf"):
        assert torch.equal(found[key], whole(key, iteration).chunk(tp)[part]), key
    if has_rng:
        assert found["rng"]["part"] == part
        assert found["rng"]["extra"].tolist() == [part, iteration]
    assert (found["args"].lr, found["iteration"]) == (0.5, iteration)


def manager_of(root: str) -> LocalCheckpointManager:
    rank, size = dist.get_rank(), dist.get_world_size()
    return LocalCheckpointManager(
        Path(root) / f"node{rank % 2}",
        repl_strategy=LazyCliqueReplicationStrategy(1, 2 if size > 1 else 1, timeout_s=30),
        timeout_s=30,
    )


def saved_and_loaded(rank: int, root: str, algo: str) -> int:
    """Save at TP2, lose a node, and load at TP2, at TP4 and at TP1."""
    before = state_of(2, 7)
    kept = before["a"].data
    state, distribution = MCoreTensorAwareStateDict.from_state_dict(before, algo)
    again, _ = MCoreTensorAwareStateDict.from_state_dict(before, algo, cached_metadata=distribution)
    assert before["a"].data is kept
    num_tensors = len(list(state.tensors))
    assert len(list(again.tensors)) == num_tensors
    manager = manager_of(root)
    manager.save(state, 7)
    if rank == 1:
        shutil.rmtree(Path(root) / "node1")
    dist.barrier()
    loaded, name = manager.load()
    assert name.startswith(f"iter_0000007_{rank}_local_")
    for tp in (2, 4, 1):
        wanted = state_of(tp, 7, is_filled=False)
        if tp != 2:
            del wanted["rng"]
        require_equal(loaded.to_state_dict(wanted, algo=algo), tp, 7, has_rng=tp == 2)
        assert torch.equal(wanted["a"].data, torch.full_like(wanted["a"].data, -1))
    return num_tensors


def with_both(rank: int, root: str) -> list[int]:
    return [saved_and_loaded(rank, f"{root}/{algo}", algo) for algo in ALGORITHMS]


def test_a_state_comes_back_in_its_own_layout_and_in_others(tmp_path: Path) -> None:
    atomic, parallel = zip(*run_processes(4, with_both, str(tmp_path)), strict=True)

    assert atomic == (3,) * 4
    assert sum(parallel) == 6
    assert max(parallel) < 3


def save(_rank: int, root: str) -> None:
    state, _ = MCoreTensorAwareStateDict.from_state_dict(state_of(2, 9), "fully_parallel")
    manager_of(root).save(state, 9)


def load(_rank: int, root: str) -> None:
    loaded, _ = manager_of(root).load()
    require_equal(loaded.to_state_dict(state_of(2, 9, is_filled=False)), 2, 9)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_another_number_of_ranks_loads_it(old: int, new: int, tmp_path: Path) -> None:
    assert run_processes(old, save, str(tmp_path)) == [None] * old
    assert run_processes(new, load, str(tmp_path)) == [None] * new


class Seeds:
    """A class that this manager allows; one of another rank is loaded too."""

    def __init__(self, number: int) -> None:
        self.number = number


def give_on_seeds(rank: int, root: str) -> int:
    """Each rank saves an object of its own, and gets that of the next."""
    manager = LocalCheckpointManager(root, timeout_s=30, allow=[Seeds])

    def seeds(place: int) -> dict[str, Any]:
        return {"seeds": ShardedObject("seeds", Seeds(rank), (4,), (place % 4,))}

    manager.save(MCoreTensorAwareStateDict.from_state_dict(seeds(rank))[0], 1)
    return int(manager.load()[0].to_state_dict(seeds(rank + 1))["seeds"].number)


def few_wishes(rank: int) -> None:
    """Megatron-LM asks for nothing before it has a model; here also one rank does."""
    state, _ = MCoreTensorAwareStateDict.from_state_dict(state_of(2, 3), "fully_parallel")
    assert state.to_state_dict(None)["iteration"] == state.to_state_dict({})["iteration"] == 3
    wanted: dict[str, Any] | None = state_of(2, 3, is_filled=False) if rank != 3 else None
    found = state.to_state_dict(wanted)
    if rank != 3:
        require_equal(found, 2, 3)
    expected = {"args", "iteration"} | ({"a", "b.c", "bf", "rng"} if rank != 3 else set())
    assert set(found) == expected


def wrong_wishes(rank: int) -> None:
    """What cannot be had is an error on every rank."""
    state, _ = MCoreTensorAwareStateDict.from_state_dict(state_of(2, 3), "atomic")
    strange = ShardedTensor.from_rank_offsets("x", torch.zeros(2), (0, rank, 4))
    wishes: list[tuple[type[Exception], str, dict[str, Any], dict[str, Any]]] = [
        (CoverageError, "x: rank 0 wants", {"x": strange}, {}),
        (PlanError, "x", {"x": strange}, {"strict": "raise_unexpected"}),
        (PlanError, "expected one of atomic, fully_parallel", {}, {"algo": "magic"}),
    ]
    for kind, text, wanted, how in wishes:
        with pytest.raises(kind, match=text):
            state.to_state_dict(wanted, **how)


def wish(rank: int, root: str) -> int:
    few_wishes(rank)
    wrong_wishes(rank)
    return give_on_seeds(rank, root)


def test_each_rank_gets_what_it_asks_for_or_all_raise(tmp_path: Path) -> None:
    assert run_processes(4, wish, str(tmp_path)) == [1, 2, 3, 0]


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


# Every ``strict``: what is loaded, reported and logged, and what is raised

NUM_RANKS = 3
MISSING = {"extra", "deep.extra o"}
UNEXPECTED = {"new", "deep.new o"}
LOGGING = {StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL}
TELLING_UNEXPECTED = LOGGING | {StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL}
TELLING_MISSING = {StrictHandling.LOG_ALL, StrictHandling.RETURN_ALL}
REFUSING_UNEXPECTED = {
    StrictHandling.ASSUME_OK_UNEXPECTED,  # what no rank has cannot be loaded
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
}


@dataclass(frozen=True)
class Case:
    """One call of ``to_state_dict``.

    Attributes:
        is_less: some of what is stored is not wanted, on any rank.
        asking: the ranks that want what no rank stored.
    """

    algo: str
    strict: StrictHandling
    is_validated: bool
    is_less: bool
    asking: range

    @property
    def is_refused(self) -> bool:
        if self.asking and self.strict in REFUSING_UNEXPECTED:
            return True
        return self.is_less and self.strict is StrictHandling.RAISE_ALL


ASKING = (range(0), range(NUM_RANKS), range(1, 2))
CASES = [
    Case(*values)
    for values in product(ALGORITHMS, StrictHandling, (True, False), (True, False), ASKING)
]


def stored() -> dict[str, Any]:
    rank = dist.get_rank()
    row = torch.full((2,), float(rank))
    return {
        "same": ShardedTensor.from_rank_offsets("same", torch.arange(2.0), replica_id=rank),
        "rows": ShardedTensor.from_rank_offsets("rows", row, (0, rank, NUM_RANKS)),
        "extra": ShardedTensor.from_rank_offsets("extra", torch.ones(3), replica_id=rank),
        "deep": {
            "o": ShardedObject("deep.o", {rank, 7}, (NUM_RANKS,), (rank,)),
            "extra o": ShardedObject("deep.extra o", [1], (1,), (0,), replica_id=rank),
        },
    }


def wanted(case: Case) -> dict[str, Any]:
    state = stored()
    if case.is_less:
        del state["extra"], state["deep"]["extra o"]
    rank = dist.get_rank()
    if rank in case.asking:
        replica = rank - case.asking.start
        new = ShardedTensor.from_rank_offsets("new", torch.zeros(3), replica_id=replica)
        state["new"] = new
        state["deep"]["new o"] = ShardedObject("deep.new o", None, (1,), (0,), replica_id=replica)
    return state


class Listener(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def result_of(case: Case, state: MCoreTensorAwareStateDict, listener: Listener) -> Any:
    """What a call loads, which keys it tells, and what it logs."""
    listener.text = ""
    found, *keys = state.to_state_dict(
        wanted(case),
        algo=case.algo,
        validate_access_integrity=case.is_validated,
        strict=case.strict if case.is_less else case.strict.value,
        return_mismatch_keys=True,
    )
    values = {key: value.tolist() for key, value in found.items() if key != "deep"}
    return values | found["deep"], keys, listener.text


def run_cases(rank: int) -> list[Any]:
    listener = Listener()
    logging.getLogger().addHandler(listener)
    states = {
        algo: MCoreTensorAwareStateDict.from_state_dict(stored(), algo)[0] for algo in ALGORITHMS
    }
    return [outcome(lambda c=case: result_of(c, states[c.algo], listener)) for case in CASES]  # type: ignore[misc]


def require_reported(rank: int, case: Case, result: Any) -> None:
    """What is there is loaded, and the rest is reported."""
    missing = MISSING if case.is_less and case.strict in TELLING_MISSING else set()
    asked = UNEXPECTED if rank in case.asking else set()
    unexpected = asked if case.strict in TELLING_UNEXPECTED else set()
    values, keys, text = result
    less = {"same": [0, 1], "rows": [rank] * 2, "o": {rank, 7}}
    full = less | {"extra": [1] * 3, "extra o": [1]}
    assert values == (less if case.is_less else full), (rank, case)
    assert keys == [missing, unexpected], (rank, case)
    logged = missing | unexpected if case.strict in LOGGING else set()
    assert {key for key in MISSING | UNEXPECTED if key in text} == logged, (rank, case)


def require_refused(case: Case, error: Any) -> None:
    """Whichever rank asked, this one raises an error that names what was wrong."""
    assert isinstance(error, Failure)
    assert error.is_ours
    assert error.is_megatrons
    named = {key for key in MISSING | UNEXPECTED if key in error.text}
    assert named, error
    assert bool(case.asking) or not named & UNEXPECTED, error


def test_every_strictness_loads_what_is_there_and_tells_the_rest_or_raises_on_every_rank() -> None:
    for rank, results in enumerate(run_processes(NUM_RANKS, run_cases)):
        for case, result in zip(CASES, results, strict=True):
            if case.is_refused:
                require_refused(case, result)
            else:
                require_reported(rank, case, result)
