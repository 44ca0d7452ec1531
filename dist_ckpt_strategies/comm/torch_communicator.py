"""A Communicator over a process group of torch.distributed."""

import json
import math
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from dist_ckpt_strategies.comm.abort import abort_nccl, disconnect_gloo
from dist_ckpt_strategies.comm.base import (
    Buffer,
    Communicator,
    Message,
    Parcel,
    out_of_step,
    who_is_where,
)
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    begin_gather_rows,
    is_distributed,
    is_from_peer,
    require_member,
)
from dist_ckpt_strategies.comm.progress import progress_of
from dist_ckpt_strategies.device import raise_if_aborted, to_host_beside
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerError,
    PlanError,
    as_checkpoint_error,
    error_from_peer,
)

_DEVICE_PAUSE_S = 0.0002

_ABORT_S = 1.0
"""Longest wait for what an abort does after it has ended the group's works."""

_NUMBER = struct.Struct("=q")
"""How a number travels; another collective of the job most likely sends one too."""

_SIZE_BITS = 41
"""Of the number that leads a message: its size. The bits above say what for."""

_ROOM_NBYTES = 504
"""For a short message beside its number."""

_PURPOSE_BITS = 63 - _SIZE_BITS
_PURPOSE_NBYTES = 160
"""Of the text that ranks exchange where their purposes differ."""

_CLOCK_S = 0.001
_ROUNDING_S = 0.002
"""Torch's limits are whole milliseconds."""

_PATIENCE_S = 1.0
"""A rank that waits longer for a collective notes that it has reached it."""

_SHARE_OF_LIMIT = 0.5
"""A rank that reaches a collective later than this after the one before may come too late."""


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
        return Communicator()
    if group is None:
        group = dist.group.WORLD
    assert group is not None  # noqa: S101 - torch.distributed is initialised
    require_member(group)
    if dist.get_world_size(group) == 1:
        return Communicator([dist.get_rank()])
    return TorchCommunicator(group, timeout_s, (purpose, detail), channels, payload_device)


