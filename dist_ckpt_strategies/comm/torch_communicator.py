"""A Communicator over a process group of torch.distributed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from dist_ckpt_strategies.comm.abortable_waits import raise_if_aborted
from dist_ckpt_strategies.comm.base import (
    Buffer,
    Communicator,
    Exchange,
    Message,
    Receive,
    Send,
    SoloCommunicator,
    out_of_step,
    who_is_where,
)
from dist_ckpt_strategies.comm.missing_ranks import MissingRankTracker, described
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    abort_nccl,
    is_distributed,
    message_device,
)
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    as_checkpoint_error,
    error_from_peer,
)

_DEVICE_PAUSE_S = 0.0002

_TAG_OF_NOTHING = 1 << 30
"""Of a message that no rank sends; others have the tag 0."""

_SIZE_BITS = 41
"""Of the number that leads a message: its size. The bits above say what for."""

_PURPOSE_BITS = 63 - _SIZE_BITS
_PURPOSE_NBYTES = 160
"""Of the text that ranks exchange where their purposes differ."""


def open_communicator(
    group: ProcessGroup | None,
    *,
    timeout_s: float,
    purpose: str,
    detail: str = "",
    channels: Sequence[ProcessGroup] = (),
    payload_device: torch.device | None = None,
) -> Communicator:
    """A communicator over ``group``, by default over the world; over one rank without torch's.

    Makes no process group and no connection. Where torch.distributed is not initialised, the
    group is this process alone.

    Args:
        group: ranks that take part; every one of them opens and uses its communicator alike.
        timeout_s: longest wait for a peer in each call.
        purpose: what the ranks do together, such as ``save``: equal on all ranks, or they raise.
        detail: of what, for messages: ``to /ckpt/iter_10``; each rank may see it in its own way.
        channels: groups of the same ranks that ``exchange`` spreads its messages over; by default
            the group itself.
        payload_device: where ``exchange`` takes tensors as they are, if the group's backend can
            send from there; by default the host, or where the group has NCCL alone, the GPU.
    """
    if not is_distributed():
        return SoloCommunicator()
    if group is None:
        group = dist.group.WORLD
    assert group is not None  # noqa: S101 - torch.distributed is initialised
    if dist.get_world_size(group) == 1:
        return SoloCommunicator(dist.get_rank())
    return TorchCommunicator(
        group,
        timeout_s=timeout_s,
        purpose=purpose,
        detail=detail,
        channels=channels,
        payload_device=payload_device,
    )


class TorchCommunicator:
    """A Communicator over an existing process group of two or more ranks.

    Works over gloo on the CPU and, where the group has no CPU backend, over NCCL through device
    buffers.
    """

    def __init__(
        self,
        group: ProcessGroup,
        *,
        timeout_s: float,
        purpose: str,
        detail: str = "",
        channels: Sequence[ProcessGroup] = (),
        payload_device: torch.device | None = None,
    ) -> None:
        self._group = group
        self._channels = tuple(channels) or (group,)
        self._has_own_channels = bool(channels)
        self._timeout_s = timeout_s
        self._message_device = message_device(group)
        self.device = payload_device or self._message_device
        self._unconnected = [
            channel
            for channel in self._channels
            if self.device.type != "cpu" and (channel, self.device) != (group, self._message_device)
        ]
        self._global_ranks = dist.get_process_group_ranks(group)
        self._tracker = MissingRankTracker(
            group, self._global_ranks, f"{purpose} {detail}".rstrip(), timeout_s
        )
        # Not 0, which other collectives of the job begin with.
        digest = xxhash.xxh3_64_intdigest(purpose.encode())
        self._purpose_number = digest % ((1 << _PURPOSE_BITS) - 1) + 1
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def global_rank(self, rank: int) -> int:
        """See Communicator."""
        return self._global_ranks[rank]

    def all_gather(self, item: Message) -> list[Message]:
        """See Communicator."""
        content, failure = _encoded(item)
        size = len(content) if failure is None else -len(content)
        sizes = self._gathered_sizes(size)
        longest = max(map(abs, sizes))
        if longest == 0:
            return [None] * self.size
        texts = self._gathered_bytes(content, longest)
        messages = [
            self._message(rank, text[: abs(size)])
            for rank, (text, size) in enumerate(zip(texts, sizes, strict=True))
        ]
        if failure is not None:
            raise failure.at_rank(self.global_rank(self.rank))
        for rank, (message, size) in enumerate(zip(messages, sizes, strict=True)):
            if size < 0:
                raise error_from_peer(self.global_rank(rank), "CheckpointError", str(message))
        return messages

    def _gathered_sizes(self, size: int) -> list[int]:
        """Each rank's size; raises unless all have the same purpose.

        One number for both: another collective of the job most likely sends a number too.
        """
        packed = self._purpose_number << _SIZE_BITS | abs(size)
        mine = torch.tensor([packed if size >= 0 else -packed], dtype=torch.int64, device="cpu")
        numbers = [int(number) for number in self._gathered(mine)]
        purposes = [abs(number) >> _SIZE_BITS for number in numbers]
        for rank, purpose in enumerate(purposes):
            if purpose == 0:
                raise out_of_step(self.global_rank(rank), self._tracker.what)
        if len(set(purposes)) > 1:
            raise self._other_purpose(purposes)
        sizes = [abs(number) & (1 << _SIZE_BITS) - 1 for number in numbers]
        return [-s if number < 0 else s for s, number in zip(sizes, numbers, strict=True)]

    def _other_purpose(self, purposes: Sequence[int]) -> PlanError:
        """The error for ranks that call for different purposes. Collective: all of them see it."""
        mine = self._tracker.what.encode()[:_PURPOSE_NBYTES]
        padded = self._gathered_bytes(mine, _PURPOSE_NBYTES)
        texts = [text.rstrip(b"\0").decode(errors="replace") for text in padded]
        return PlanError(
            "expected the same call on all ranks, in the same order, found "
            f"{who_is_where(self, purposes, texts)}; if one of them has raised an error before, "
            "see that first"
        )

    def _message(self, rank: int, content: bytes) -> Message:
        """A rank's message; it may come from another collective of the job."""
        try:
            return json.loads(content) if content else None
        except ValueError as error:
            raise out_of_step(self.global_rank(rank), self._tracker.what) from error

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See Communicator."""
        self.begin_exchange(sends, receives).wait()

    def begin_exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Exchange:
        """See Communicator. Not counted as a collective: ranks may take part in different ones."""
        staged = [self._tensor_of(receive.into, self.device) for receive in receives]
        turns = _Turns(self._channels), _Turns(self._channels)
        operations: list[dist.P2POp] = []
        for receive, tensor in zip(receives, staged, strict=True):
            peer = self._global_ranks[receive.from_rank]
            operations.append(dist.P2POp(dist.irecv, tensor, peer, turns[0].next(peer)))
        for send in sends:
            peer = self._global_ranks[send.to_rank]
            tensor = self._tensor_of(send.data, self.device)
            operations.append(dist.P2POp(dist.isend, tensor, peer, turns[1].next(peer)))
        with self._peer_errors(time.monotonic() + self._timeout_s):
            works = self._started(operations)
        return _Arriving(self, tuple(works), tuple(zip(receives, staged, strict=True)))

    def _started(self, operations: list[dist.P2POp]) -> list[tuple[int | None, dist.Work | None]]:
        """The works of the operations, each with the rank at its other end where that is known.

        NCCL takes those of a group as a batch: one after the other, two ranks that both receive
        first would wait for each other for ever.
        """
        if self.device.type != "cpu":
            batches: dict[Any, list[dist.P2POp]] = {}
            for operation in operations:
                batches.setdefault(operation.group, []).append(operation)
            works = (dist.batch_isend_irecv(batch) for batch in batches.values())
            return [(None, work) for some in works for work in some]
        return [(o.peer, o.op(o.tensor, o.peer, group=o.group)) for o in operations]

    def finish(
        self, works: Sequence[tuple[int | None, dist.Work | None]], device: torch.device
    ) -> None:
        """Wait for what was started, each with the global rank at its other end if it has one.

        Raises:
            PeerTimeoutError: it takes longer than this communicator waits.
            PeerLostError: contact broke off.
        """
        deadline = time.monotonic() + self._timeout_s
        for peer, work in works:
            if work is not None:
                self._wait(work, deadline, peer, device)

    @contextmanager
    def _peer_errors(self, deadline: float, peer: int | None = None) -> Iterator[None]:
        """Raise errors of torch's as ours; no later call is to take the bytes of this one.

        Gloo breaks off all connections of a group that has waited in vain, but of no other: the
        channels beside it would carry the next call's bytes, to peers that still are in
        this one. NCCL breaks off nothing: its group is aborted.
        """
        try:
            yield
        except (PeerError, RuntimeError) as error:
            found = (
                None if isinstance(error, PeerError) else self._peer_error(error, deadline, peer)
            )
            try:
                if self.device.type != "cpu":
                    with suppress(RuntimeError, ValueError):  # it may have been aborted before
                        abort_nccl({self._group, *self._channels})
                if self._has_own_channels and self._message_device.type == "cpu":
                    for channel in self._channels:
                        self._break_off(channel)
                if found is None:
                    raise
                raise found from error
            finally:
                del found  # or the error would hold this frame, and the group, in a cycle

    def _break_off(self, channel: ProcessGroup) -> None:
        """Wait in vain, for something that no rank sends."""
        peer = self._global_ranks[self.rank - 1]
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        # It is what this is for; and the group may be broken off, or destroyed, already.
        with suppress(RuntimeError, ValueError):
            work: Any = dist.irecv(nothing, peer, group=channel, tag=_TAG_OF_NOTHING)
            work.wait(timedelta(milliseconds=1))

    def _gathered_bytes(self, content: bytes, nbytes: int) -> list[bytes]:
        """Every rank's bytes, with zeros behind them up to ``nbytes``."""
        padded = bytearray(content.ljust(nbytes, b"\0"))
        mine = torch.frombuffer(padded, dtype=torch.uint8)
        return [found.numpy().tobytes() for found in self._gathered(mine)]

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._tracker.reach()
        deadline = time.monotonic() + self._timeout_s
        self._connect(deadline)
        mine = tensor.to(self._message_device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self._peer_errors(deadline):
            work = dist.all_gather(found, mine, group=self._group, async_op=True)
        self._wait(work, deadline, None, self._message_device)
        with self._peer_errors(deadline):
            self._tracker.require_awaited()
        return [t.cpu() for t in found]

    def _connect(self, deadline: float) -> None:
        """Have NCCL connect all ranks of each channel: an exchange may be one of few of them."""
        while self._unconnected:
            nothing = torch.zeros(1, device=self.device)
            with self._peer_errors(deadline):
                work: Any = dist.all_reduce(nothing, group=self._unconnected.pop(), async_op=True)
            self._wait(work, deadline, None, self.device)

    @staticmethod
    def _tensor_of(data: Buffer, device: torch.device) -> torch.Tensor:
        return (torch.from_numpy(data) if isinstance(data, np.ndarray) else data).to(device)

    def _wait(
        self, work: dist.Work, deadline: float, peer: int | None, device: torch.device
    ) -> None:
        with self._peer_errors(deadline, peer):
            if device.type != "cpu":
                _wait_for_device(work, deadline)
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            raise_if_aborted()

    def _peer_error(self, error: Exception, deadline: float, peer: int | None) -> PeerError:
        """The error for a collective that timed out or broke off, with the ranks to blame."""
        what = self._tracker.what
        is_lost = time.monotonic() < deadline - 0.001
        missing = [peer] if peer is not None else self._tracker.missing(is_lost=is_lost)
        if not is_lost:
            return PeerTimeoutError(
                missing[0] if missing else None,
                f"{described(missing)} did not arrive within {self._timeout_s:g} s: {what}",
            )
        return PeerLostError(
            missing[0] if missing and len(missing) == 1 else None,
            f"lost contact with {described(missing)}: {what}: {error}",
        )


def _encoded(item: Message) -> tuple[bytes, CheckpointError | None]:
    """The item as bytes; or its error as bytes, and the error to raise once it is sent."""
    if item is None:
        return b"", None
    try:
        return json.dumps(item, separators=(",", ":")).encode(), None
    except (TypeError, ValueError, MemoryError, RecursionError) as error:
        failure = as_checkpoint_error(error)
        return json.dumps(failure.message).encode(), failure


@dataclass(frozen=True, slots=True)
class _Arriving:
    """Works of one exchange, and the tensors that are received in place of host memory.

    Attributes:
        comm: whose exchange it is.
        works: what travels over process groups, with the rank at the other end.
        received: where that lands, and where it belongs.
    """

    comm: TorchCommunicator
    works: tuple[tuple[int | None, dist.Work | None], ...]
    received: tuple[tuple[Receive, torch.Tensor], ...]

    def wait(self) -> None:
        """See Exchange."""
        self.comm.finish(self.works, self.comm.device)
        for receive, tensor in self.received:
            if isinstance(receive.into, np.ndarray) and tensor.device.type != "cpu":
                torch.from_numpy(receive.into).copy_(tensor)


def _wait_for_device(work: dist.Work, deadline: float) -> None:
    """Return when the device is done. Its own ``wait`` holds up a stream, not the caller.

    Raises:
        RuntimeError: the deadline has passed.
    """
    while not work.is_completed():
        if time.monotonic() >= deadline:
            raise RuntimeError("the device is not done in time")
        time.sleep(_DEVICE_PAUSE_S)


class _Turns:
    """Which channel the next message to or from a peer takes: the same on both sides."""

    def __init__(self, channels: Sequence[ProcessGroup]) -> None:
        self._channels = channels
        self._count: Counter[int] = Counter()

    def next(self, peer: int) -> ProcessGroup:
        """The channels take turns, separately for each peer."""
        channel = self._channels[self._count[peer] % len(self._channels)]
        self._count[peer] += 1
        return channel
