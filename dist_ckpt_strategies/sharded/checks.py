"""Checks among ranks before a save writes or a load reads anything."""

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import Any

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather, run_collectively
from dist_ckpt_strategies.comm.process_group import is_distributed
from dist_ckpt_strategies.errors import some_of
from dist_ckpt_strategies.formats.objects import dump_object, leaves
from dist_ckpt_strategies.megatron.shards import (
    StateDict,
    StrictOutcome,
    apply_strictness,
    is_main_message,
    is_on_grid,
    message_of,
    object_from_message,
    shard_from_message,
    sharded_values,
    value_from_message,
)
from dist_ckpt_strategies.megatron.types import StrictHandling
from dist_ckpt_strategies.sharded.ledger import Ledger, proved, shard_table

logger = logging.getLogger(__name__)

_MAX_SHOWN, _MAX_TEXT, _MAX_ELEMENTS = 5, 80, 1000


def require_validated(comm: Communicator, messages: Sequence[Message]) -> None:
    """Raise a PlanError where the main replicas of a key do not fit together. Collective."""
    everyone = comm.all_gather(list(messages))
    run_collectively(comm, lambda: _require_valid(comm, everyone))


def check_save(comm: Communicator, state: StateDict, common: StateDict) -> None:
    """Check the sharding, and that all ranks hold the same common state. Collective.

    Raises a PlanError if the main replicas of a key do not fit together.
    """
    answers = run_and_gather(
        comm,
        lambda: [_messages(state), xxh3_64_hexdigest(dump_object(common, name="common state"))],
    )
    everyone, digests = zip(*answers, strict=True)
    if len(set(digests)) > 1:
        warn_of_differences(comm, common, digests)
    run_collectively(comm, lambda: _require_valid(comm, everyone))


def warn_of_differences(comm: Communicator, common: Any, digests: Sequence[str]) -> None:
    """Log, on the first rank, where the ranks' common states differ, and how. Collective.

    The first rank of each digest describes its state; one without a digest is not compared.
    """
    firsts = {digest: digests.index(digest) for digest in filter(None, digests)}
    shown = dict(islice(firsts.items(), _MAX_SHOWN))
    is_asked = comm.rank in shown.values()
    answers = run_and_gather(comm, lambda: _described(common) if is_asked else None)
    differing = []
    for path in dict.fromkeys(chain(*(answers[rank] for rank in shown.values()))):
        ranks: dict[str, list[str]] = defaultdict(list)
        for global_rank, digest in zip(comm.global_ranks, digests, strict=True):
            if digest in shown:
                ranks[answers[shown[digest]].get(path, "nothing")].append(str(global_rank))
        if len(ranks) > 1:
            told = ", ".join(f"{text} on rank {some_of(who)}" for text, who in ranks.items())
            differing.append(f"{path[-_MAX_TEXT:]}: {told}")
    if differing and comm.rank == 0:
        text = "common state dict differs between ranks in %d places, rank 0 saves its own: %s"
        logger.warning(text, len(differing), "; ".join(differing[:_MAX_SHOWN]))


def _described(common: Any) -> dict[str, str]:
    """Each value in a state by its path, as a text; the elements of small tensors one by one."""
    texts: dict[str, str] = {}
    for path, value in leaves(common):
        text, elements = type(value).__name__, []
        with suppress(Exception):  # whatever the value's own code raises
            if hasattr(value, "dtype") and hasattr(value, "shape"):
                text, elements = f"{value.dtype} {tuple(value.shape)}", value.reshape(-1).tolist()
            else:
                text = repr(value)
        if len(elements) > _MAX_ELEMENTS or len(text) > _MAX_TEXT:
            digest = xxh3_64_hexdigest(f"{text} {elements}".encode(errors="replace"))
            text, elements = f"{text[:_MAX_TEXT]}... with digest {digest}", []
        texts |= {path: text} | {f"{path}[{n}]": repr(one) for n, one in enumerate(elements)}
    return texts


def check_load(
    comm: Communicator,
    state: StateDict,
    strict: StrictHandling,
    stored_keys: Callable[[], StateDict],
    validate: bool,  # noqa: FBT001
) -> StrictOutcome:
    """Compare what is wanted with what is stored, and what all ranks want. Collective.

    Raises a PlanError if the main replicas of a key do not fit together, or ``strict`` forbids a
    key that only one side has.
    """
    needs_all = validate or bool(StrictHandling.requires_global_app_metadata(strict))
    stored: list[StateDict] = []

    def describe() -> Message:
        if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
            stored.append(stored_keys())
        return _messages(state) if needs_all else None

    answers = run_and_gather(comm, describe, is_sparse=not needs_all)

    def check() -> StrictOutcome:
        everyone = [[*map(value_from_message, of_rank)] for of_rank in answers if needs_all]
        if validate:
            _require_valid(comm, answers)
        local = everyone[comm.rank] if needs_all else None
        keys = stored[0] if stored else None
        return apply_strictness(state, strict, local, everyone or None, keys)

    return run_collectively(comm, check)


def _messages(state: StateDict) -> list[Any]:
    return list(map(message_of, sharded_values(state)))


def _require_valid(comm: Communicator, everyone: Sequence[Sequence[Message]]) -> None:
    """Raise a PlanError where the main replicas of all ranks do not make up an array or object.

    On the job's first rank, as Megatron-Core's own check. Like that it does nothing in a process
    alone, and passes over arrays of which no shard is said to be on a regular grid.
    """
    if not is_distributed() or comm.global_ranks[comm.rank] != 0:
        return
    on_grid = {m[0] for messages in everyone for m in messages if is_on_grid(m)}
    told: list[tuple[int, bytes, str]] = []
    copies: dict[str, bytes] = {}
    for messages in everyone:
        tables = []
        for is_main in (True, False):
            held = [m for m in messages if m[0] in on_grid and is_main_message(m) is is_main]
            specs = [(shard_from_message(m), m) for m in held]
            names = [object_from_message(m) for spec, m in specs if spec is None]
            tables.append(shard_table([spec for spec, _ in specs if spec], names))
        digest = xxh3_128_hexdigest(tables[1])
        told.append((0, tables[0], digest))
        copies[digest] = tables[1]
    proved(Ledger("", tuple(told), copies), comm.global_ranks)
