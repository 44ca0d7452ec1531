"""``to_state_dict`` with every ``strict``: what is loaded, told and logged, and what is raised."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.local import MCoreTensorAwareStateDict
from tests.support.entries import Failure, outcome
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 3
ALGORITHMS = ("atomic", "fully_parallel")
MISSING = {"extra", "deep.extra o"}
UNEXPECTED = {"new", "deep.new o"}
LOGGING = {StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL}
TELLING_UNEXPECTED = LOGGING | {StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL}
TELLING_MISSING = {StrictHandling.LOG_ALL, StrictHandling.RETURN_ALL}
REFUSING_UNEXPECTED = {
    StrictHandling.ASSUME_OK_UNEXPECTED,  # what nobody has cannot be had
    StrictHandling.RAISE_UNEXPECTED,
    StrictHandling.RAISE_ALL,
}


@dataclass(frozen=True)
class Case:
    """One call of ``to_state_dict``.

    Attributes:
        is_less: some of what is stored is not wanted, on any rank.
        asking: the ranks that want what nobody stored.
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
    Case(*facts)
    for facts in product(ALGORITHMS, StrictHandling, (True, False), (True, False), ASKING)
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


def require_told(rank: int, case: Case, result: Any) -> None:
    """What is there is loaded, and the rest is told."""
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
    """Whoever asked, the rank raises an error that names what was wrong."""
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
                require_told(rank, case, result)
