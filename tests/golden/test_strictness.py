"""Every value of StrictHandling, with keys that only the checkpoint or only the caller has."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.validation import StrictHandling

from dist_ckpt_strategies.config import Engine
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import ArrayNotFoundError
from tests.golden.routes import Route, begin_rank, load_along, require_done
from tests.golden.sets import GoldenSet, has_same_bits, poisoned
from tests.support.ranks import run_processes

pytestmark = pytest.mark.multiprocess

MISSING = frozenset({"decoder.final_layernorm.bias", "rng_state"})
UNEXPECTED = frozenset({"decoder.new_layer.weight", "decoder.new_layer._extra_state"})


@dataclass(frozen=True)
class Asked:
    """Whether the caller lacks keys that the checkpoint has, and adds keys that it has not."""

    lacks: bool
    adds: bool

    def __str__(self) -> str:
        return f"lacks {int(self.lacks)}, adds {int(self.adds)}"


FITTING = Asked(lacks=False, adds=False)
LACKING = Asked(lacks=True, adds=False)
ADDING = Asked(lacks=False, adds=True)
BOTH = Asked(lacks=True, adds=True)


@dataclass(frozen=True)
class Outcome:
    """What one load did: its error, or which keys it loaded, returned and logged."""

    error: str = ""
    is_not_found: bool = False
    is_exact: bool = False
    missing: frozenset[str] | None = None
    unexpected: frozenset[str] | None = None
    log: str = ""


def state_dict(golden: GoldenSet, rank: int, asked: Asked) -> dict[str, Any]:
    state: dict[str, Any] = {
        key: ShardedTensor.from_rank_offsets(
            key, poisoned(whole.shape, whole.dtype), replica_id=rank
        )
        for key, whole in golden.tensors.items()
        if not (asked.lacks and key in MISSING)
    }
    for unique_key in golden.objects:
        name = ObjectId.parse(unique_key)
        assert name is not None
        if not (asked.lacks and name.key in MISSING):
            state[unique_key] = ShardedObject(name.key, None, name.shape, name.offset, rank)
    if asked.adds:
        tensor_key, object_key = sorted(UNEXPECTED, key=lambda key: "_extra" in key)
        state[tensor_key] = ShardedTensor.from_rank_offsets(
            tensor_key, torch.zeros(3), replica_id=rank
        )
        state[object_key] = ShardedObject(object_key, None, (1,), (0,), rank)
    return state


class Recorder(logging.Handler):
    """Keeps the warnings of Megatron-Core's validation."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def load_strictly(golden: GoldenSet, state: Any, route: Route, **options: Any) -> Outcome:
    logger = logging.getLogger("megatron.core.dist_checkpointing.validation")
    recorder = Recorder()
    logger.addHandler(recorder)
    wanted = {key for key in state if key in golden.tensors}
    try:
        result = load_along(route, {"s": state}, golden.checkpoint, **options)
    except CheckpointingException as error:
        return Outcome(str(error), is_not_found=isinstance(error, ArrayNotFoundError))
    finally:
        logger.removeHandler(recorder)
    loaded, *keys = result if isinstance(result, tuple) else (result,)
    tensors = {k: v for k, v in loaded["s"].items() if isinstance(v, torch.Tensor)}
    is_exact = tensors.keys() == wanted and all(
        has_same_bits(tensor, golden.tensors[key]) for key, tensor in tensors.items()
    )
    missing, unexpected = map(frozenset, keys) if keys else (None, None)
    return Outcome(is_exact=is_exact, missing=missing, unexpected=unexpected, log=recorder.text)


def load_with_every_strictness(
    rank: int, golden: GoldenSet, asked: Asked
) -> dict[tuple[Route, StrictHandling, bool], Outcome]:
    begin_rank(Engine.TENSORSTORE)
    return {
        (route, strict, validates): load_strictly(
            golden,
            state_dict(golden, rank, asked),
            route,
            strict=strict,
            validate_access_integrity=validates,
        )
        for route in Route
        for strict in StrictHandling
        # The wrapper does not see it.
        for validates in ((True, False) if route in (Route.MEGATRON, Route.OURS) else (True,))
    }


def every_outcome(golden: GoldenSet, asked: Asked) -> list[tuple[StrictHandling, Outcome]]:
    """What each strictness did on every rank, along every route, with and without validation."""
    results = run_processes(2, load_with_every_strictness, golden, asked)
    return [
        (strict, outcome)
        for result in require_done(results)
        for (_, strict, _), outcome in result.items()
    ]


def test_a_state_dict_that_fits_loads_whatever_the_strictness(reshardable: GoldenSet) -> None:
    for strict, outcome in every_outcome(reshardable, FITTING):
        assert outcome.is_exact, (strict, outcome)
        assert outcome.log == ""
        assert not outcome.missing
        assert not outcome.unexpected


def test_keys_that_only_the_checkpoint_has_matter_to_the_all_values(reshardable: GoldenSet) -> None:
    for strict, outcome in every_outcome(reshardable, LACKING):
        if strict is StrictHandling.RAISE_ALL:
            assert "Missing keys" in outcome.error
            assert all(key in outcome.error for key in MISSING)
            assert "Unexpected keys" not in outcome.error
            continue
        assert outcome.is_exact, (strict, outcome)
        logged = strict is StrictHandling.LOG_ALL
        assert all(key in outcome.log for key in MISSING) if logged else outcome.log == ""
        if strict is StrictHandling.RETURN_ALL:
            assert outcome.missing == MISSING
        if strict is StrictHandling.RETURN_UNEXPECTED:
            assert outcome.missing == frozenset()
        assert not outcome.unexpected


@pytest.mark.parametrize("asked", [ADDING, BOTH], ids=str)
def test_keys_that_only_the_caller_has_are_refused_dropped_logged_or_returned(
    reshardable: GoldenSet, asked: Asked
) -> None:
    missing = MISSING if asked.lacks else frozenset[str]()
    for strict, outcome in every_outcome(reshardable, asked):
        is_all = strict.value.endswith("_all")
        if strict is StrictHandling.ASSUME_OK_UNEXPECTED:
            assert outcome.is_not_found, outcome
            assert "decoder.new_layer" in outcome.error
        elif strict in (StrictHandling.RAISE_ALL, StrictHandling.RAISE_UNEXPECTED):
            assert "Unexpected keys" in outcome.error
            named = UNEXPECTED | (missing if is_all else frozenset())
            assert all(key in outcome.error for key in named)
            assert ("Missing keys" in outcome.error) == (is_all and asked.lacks)
        else:
            assert outcome.is_exact, (strict, outcome)
        if strict in (StrictHandling.LOG_ALL, StrictHandling.LOG_UNEXPECTED):
            assert all(key in outcome.log for key in UNEXPECTED)
            assert ("Missing keys" in outcome.log) == (is_all and asked.lacks)
        if strict in (StrictHandling.RETURN_ALL, StrictHandling.RETURN_UNEXPECTED):
            assert outcome.unexpected == UNEXPECTED
            assert outcome.missing == (missing if is_all else frozenset())