class TorchCommunicator(Communicator):
    """A Communicator over an existing process group of two or more ranks.

    Works over gloo on the CPU and, where the group has no CPU backend, over NCCL through device
    buffers.

    Its errors name the ranks that a collective waited for; see ``progress.py``.
    """

    def __init__(
        self,
        group: ProcessGroup,
        timeout_s: float,
        what: tuple[str, str],
        channels: Sequence[ProcessGroup],
        payload_device: torch.device | None,
    ) -> None:
        super().__init__(dist.get_process_group_ranks(group), dist.get_rank(group))
        self._group = group
        self._channels = tuple(channels) or (group,)
        self._has_own_channels = bool(channels)
        self._timeout_s = timeout_s
        self._progress = progress_of(group)
        self._message_device, self.group_id = self._progress.device, self._progress.name
        self.device = payload_device or self._message_device
        self._unconnected = [
            channel
            for channel in self._channels
            if self.device.type != "cpu" and (channel, self.device) != (group, self._message_device)
        ]
        self.title = " ".join(what).rstrip()
        # Not 0, which other collectives of the job begin with.
        digest = xxhash.xxh3_64_intdigest(what[0].encode())
        self._purpose_number = digest % ((1 << _PURPOSE_BITS) - 1) + 1
        self._num_collectives = 0

    @property
    def _what(self) -> str:
        """The current collective, for messages."""
        return f"{self.title}, collective {self._num_collectives}"

    def all_gather(self, item: Message, *, follows: bool = False) -> list[Message]:
        """See Communicator.

        A number leads, for the size and the purpose. By default it travels alone: another
        collective of the job most likely sends a number too. Else what is short goes with it.
        """
        failure: CheckpointError | None = None
        try:
            content = b"" if item is None else json.dumps([item], separators=(",", ":")).encode()
        except (TypeError, ValueError, MemoryError, RecursionError) as error:
            failure = as_checkpoint_error(error)
            content = json.dumps(failure.message).encode()
        room = _ROOM_NBYTES if follows else 0
        await_all = self._begin_numbered(len(content), content[:room].ljust(room, b"\0"))
        sizes, texts = map(list, zip(*await_all(), strict=True))
        if not any(sizes):
            return [None] * self.size
        if max(sizes) > room:
            texts = self._begin_gathered(content.ljust(max(sizes), b"\0"))()
        if failure is not None:
            raise failure.at_rank(self.global_ranks[self.rank])
        messages = []
        for who, text, size in zip(self.global_ranks, texts, sizes, strict=True):
            try:
                message = json.loads(text[:size]) if size else [None]
            except ValueError as error:  # it comes from another collective of the job
                raise out_of_step(who, self._what) from error
            if isinstance(message, str):
                raise error_from_peer(who, "CheckpointError", message)
            messages.append(message[0])
        return messages

    def begin_gather(self, number: int) -> Callable[[], list[int]]:
        """See Communicator. The host does not wait for the GPU before the function is called."""
        await_all = self._begin_numbered(number, b"")
        return lambda: [of_rank for of_rank, _ in await_all()]

    def _begin_numbered(self, number: int, text: bytes) -> Callable[[], list[tuple[int, bytes]]]:
        """Begin to gather numbers, led by the purpose, and texts of one size."""
        lead = _NUMBER.pack(self._purpose_number << _SIZE_BITS | number)
        await_all = self._begin_gathered(lead + text)

        def numbered() -> list[tuple[int, bytes]]:
            contents = await_all()
            found = [_NUMBER.unpack_from(content)[0] for content in contents]
            purposes = [one >> _SIZE_BITS for one in found]
            if len(set(purposes)) > 1:
                raise self._other_purpose(purposes)
            texts = (content[_NUMBER.size :] for content in contents)
            return [*zip((one & (1 << _SIZE_BITS) - 1 for one in found), texts, strict=True)]

        return numbered

    def _other_purpose(self, purposes: Sequence[int]) -> CheckpointError:
        """The error for ranks that call for different purposes.

        Collective: all of them see it, unless one is in another collective of the job.
        """
        if min(purposes) <= 0:
            return out_of_step(self.global_ranks[purposes.index(min(purposes))], self._what)
        mine = self._what.encode()[:_PURPOSE_NBYTES].ljust(_PURPOSE_NBYTES, b"\0")
        found = self._begin_gathered(mine)()
        texts = [text.rstrip(b"\0").decode(errors="replace") for text in found]
        return PlanError(
            "expected the same call on all ranks, in the same order, found "
            f"{who_is_where(self, purposes, texts)}; if one of them has raised an error before, "
            "see that first"
        )

    def _begin_gathered(self, content: bytes) -> Callable[[], list[bytes]]:
        """Begin to gather every rank's bytes, as many as here; a function that returns them.

        One collective; a rank that waits for it notes that it has reached it. Over NCCL all ranks
        of each channel connect first: an exchange may be one of few of them.
        """
        raise_if_aborted()  # what this rank would send may rest on garbage
        self._num_collectives += 1
        progress = self._progress
        pause_s = progress.begin_collective()
        deadline = time.monotonic() + self._timeout_s
        device = self._message_device
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        mine = mine.to(device, non_blocking=True)  # without a wait for what the GPU has to do
        with _PeerErrors(self, deadline):
            if progress.total == 1:
                progress.write_note()
            while self._unconnected:
                nothing = torch.zeros(1, device=self.device)
                channel = self._unconnected.pop()
                work = dist.all_reduce(nothing, group=channel, async_op=True)
                _wait(work, deadline, self.device)
            is_number = mine.numel() == _NUMBER.size
            found, work = begin_gather_rows(mine, self._group, meets_others=is_number)

        def await_all() -> list[bytes]:
            deadline = time.monotonic() + self._timeout_s
            with _PeerErrors(self, deadline):
                if not _is_done_within(work, min(_PATIENCE_S, self._timeout_s), device):
                    progress.write_note()
                    _wait(work, deadline, device)
                if pause_s > _SHARE_OF_LIMIT * self._timeout_s:
                    progress.require_awaited(self._what)
            progress.failure = ""
            (rows,) = to_host_beside([found])
            return [row.tobytes() for row in rows.numpy()]

        return await_all

    def begin_exchange(
        self, sends: Sequence[Parcel], receives: Sequence[Parcel]
    ) -> Callable[[], None]:
        """See Communicator. Not counted as a collective: ranks may take part in different ones.

        The channels take turns, separately for each peer: the same on both sides. NCCL takes the
        operations of a group as a batch: one after the other, two ranks that both receive first
        would wait for each other for ever.
        """
        raise_if_aborted()  # what is sent may be garbage
        turns: Counter[tuple[Any, int]] = Counter()

        def operation(call: Any, rank: int, tensor: torch.Tensor) -> dist.P2POp:
            channel = self._channels[turns[call, rank] % len(self._channels)]
            turns[call, rank] += 1
            return dist.P2POp(call, tensor, self.global_ranks[rank], channel)

        received = [(into, self._tensor_of(into)) for _, into in receives]
        operations = [
            operation(dist.irecv, rank, tensor)
            for (rank, _), (_, tensor) in zip(receives, received, strict=True)
        ]
        operations += [operation(dist.isend, rank, self._tensor_of(data)) for rank, data in sends]
        works: list[tuple[int | None, Any]]
        with _PeerErrors(self, time.monotonic() + self._timeout_s):
            if self.device.type == "cpu":
                works = [(o.peer, o.op(o.tensor, o.peer, group=o.group)) for o in operations]
            else:
                batches = [[o for o in operations if o.group is c] for c in self._channels]
                started = [dist.batch_isend_irecv(batch) for batch in batches if batch]
                works = [(None, work) for some in started for work in some]
        return partial(self._finish, works, received)

    def _finish(
        self,
        works: Sequence[tuple[int | None, Any]],
        received: Sequence[tuple[Buffer, torch.Tensor]],
    ) -> None:
        """Wait for the works, each with the global rank at its other end if that is known."""
        deadline = time.monotonic() + self._timeout_s
        for peer, work in works:
            if work is not None:
                with _PeerErrors(self, deadline, peer):
                    _wait(work, deadline, self.device)
        for memory, tensor in received:
            into = _as_tensor(memory)
            if into.device != tensor.device:
                into.copy_(tensor)

    def _tensor_of(self, data: Buffer) -> torch.Tensor:
        return _as_tensor(data).to(self.device)

    def note_failure(self, error: BaseException) -> None:
        """See Communicator."""
        self._progress.note_failure(error)

    def peer_error(
        self, error: BaseException, deadline: float = math.inf, peer: int | None = None
    ) -> PeerError:
        """See Communicator."""
        is_lost = time.monotonic() < deadline - _CLOCK_S
        return self._progress.peer_error(error, self._what, self._timeout_s, peer, is_lost=is_lost)

    def break_off(self) -> None:
        """Make the channels unusable: no later call may take the bytes of this one.

        An NCCL group is aborted. Gloo has closed the connections of the group that timed out, but
        not those of the channels beside it.
        """
        if self.device.type != "cpu":
            abort_nccl({self._group, *self._channels}, _ABORT_S)
        if self._has_own_channels and self._message_device.type == "cpu":
            disconnect_gloo(self._channels, self.global_ranks[self.rank - 1])


