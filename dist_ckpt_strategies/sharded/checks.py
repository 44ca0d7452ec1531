"""What is to be saved or loaded, checked among the ranks before anything is written or read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xxhash import xxh3_64_hexdigest

from dist_ckpt_strategies.comm.base import (
    Communicator,
    Message,
    run_and_gather,
    run_collectively,
    who_is_where,
)
from dist_ckpt_strategies.comm.process_group import is_distributed
from dist_ckpt_strategies.core.array import ObjectId, RankShards
from dist_ckpt_strategies.core.chunk_grids import ChunkLayout
from dist_ckpt_strategies.errors import CoverageError, PlanError
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    StrictOutcome,
    apply_strictness,
    is_main_message,
    message_of,
    needs_stored_keys,
    object_from_message,
    require_equal_common,
    shard_from_message,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import StrictHandling
from dist_ckpt_strategies.sharded.plan import build_save_plan


class _Validated:
    """The digest of the sharding that this rank has last seen validated; see ``digest_of``."""

    last: str = ""


VALIDATED = _Validated()
"""Of this process: a load of the sharding that was validated last is not validated again."""


def different_strategies(comm: Communicator, what: str, kinds: Sequence[str]) -> PlanError:
    """The error for ranks that do the same by strategies of different kinds."""
    texts = [f"{what} by {kind}" for kind in kinds]
    return PlanError(f"expected one strategy, found {who_is_where(comm, kinds, texts)}")


def require_validated(comm: Communicator, messages: list[Any], group: str) -> None:
    """Check the sharding of all ranks, of which ``group`` is the digest. Collective.

    Raises:
        PlanError: the main replicas of a key do not fit together.
    """
    everyone = comm.all_gather(messages)
    run_collectively(comm, lambda: require_valid(everyone))
    VALIDATED.last = group


def check_save(comm: Communicator, state: StateDict, common: StateDict) -> None:
    """Check the sharding, and that all ranks hold the same common state.

    Collective.

    Raises:
        PlanError: the main replicas of a key do not fit together.
    """
    answers = run_and_gather(
        comm,
        lambda: [_messages(state), xxh3_64_hexdigest(dump_object(common, name="common state"))],
    )

    def check() -> None:
        # Megatron-Core's own comparison is a broadcast: it comes first, where no rank can have
        # failed alone.
        if any(digest != answers[0][1] for _, digest in answers) and is_distributed():
            require_equal_common(common)
        require_valid([messages for messages, _ in answers])

    run_collectively(comm, check)


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
    needs_all = validate or bool(StrictHandling.requires_global_app_metadata(strict))
    stored: list[StateDict] = []

    def describe() -> Message:
        if needs_stored_keys(strict):
            stored.append(stored_keys())
        return _messages(state) if needs_all else None

    answers = run_and_gather(comm, describe, is_sparse=not needs_all)

    def check() -> StrictOutcome:
        if validate:
            require_valid(answers)
        everyone = _values(answers) if needs_all else None
        local = None if everyone is None else everyone[comm.rank]
        return apply_strictness(state, strict, local, everyone, stored[0] if stored else None)

    return run_collectively(comm, check)


def _messages(state: StateDict) -> list[Any]:
    return list(map(message_of, sharded_values(state)))


def _values(answers: Iterable[Any]) -> list[list[Any]]:
    return [list(map(value_from_message, messages)) for messages in answers]


def require_valid(everyone: Sequence[Sequence[Any]]) -> None:
    """Raise PlanError unless the main replicas make up every array and object, as for a save.

    ``everyone`` has the messages of all ranks. A lone process may ask for a part.
    """
    if not is_distributed():
        return
    requests, objects = requests_of(everyone, range(len(everyone)))
    build_save_plan(requests, objects, chunk_layout=ChunkLayout.INNER)


def requests_of(
    everyone: Sequence[Sequence[Any]], ranks: Sequence[int]
) -> tuple[list[RankShards], list[tuple[ObjectId, int]]]:
    """What ``build_save_plan`` takes, from the messages of all ranks.

    Raises:
        CoverageError: no rank holds a main replica of an object.
    """
    requests, objects, known = [], [], set()
    for rank, messages in zip(ranks, everyone, strict=True):
        shards = []
        for message in messages:
            shard = shard_from_message(message)
            if shard is not None:
                shards.append(shard)
                continue
            name = object_from_message(message)
            known.add(name.key)
            if is_main_message(message):
                objects.append((name, rank))
        requests.append(RankShards(rank, tuple(shards)))
    if missing := sorted(known.difference(found.key for found, _ in objects)):
        key = missing[0]
        raise CoverageError(f"{key}: no rank holds a main replica of the object", key=key)
    return requests, objects
