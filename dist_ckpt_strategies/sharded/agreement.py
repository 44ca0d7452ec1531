"""Whether all ranks do the same, to the same checkpoint, and whether it was replaced meanwhile."""

import time
from collections.abc import Sequence
from pathlib import Path

from dist_ckpt_strategies.comm.base import Communicator, Message, run_and_gather, who_is_where
from dist_ckpt_strategies.config import Options
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    IncompleteCheckpointError,
    PlanError,
)
from dist_ckpt_strategies.formats.index import INDEX_NAME as PACKS_INDEX
from dist_ckpt_strategies.formats.locations import holds_packs, located
from dist_ckpt_strategies.formats.pack_checkpoint import pointer_at
from dist_ckpt_strategies.storage.files import COMMON_NAME, MARKER_NAME
from dist_ckpt_strategies.storage.io_pool import OPENING, Deadline, run_within

_PAUSE_S = 0.5
_VIEW_S = 90.0
"""How long an NFS client may keep an old view of a directory, and some more."""


def require_one_strategy(comm: Communicator, what: str, answers: Sequence[Message]) -> None:
    """Raise a PlanError, on every rank, where ranks do the same by strategies of different kinds.

    An answer is a list that begins with the kind; one that is none is of a strategy's own call.
    """
    kinds = [answer[0] if isinstance(answer, list) else "another strategy" for answer in answers]
    if len(set(kinds)) > 1:
        texts = [f"{what} by {kind}" for kind in kinds]
        raise PlanError(
            f"expected one strategy, found {who_is_where(comm, kinds, texts)}; pass the same "
            "strategy, and to a load the same strict, on all ranks"
        )


def require_same_checkpoint(comm: Communicator, name: object, identities: Sequence[str]) -> None:
    """Raise CheckpointChangedError, on every rank, where ranks have opened different ones."""
    if len(set(identities)) > 1:
        texts = [f"one with {identity or 'none'}" for identity in identities]
        raise CheckpointChangedError(
            f"{name}: ranks have opened different checkpoints there, by their {PACKS_INDEX} "
            f"or, without one, the times of {MARKER_NAME} and digests of {COMMON_NAME}: "
            f"{who_is_where(comm, identities, texts)}; it was replaced meanwhile, or a node sees "
            "an old copy: load again",
            path=str(name),
        )


def has_changed(
    comm: Communicator,
    checkpoint_dir: str | Path,
    options: Options,
    before: str | None,
    failure: CheckpointError,
) -> bool:
    """Whether a load finds other packs now, which explains a failure. Collective.

    Ranks may have failed for different reasons. Returns as soon as all of them see the same save,
    or none, which a network file system may take a while for. ``before`` is the identity of the
    packs that this rank has opened; None: of none.
    """
    explained = CheckpointChangedError, CheckpointNotFoundError, IncompleteCheckpointError
    is_explained = isinstance(failure, explained)
    if not any(run_and_gather(comm, lambda: is_explained)):
        return False
    over = Deadline.after(min(_VIEW_S, options.timeout_s / 2))

    def look() -> Message:
        deadline = Deadline.after(OPENING * options.timeout_s)
        seen = run_within(deadline, checkpoint_dir, lambda: _seen(checkpoint_dir, options))
        return [seen, before, over.left_s == 0]

    while True:
        now, was, are_over = zip(*run_and_gather(comm, look), strict=True)
        if {None} in (set(now), set(was)) or any(are_over):
            return False
        if len(set(now)) == 1:
            return set(now) != set(was)
        time.sleep(_PAUSE_S)


def _seen(address: str | Path, options: Options) -> str | None:
    """The identity of the packs at a place; None where there are none."""
    root = located(address, options)
    if isinstance(root, Path) and root.is_dir():
        list(root.iterdir())  # an NFS client then asks its server
    pointer = pointer_at(root) if holds_packs(root) else None
    return None if pointer is None else pointer.digest
