"""Communicator over a torch.distributed process group."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.base import Bytes, Communicator, Message, Receive, Send
from dist_ckpt_strategies.comm.solo import SoloCommunicator
from dist_ckpt_strategies.errors import PeerError, PeerLostError, PeerTimeoutError

ProcessGroup = dist.ProcessGroup
"""A group of ranks, as torch.distributed makes them."""

_LOOKUP_S = 5.0
"""Longest wait for the job's key-value store, once a collective has failed."""

_LOOKUP_PAUSE_S = 0.05

_MEETINGS: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Collectives of each group so far. It belongs to the group, which takes no attributes; torch's
own sequence number does not serve, it counts messages between single ranks too."""


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> Any:
        """Block until done."""
        ...


def is_distributed() -> bool:
    """Whether torch.distributed is initialised; this process is alone where it is not."""
    return dist.is_available() and dist.is_initialized()


def new_gloo_groups(
    group: ProcessGroup, num_groups: int, *, timeout_s: float
) -> tuple[ProcessGroup, ...]:
    """Gloo groups of the same ranks as ``group``, for as many streams side by side.

    Collective over the world: every rank calls this, with the group that it is in, and torch makes
    the groups of all ranks.
    """
    world = open_communicator(None, timeout_s=timeout_s, purpose="making of gloo groups")
    mine = sorted(dist.get_process_group_ranks(group))
    found: list[ProcessGroup] = []
    for ranks in sorted(set(map(tuple, world.all_gather(mine)))):
        limit = timedelta(seconds=timeout_s)
        made = [dist.new_group(ranks, limit, backend="gloo") for _ in range(num_groups)]
        if list(ranks) == mine:
            found = made
    return tuple(found)


def open_communicator(
    group: ProcessGroup | None,
    *,
    timeout_s: float,
    purpose: str,
    channels: Sequence[ProcessGroup] = (),
) -> Communicator:
    """A communicator over ``group``, by default over the world; over one rank without torch's.

    Makes no process group and no connection. Where torch.distributed is not initialised, the
    group is this process alone.

    Args:
        group: ranks that take part; every one of them opens and uses its communicator alike.
        timeout_s: longest wait for a peer in each call.
        purpose: what the ranks do together, for messages: ``save of /ckpt/iter_10``.
        channels: groups of the same ranks that ``exchange`` spreads its messages over; by default
            the group itself.
    """
    if not is_distributed():
        return SoloCommunicator()
    if group is None:
        group = dist.group.WORLD
    assert group is not None  # noqa: S101 - torch.distributed is initialised
    if dist.get_world_size(group) == 1:
        return SoloCommunicator(dist.get_rank())
    return TorchCommunicator(group, timeout_s=timeout_s, purpose=purpose, channels=channels)


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
        channels: Sequence[ProcessGroup] = (),
    ) -> None:
        self._group = group
        self._channels = tuple(channels) or (group,)
        self._timeout_s = timeout_s
        self._device = _device_of(group)
        self._global_ranks = dist.get_process_group_ranks(group)
        self._attendance = _Attendance(group, self._global_ranks, purpose)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def global_rank(self, rank: int) -> int:
        """See Communicator."""
        return self._global_ranks[rank]

    def all_gather(self, item: Message) -> list[Message]:
        """See Communicator."""
        content = b"" if item is None else json.dumps(item).encode()
        sizes = self._gathered(torch.tensor([len(content)], dtype=torch.int64, device="cpu"))
        longest = max(int(size) for size in sizes)
        if longest == 0:
            return [None] * self.size
        padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
        padded[: len(content)] = torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)[
            : len(content)
        ]
        texts = self._gathered(padded)
        return [
            json.loads(text[: int(size)].numpy().tobytes()) if int(size) else None
            for text, size in zip(texts, sizes, strict=True)
        ]

    def exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> None:
        """See Communicator."""
        self._attendance.sign()
        staged = [self._tensor_of(receive.into) for receive in receives]
        works: list[tuple[int, _Work | None]] = []
        received, sent = _Turns(self._channels), _Turns(self._channels)
        for receive, tensor in zip(receives, staged, strict=True):
            source = self._global_ranks[receive.from_rank]
            channel = received.next(source)
            works.append((source, dist.irecv(tensor, src=source, group=channel)))
        for send in sends:
            peer = self._global_ranks[send.to_rank]
            tensor = self._tensor_of(send.data)
            works.append((peer, dist.isend(tensor, dst=peer, group=sent.next(peer))))
        deadline = time.monotonic() + self._timeout_s
        for peer, work in works:
            self._wait(work, deadline, peer)
        for receive, tensor in zip(receives, staged, strict=True):
            if tensor.device.type != "cpu":
                torch.from_numpy(receive.into).copy_(tensor)

    def _gathered(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._attendance.sign()
        mine = tensor.to(self._device)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(found, mine, group=self._group, async_op=True)
        self._wait(work, time.monotonic() + self._timeout_s, None)
        return [t.cpu() for t in found]

    def _tensor_of(self, data: Bytes) -> torch.Tensor:
        return torch.from_numpy(data).to(self._device)

    def _wait(self, work: _Work | None, deadline: float, peer: int | None) -> None:
        if work is None:
            return
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            raise self._peer_error(error, deadline, peer) from error

    def _peer_error(self, error: RuntimeError, deadline: float, peer: int | None) -> PeerError:
        """Who is to blame for a collective that timed out or broke off."""
        what = self._attendance.what
        if time.monotonic() >= deadline - 0.001:
            absent = [peer] if peer is not None else self._attendance.absent(self._timeout_s)
            return PeerTimeoutError(
                absent[0] if absent else None,
                f"{_described(absent)} did not arrive within {self._timeout_s:g} s: {what}",
            )
        lost = [peer] if peer is not None else self._attendance.lost(self._timeout_s)
        return PeerLostError(
            lost[0] if lost and len(lost) == 1 else None,
            f"lost contact with {_described(lost)}: {what}: {error}",
        )


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


class _Attendance:
    """Each rank's last sign of life in the job's key-value store, to tell who is missing.

    A collective that times out does not say which rank it waited for. One small write per
    collective, to a key that every rank has once, lets the others look it up when that happens.
    What is written is how many collectives of this package the group has had: equal on all ranks,
    whatever else the job does with the group, and never the same twice.
    """

    def __init__(self, group: ProcessGroup, global_ranks: Sequence[int], purpose: str) -> None:
        self._store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        self._keys = {rank: f"dist_ckpt/{group.group_name}/{rank}" for rank in global_ranks}
        self._mine = self._keys[dist.get_rank()]
        self._purpose = purpose
        self._group = group
        self._count = 0
        self._total = 0

    @property
    def what(self) -> str:
        """The collective under way."""
        return f"{self._purpose}, meeting {self._count}"

    def sign(self) -> None:
        """Note that this rank has reached the next collective."""
        self._count += 1
        self._total = _MEETINGS[self._group] = _MEETINGS.get(self._group, 0) + 1
        try:
            self._store.set(self._mine, str(self._total))
        except RuntimeError as error:
            raise PeerLostError(
                None, f"the job's key-value store does not answer: {self.what}: {error}"
            ) from error

    def absent(self, timeout_s: float) -> list[int] | None:
        """Global ranks that have not signed for the collective under way; None if unknown.

        The store may be hosted by the very rank that is silent, and a question to it then never
        returns: it is asked over a connection and on a thread of its own.
        """
        return self._looked_up(time.monotonic(), min(timeout_s, _LOOKUP_S))

    def lost(self, timeout_s: float) -> list[int] | None:
        """Global ranks that have not signed, once those that are merely slower had time to."""
        limit_s = min(timeout_s, _LOOKUP_S)
        return self._looked_up(time.monotonic() + limit_s / 2, limit_s)

    def _looked_up(self, deadline: float, limit_s: float) -> list[int] | None:
        answers: list[list[int]] = []
        reader = threading.Thread(
            target=lambda: answers.extend(self._answers(deadline)), daemon=True
        )
        reader.start()
        reader.join(limit_s)
        return answers[0] if answers else None

    def _answers(self, deadline: float) -> list[list[int]]:
        """Who has not signed, when at most one is left or the time is up; nothing if unknown."""
        try:
            store: Any = self._store
            store = store.clone()
            while len(found := self._unsigned(store)) > 1 and time.monotonic() < deadline:
                time.sleep(_LOOKUP_PAUSE_S)
        except RuntimeError:
            return []
        return [found]

    def _unsigned(self, store: Any) -> list[int]:
        return [rank for rank, key in self._keys.items() if not self._has_signed(store, key)]

    def _has_signed(self, store: Any, key: str) -> bool:
        """Whether a rank is at this collective, or past it."""
        return bool(store.check([key]) and int(store.get(key)) >= self._total)


def _described(absent: list[int] | None) -> str:
    if absent is None:
        return "a peer (perhaps rank 0: the job's key-value store does not answer)"
    return f"ranks {absent}" if absent else "a peer"


def _device_of(group: ProcessGroup) -> torch.device:
    """Where tensors have to live to travel over the group."""
    if "nccl" in dist.get_backend(group) and "gloo" not in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
