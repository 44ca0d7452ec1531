"""The interface of a group of ranks, and steps with a collective error check.

A process alone is a group of one. With the check, the failure of a step on one rank is raised on
all ranks.
"""

import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from threading import Timer
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    StorageTimeoutError,
    as_checkpoint_error,
    error_from_peer,
    kind_of,
    text_of,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

Message = Any
"""A message between ranks, of JSON types only. A text may hold a pickle: peers are trusted."""

Bytes = npt.NDArray[Any]
"""A one-dimensional, contiguous array of uint8."""


Buffer = Bytes | torch.Tensor
"""Bytes on the host, or a one-dimensional tensor of uint8 on the communicator's device."""


Parcel = tuple[int, Buffer]
"""Another rank of the group, and bytes for it, or memory of exactly the size of its bytes."""


class Communicator:
    """A fixed set of ranks that call the same methods in the same order; here, one process alone.

    Every method waits at most the timeout given when the communicator was made, and raises
    PeerTimeoutError after that, PeerLostError where contact with a peer broke off. After either the
    group is out of step: nothing more may be asked of it.

    ``rank`` is this process, counted within the group; ``global_ranks`` are those of its members.
    Tensors on ``device`` travel without a copy to the host or from it. A rank logs its reports at
    ``report_level``: INFO on global rank 0 alone, as Megatron-LM prints what any rank logs at INFO.
    ``group_id`` tells process groups of this process apart, of whatever time; "": it is alone.
    """

    device = torch.device("cpu")
    group_id = title = ""  # the title says what the ranks do, for messages

    def __init__(self, global_ranks: Sequence[int] = (0,), rank: int = 0) -> None:
        self.global_ranks = tuple(global_ranks)
        self.rank = rank
        self.size = len(self.global_ranks)
        self.report_level = logging.DEBUG if self.global_ranks[rank] else logging.INFO

    def all_gather(self, item: Message, *, follows: bool = False) -> list[Message]:  # noqa: ARG002
        """Every rank's item, by rank. Collective.

        It is faster if it ``follows`` another one: then a rank that is in a collective of another
        package is not found out at once, but waited for.
        """
        return [item]

    def begin_gather(self, number: int) -> Callable[[], list[int]]:
        """Begin to gather numbers below 2**40; a function that returns all ranks'. Collective."""
        return lambda: [number]

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Carry all the bytes. Collective.

        Between any two ranks, the n-th send matches the n-th receive, and their sizes are equal.
        """
        self.begin_exchange(sends, receives)()

    def begin_exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel]
    ) -> Callable[[], None]:
        """Like ``exchange``, but return at once. Collective; one at a time may be under way.

        What is returned waits until this rank's bytes are sent, and those for it have arrived.
        Their memory belongs to the exchange until then.
        """
        for (_, data), (_, into) in zip(sends, receives, strict=True):
            np.asarray(into)[...] = np.asarray(data)
        return lambda: None

    def note_failure(self, error: BaseException) -> None:
        """Have peers that wait for this rank in vain learn by what error it left. Rank-local."""

    def peer_error(
        self,
        error: BaseException,
        deadline: float = math.inf,  # noqa: ARG002
        peer: int | None = None,
    ) -> PeerError:
        """The error for a collective that broke off, or at its deadline, with the ranks to blame.

        Rank-local. The collective may be one of another package over the same ranks.
        """
        return PeerLostError(peer, text_of(error))


def who_is_where(comm: Communicator, kinds: Sequence[Hashable], texts: Sequence[str]) -> str:
    """Which ranks are alike, in words: ``ranks [0, 1, 3] in a save; ranks [2] in a load``.

    Ranks of equal ``kinds`` are alike; the first one's text is shown.
    """
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for rank, kind in enumerate(kinds):
        alike[kind].append(rank)
    return "; ".join(
        f"ranks {[comm.global_ranks[rank] for rank in ranks]} in {texts[ranks[0]]}"
        for ranks in alike.values()
    )


def out_of_step(global_rank: int, what: str) -> PeerLostError:
    """The error for a rank that answers, but in another step than this one."""
    return PeerLostError(
        global_rank,
        f"ranks are out of step: rank {global_rank} is in another collective than this rank "
        f"({what}); one of the two raised an error earlier: look at the first error of each",
    )


# Steps with a collective error check

_NUM_FIELDS = 5
"""Of a failure: class, message, key, path, and the rank on which it happened."""

_LOG_AFTER_S = 1.0
"""After an error of its own a rank waits for its peers so long before it logs the error."""


def run_collectively(comm: Communicator, step: Callable[[], T], *, follows: bool = False) -> T:
    """Run a rank-local step, then raise on every rank if it failed on any.

    Collective: every rank of ``comm`` calls this, once per step.

    The failed rank raises its own error, led by its global rank; one that is not of this package
    becomes a CheckpointError too. The others raise a PeerError of the same class as the first
    failed rank's error, which names that rank, the key and the file. A rank logs its own error
    where it waits long for the others, or raises another one's in its place.

    With ``follows`` all ranks come from a gather of ``comm``, and the step calls no collectives of
    others: see ``all_gather``.
    """
    results: list[T] = []
    try:
        answers = run_and_gather(
            comm, lambda: results.append(step()), is_sparse=True, follows=follows
        )
        for rank, answer in enumerate(answers):
            if answer is not None:
                raise out_of_step(comm.global_ranks[rank], "this step")
        return results[0]
    finally:
        results.clear()  # or a raised error would hold the tensors


def run_and_gather(
    comm: Communicator,
    step: Callable[[], Message],
    *,
    is_sparse: bool = False,
    follows: bool = False,
) -> list[Message]:
    """Like ``run_collectively``, and return what the step returned on every rank, by rank.

    Collective. One gather serves for both; ``follows`` is as for that. With ``is_sparse``, None,
    the usual result, is sent as nothing, which takes one collective of torch's in place of two; a
    rank in another step is detected only where a step has a result.
    """
    result: Message = None
    own: CheckpointError | None = None
    try:
        try:
            result = step()
        except _failures() as error:
            own = _own_error(comm, error)
        except (KeyboardInterrupt, SystemExit) as error:  # of a signal handler
            comm.note_failure(error)
            raise
        if own is not None:
            late = _log_later(comm, own)
            key, path = (None if text is None else str(text) for text in (own.key, own.path))
            message: Message = [kind_of(own), own.message, key, path, own.global_rank]
        else:
            message = None if is_sparse and result is None else [result]
        answers = comm.all_gather(message, follows=follows)
        answers = [[None] if is_sparse and found is None else found for found in answers]
        _raise_first(comm, own, answers)
        return [gathered for (gathered,) in answers]
    except CheckpointError as error:
        if own is error:
            late.cancel()
        elif own is not None:
            error.__cause__ = own
        raise
    finally:
        del result, own  # or a raised error would hold this frame and its tensors, in a cycle


def _failures() -> tuple[type[BaseException], ...]:
    """All exceptions, with torch's CheckpointException, which is no Exception.

    Importing it takes most of a second, for which a rank that replaces another is waited for.
    """
    module = sys.modules.get("torch.distributed.checkpoint.api")
    return Exception, getattr(module, "CheckpointException", Exception)


def _own_error(comm: Communicator, error: BaseException) -> CheckpointError:
    """An error of this package; for a CheckpointException, the first failure it reports.

    Its ranks are global ones. Rank 0 is that, or this rank where there were no collectives. Peers
    that may be in a collective of another package now, and never reach this one, can find a note.
    """
    if isinstance(error, PeerTimeoutError | PeerLostError):
        raise error  # ranks are out of step: there is no collective any more
    if isinstance(error, Exception):
        own = as_checkpoint_error(error)
        if own.global_rank is None:
            comm.note_failure(own)
        return own
    raised: Any = error
    rank, (failure, _) = min(raised.failures.items(), key=lambda item: item[0])
    found = as_checkpoint_error(
        failure if isinstance(failure, Exception) else RuntimeError(text_of(failure))
    )
    if rank and found.global_rank is None:
        found.global_rank = rank
    return found


def _log_later(comm: Communicator, own: CheckpointError) -> Timer:
    """A timer that logs an error of this rank; to be cancelled where that is raised."""
    me = comm.global_ranks[comm.rank]
    if own.global_rank is None:
        own.at_rank(me)
    text = f"{type(own).__name__}: {own.message}".encode(errors="replace").decode()
    late = Timer(_LOG_AFTER_S, logger.warning, ["rank %d: %s: %s", me, comm.title, text])
    if own.global_rank == me:
        with suppress(RuntimeError):  # there may be too many threads
            late.start()
    return late


def run_and_gather_bytes(comm: Communicator, step: Callable[[], bytes]) -> list[bytes]:
    """Like ``run_and_gather``, for bytes: every rank's, by rank.

    Collective: one gather, and where ranks have different bytes another one and an exchange.
    Equal bytes are sent once to each rank that lacks them, and the list holds one object many
    times: replicas that ask for the same cost little.
    """
    held: list[bytes] = []

    def describe() -> list[Any]:
        held.append(step())
        return [len(held[0]), xxhash.xxh3_128_hexdigest(held[0])]

    described = [tuple(answer) for answer in run_and_gather(comm, describe)]
    holder: dict[tuple[int, str], int] = {}
    for rank, what in enumerate(described):
        holder.setdefault(what, rank)
    mine, content = described[comm.rank], held[0]
    if len(holder) == 1:
        return [content for _ in described]

    def prepare() -> tuple[list[Parcel], dict[tuple[int, str], Bytes]]:
        buffers = {what: np.empty(what[0], np.uint8) for what in holder if what != mine}
        if holder[mine] != comm.rank or not content:
            return [], buffers
        data = np.frombuffer(bytearray(content), np.uint8)
        return [(rank, data) for rank, what in enumerate(described) if what != mine], buffers

    sends, buffers = run_collectively(comm, prepare)
    comm.exchange(sends, [(holder[what], to) for what, to in buffers.items() if what[0]])
    found = {what: buffer.tobytes() for what, buffer in buffers.items()} | {mine: content}
    return [found[what] for what in described]


def run_on_first_rank(comm: Communicator, step: Callable[[], None]) -> None:
    """Run a step on the group's first rank alone, then raise on every rank if it failed.

    Collective.
    """
    run_collectively(comm, step if comm.rank == 0 else lambda: None)


def _raise_first(
    comm: Communicator, own: CheckpointError | None, answers: Sequence[Message]
) -> None:
    """Raise a rank's own error, else the first other rank's, if any has failed.

    Where storage was silent on any rank, every rank raises that: no rank must go on to another
    checkpoint for the damage that it has found itself.
    """
    for rank, answer in enumerate(answers):
        if not (isinstance(answer, list) and len(answer) in {1, _NUM_FIELDS}):
            raise out_of_step(comm.global_ranks[rank], "this step")
    if all(len(answer) == 1 for answer in answers):
        return
    found = []
    try:
        if own is not None:
            found.append(own)
        for answer in answers:
            if len(answer) > 1:
                kind, message, key, path, who = answer
                found.append(error_from_peer(who, kind, message, key=key, path=path))
        first = min(found, key=lambda error: not isinstance(error, StorageTimeoutError))
        raise first from (own.__cause__ if own is first else own)
    finally:
        del own, found, first
