"""``to_state_dict`` with every ``strict``: what is loaded, told and logged, and what is raised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.local import MCoreTensorAwareStateDict
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 3
ALL = range(NUM_RANKS)
ALGORITHMS = ("atomic", "fully_parallel")
MISSING = {"extra", "deep.extra o"}
UNEXPECTED = {"new", "deep.new o"}


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


def cases() -> Iterator[Case]:
    asking = (range(0), ALL, range(1, 2))
    for facts in product(ALGORITHMS, StrictHandling, (True, False), (True, False), asking):
        yield Case(*facts)


def stored() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "same": ShardedTensor.from_rank_offsets("same", torch.arange(2.0), replica_id=rank),
        "rows": ShardedTensor.from_rank_offsets(
            "rows", torch.full((2,), float(rank)), (0, rank, NUM_RANKS)
        ),
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


def outcome(case: Case, state: MCoreTensorAwareStateDict) -> Any:
    """What a call comes to: its result and what it logged; or how it raised."""
    listener = Listener()
    logging.getLogger().addHandler(listener)
    try:
        found, missing, unexpected = state.to_state_dict(
            wanted(case),
            algo=case.algo,
            validate_access_integrity=case.is_validated,
            strict=case.strict if case.is_less else case.strict.value,
            return_mismatch_keys=True,
        )
    except CheckpointError as error:
        return ["raised", isinstance(error, CheckpointingException), str(error)]
    finally:
        logging.getLogger().removeHandler(listener)
    values = {key: value.tolist() for key, value in found.items() if key != "deep"}
    return [values | found["deep"], missing, unexpected, listener.text]


def run_cases(rank: int) -> dict[Case, Any]:
    states = {
        algo: MCoreTensorAwareStateDict.from_state_dict(stored(), algo)[0] for algo in ALGORITHMS
    }
    return {case: outcome(case, states[case.algo]) for case in cases()}


def content(rank: int, case: Case) -> dict[str, Any]:
    """What is loaded where nothing is raised."""
    full = {"same": [0, 1], "rows": [rank] * 2, "o": {rank, 7}}
    return full if case.is_less else full | {"extra": [1] * 3, "extra o": [1]}


def is_refused(case: Case) -> bool:
    """What the documentation of StrictHandling says, and that what nobody has cannot be had."""
    refusing = {StrictHandling.ASSUME_OK_UNEXPECTED, StrictHandling.RAISE_UNEXPECTED}
    if case.asking and case.strict in refusing | {StrictHandling.RAISE_ALL}:
        return True
    return case.is_less and case.strict is StrictHandling.RAISE_ALL


TELLS_UNEXPECTED = {
    StrictHandling.LOG_UNEXPECTED,
    StrictHandling.LOG_ALL,
    StrictHandling.RETURN_UNEXPECTED,
    StrictHandling.RETURN_ALL,
}
TELLS_MISSING = {StrictHandling.LOG_ALL, StrictHandling.RETURN_ALL}
LOGS = {StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL}


def require_told(rank: int, case: Case, result: Any) -> None:
    """What is there is loaded, and the rest is told."""
    missing = MISSING if case.is_less and case.strict in TELLS_MISSING else set()
    asked = UNEXPECTED if rank in case.asking else set()
    unexpected = asked if case.strict in TELLS_UNEXPECTED else set()
    found, *keys, text = result
    assert found == content(rank, case), (rank, case)
    assert keys == [missing, unexpected], (rank, case)
    logged = missing | unexpected if case.strict in LOGS else set()
    assert {key for key in MISSING | UNEXPECTED if key in text} == logged, (rank, case)


def require_refused(case: Case, result: Any) -> None:
    """Whoever asked, the rank raises an error that names what was wrong."""
    raised, is_megatrons, text = result
    assert (raised, is_megatrons) == ("raised", True), case
    named = {key for key in MISSING | UNEXPECTED if key in text}
    assert named, (case, text)
    assert bool(case.asking) or not named & UNEXPECTED, (case, text)


def test_every_strictness_loads_what_is_there_and_tells_the_rest_or_raises_on_every_rank() -> None:
    for rank, results in enumerate(run_processes(NUM_RANKS, run_cases)):
        for case, result in results.items():
            if is_refused(case):
                require_refused(case, result)
            else:
                require_told(rank, case, result)