@dataclass(frozen=True, slots=True)
class _PeerErrors:
    """Raises errors of torch's as ours; no later call is to take the bytes of this one.

    A generator would not do: from Python 3.12 on it keeps an error that it replaces in a cycle,
    with the frames that hold the group, whose connections then stay open. So its peers would wait
    for their whole limit.
    """

    comm: TorchCommunicator
    deadline: float
    peer: int | None = None

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        is_ours = isinstance(error, PeerError)
        if error is None or not (is_ours or is_from_peer(error)):
            if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
                self.comm.note_failure(error)
                self.comm.break_off()
            return
        found = error if is_ours else self.comm.peer_error(error, self.deadline, self.peer)
        try:
            self.comm.break_off()
            if not is_ours:
                raise found from error
        finally:
            del found  # or the error would hold this frame, and the group, in a cycle


def _as_tensor(data: Buffer) -> torch.Tensor:
    """The same memory; ``torch.as_tensor`` would copy it to the default device."""
    return torch.from_numpy(data) if isinstance(data, np.ndarray) else data


def _is_done_within(work: Any, seconds: float, device: torch.device) -> bool:
    """Whether a work is done in that time; one that is not may be waited for again."""
    deadline = time.monotonic() + seconds
    try:
        _wait(work, deadline, device)
    except RuntimeError:
        if time.monotonic() < deadline - _ROUNDING_S:
            raise  # contact broke off
        return False
    return True


def _wait(work: Any, deadline: float, device: torch.device) -> None:
    """Return when the work is done; a RuntimeError after the deadline, or if contact broke off.

    On a device the work's own ``wait`` holds up a stream alone. NCCL ends pending works without an
    error when this process' communication is ended; what they have received is garbage.
    """
    while device.type != "cpu" and not work.is_completed():
        if time.monotonic() >= deadline:
            raise RuntimeError("the device is not done in time")
        time.sleep(_DEVICE_PAUSE_S)
    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    raise_if_aborted()
