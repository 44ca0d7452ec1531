"""What is to be saved or loaded, checked among the ranks before anything is written or read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.process_group import is_distributed
from dist_ckpt_strategies.core.array import RankShards
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.megatron.bases import ShardedObject, ShardedTensor, StrictHandling
from dist_ckpt_strategies.megatron.flow import (
    SaveParts,
    StrictOutcome,
    apply_strictness,
    needs_global_keys,
    needs_stored_keys,
    require_equal_common,
    require_valid_sharding,
)
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    is_main,
    metadata_from_wire,
    metadata_to_wire,
    object_id,
    shard_spec,
    sharded_values,
)
from dist_ckpt_strategies.sharded.plan_save import ObjectHolding, build_save_plan

Preprocess = Callable[[StateDict], StateDict]


def check_save(comm: Communicator, parts: SaveParts, preprocess: Preprocess | None) -> None:
    """Check the sharding, and that all ranks hold the same common state.

    Collective.

    Raises:
        PlanError: the main replicas of a key do not fit together.
    """
    common_state = agree(comm, lambda: preprocess(parts.common) if preprocess else parts.common)

    def describe() -> list[Any]:
        content = dump_object(common_state, name="common state")
        return [_wires(parts.sharded), xxhash.xxh3_64_hexdigest(content)]

    answers = agree_and_gather(comm, describe)

    def check() -> None:
        # Bytes that differ may still be equal values: Megatron-Core's own comparison decides, which
        # broadcasts rank 0's state: it comes first, where no rank can have failed alone.
        if any(digest != answers[0][1] for _, digest in answers) and is_distributed():
            require_equal_common(common_state)
        _require_valid([list(map(metadata_from_wire, wires)) for wires, _ in answers])

    agree(comm, check)


def check_load(
    comm: Communicator,
    state: StateDict,
    strict: StrictHandling,
    stored_keys: Callable[[], StateDict],
    validate: bool,  # noqa: FBT001
) -> StrictOutcome:
    """Compare what is wanted with what is stored, and what all ranks want among each other.

    Collective.

    Raises:
        PlanError: the main replicas of a key do not fit together, or ``strict`` forbids a key that
            only one side has.
    """
    stored = agree(comm, lambda: stored_keys() if needs_stored_keys(strict) else None)
    if not (validate or needs_global_keys(strict)):
        return agree(comm, lambda: apply_strictness(state, strict, None, None, stored))
    answers = agree_and_gather(comm, lambda: _wires(state))

    def parse() -> list[list[Any]]:
        everyone = [list(map(metadata_from_wire, wires)) for wires in answers]
        if validate:
            _require_valid(everyone)
        return everyone

    everyone = agree(comm, parse)
    local = everyone[comm.rank]
    return agree(comm, lambda: apply_strictness(state, strict, local, everyone, stored))


def _wires(state: StateDict) -> list[Any]:
    return [metadata_to_wire(value) for value in sharded_values(state)]


def _require_valid(everyone: list[list[Any]]) -> None:
    """Megatron-Core's check, which asks torch.distributed who it is: a lone process goes without.

    What is saved is checked again by the plan. Where that finds fault with a key too, it says
    better what is wrong, and on which ranks.
    """
    if not is_distributed():
        return
    try:
        require_valid_sharding(everyone)
    except PlanError as error:
        _require_plan(everyone, error.key)
        raise


def _require_plan(everyone: list[list[Any]], key: str | None) -> None:
    """Raise PlanError where the plan of a save refuses what the ranks hold of a key."""
    of_key = [[value for value in values if value.key == key] for values in everyone]
    requests = [
        RankShards(rank, tuple(shard_spec(v) for v in values if isinstance(v, ShardedTensor)))
        for rank, values in enumerate(of_key)
    ]
    objects = [
        ObjectHolding(object_id(value), rank)
        for rank, values in enumerate(of_key)
        for value in values
        if isinstance(value, ShardedObject) and is_main(value)
    ]
    build_save_plan(requests, objects)
