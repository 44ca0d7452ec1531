"""A Communicator over a process group of torch.distributed; it names ranks that are missing."""

import json
import math
import os
import struct
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from dist_ckpt_strategies.comm.base import (
    Buffer,
    Communicator,
    Message,
    Receive,
    Send,
    out_of_step,
    who_is_where,
)
from dist_ckpt_strategies.comm.process_group import (
    ProcessGroup,
    abort_nccl,
    is_distributed,
    is_from_peer,
    is_of_communication,
    message_device,
    require_member,
    run_abandonable,
)
from dist_ckpt_strategies.device import raise_if_aborted, to_host_beside
from dist_ckpt_strategies.errors import (
    CheckpointError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    PlanError,
    as_checkpoint_error,
    error_from_peer,
    text_of,
)
from dist_ckpt_strategies.storage.host import has_ended, process_name

_DEVICE_PAUSE_S = 0.0002

_ABORT_S = 1.0
"""Longest wait for what an abort does after it has ended the group's works."""

_TAG_OF_NOTHING = 1 << 30
"""Of a message that no rank sends; others have the tag 0."""

_NUMBER = struct.Struct("=q")
"""How a number travels; another collective of the job most likely sends one too."""

_SIZE_BITS = 41
"""Of the number that leads a message: its size. The bits above say what for."""

_PURPOSE_BITS = 63 - _SIZE_BITS
_PURPOSE_NBYTES = 160
"""Of the text that ranks exchange where their purposes differ."""

_LOOKUP_S = 5.0
"""Longest wait for the job's key-value store, once a collective has failed."""

_LOOKUP_PAUSE_S = 0.05


@dataclass(slots=True)
class _Reached:
    """How far a group is: its collectives so far, and when the last one was reached.

    Torch's own sequence number counts messages between single ranks too. A later group may have
    torch's name of this one, but not ``name``. Messages have to be on ``device``. ``failure`` is
    this rank's own error since the last collective.
    """

    device: torch.device
    total: int = 0
    at: float = 0.0
    failure: str = ""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


_REACHED: WeakKeyDictionary[Any, _Reached] = WeakKeyDictionary()
"""Of each group: it takes no attributes."""

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

    A collective that times out does not say which rank it waited for. So each rank writes one key
    per collective to the job's key-value store: how many collectives of this package the group has
    had, which is equal on all ranks, and its process, so that ranks on the same host see that it
    has died.
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
        if group not in _REACHED:
            _REACHED[group] = _Reached(message_device(group))
        self._reached = _REACHED[group]
        self._message_device, self.group_id = self._reached.device, self._reached.name
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
        self._store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public way
        prefix = f"dist_ckpt/{group.group_name}"
        self._keys = {rank: f"{prefix}/{rank}" for rank in self.global_ranks}
        self._given_up_key = f"{prefix}/given_up"
        self._num_collectives = 0

    @property
    def _what(self) -> str:
        """The current collective, for messages."""
        return f"{self.title}, collective {self._num_collectives}"

    def all_gather(self, item: Message) -> list[Message]:
        """See Communicator.

        One number leads, for the size and the purpose: another collective of the job most likely
        sends a number too.
        """
        failure: CheckpointError | None = None
        try:
            content = b"" if item is None else json.dumps([item], separators=(",", ":")).encode()
        except (TypeError, ValueError, MemoryError, RecursionError) as error:
            failure = as_checkpoint_error(error)
            content = json.dumps(failure.message).encode()
        sizes = self.begin_gather(len(content))()
        if not any(sizes):
            return [None] * self.size
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
        await_all = self._begin_gathered(_NUMBER.pack(self._purpose_number << _SIZE_BITS | number))

        def numbers() -> list[int]:
            found = [_NUMBER.unpack(content)[0] for content in await_all()]
            purposes = [one >> _SIZE_BITS for one in found]
            if len(set(purposes)) > 1:
                raise self._other_purpose(purposes)
            return [one & (1 << _SIZE_BITS) - 1 for one in found]

        return numbers

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
        now, reached = time.monotonic(), self._reached
        before, reached.at = reached.at, now
        reached.total += 1
        deadline = now + self._timeout_s
        device = self._message_device
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        mine = mine.to(device, non_blocking=True)  # without a wait for what the GPU has to do
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with _PeerErrors(self, deadline):
            if reached.total == 1:
                self._write_note(self._store)
            while self._unconnected:
                nothing = torch.zeros(1, device=self.device)
                channel = self._unconnected.pop()
                work = dist.all_reduce(nothing, group=channel, async_op=True)
                _wait(work, deadline, self.device)
            work = dist.all_gather(found, mine, group=self._group, async_op=True)

        def await_all() -> list[bytes]:
            deadline = time.monotonic() + self._timeout_s
            with _PeerErrors(self, deadline):
                if not _is_done_within(work, min(_PATIENCE_S, self._timeout_s), device):
                    self._write_note(self._store)
                    _wait(work, deadline, device)
                if now - before > _SHARE_OF_LIMIT * self._timeout_s:
                    self._require_awaited()
            reached.failure = ""
            return [tensor.numpy().tobytes() for tensor in to_host_beside(found)]

        return await_all

    def begin_exchange(
        self, sends: Sequence[Send], receives: Sequence[Receive]
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

        received = [(receive, self._tensor_of(receive.into)) for receive in receives]
        operations = [operation(dist.irecv, r.from_rank, tensor) for r, tensor in received]
        operations += [operation(dist.isend, s.to_rank, self._tensor_of(s.data)) for s in sends]
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
        received: Sequence[tuple[Receive, torch.Tensor]],
    ) -> None:
        """Wait for the works, each with the global rank at its other end if that is known."""
        deadline = time.monotonic() + self._timeout_s
        for peer, work in works:
            if work is not None:
                with _PeerErrors(self, deadline, peer):
                    _wait(work, deadline, self.device)
        for receive, tensor in received:
            into = _as_tensor(receive.into)
            if into.device != tensor.device:
                into.copy_(tensor)

    def _tensor_of(self, data: Buffer) -> torch.Tensor:
        return _as_tensor(data).to(self.device)

    def break_off(self) -> None:
        """Abort NCCL; over gloo, have every channel wait in vain, for something no rank sends.

        Gloo breaks off all connections of a group that has waited in vain, but of no other: the
        channels beside it would carry the next call's bytes, to peers that still are in this one.
        NCCL breaks off nothing: its group is aborted.
        """
        # Any group may be broken off, aborted or destroyed already.
        if self.device.type != "cpu":
            abort_nccl({self._group, *self._channels}, _ABORT_S)
        if self._has_own_channels and self._message_device.type == "cpu":
            peer = self.global_ranks[self.rank - 1]
            for channel in self._channels:
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                with suppress(RuntimeError, ValueError):
                    work: Any = dist.irecv(nothing, peer, group=channel, tag=_TAG_OF_NOTHING)
                    work.wait(timedelta(milliseconds=1))

    def peer_error(
        self, error: BaseException, deadline: float = math.inf, peer: int | None = None
    ) -> PeerError:
        """See Communicator."""
        is_lost = time.monotonic() < deadline - 0.001
        missing = {peer: ""} if peer is not None else self._missing(is_lost=is_lost)
        if missing is None:
            who = "a peer (perhaps rank 0: the job's key-value store does not answer)"
        else:
            who = f"ranks {list(missing)}" if missing else "a peer"
        first, why = next(iter(missing or {}), None), "".join((missing or {}).values())
        if not is_lost:
            late = f"{who} did not reach this collective within {self._timeout_s:g} s: {self._what}"
            return PeerTimeoutError(first, late + why)
        return PeerLostError(
            first if missing and len(missing) == 1 else None,
            f"lost contact with {who}: {self._what}: {error}{why}",
        )

    def _require_awaited(self) -> None:
        """Raise if the other ranks had given up on this one before it reached the collective.

        What they sent may have arrived all the same.
        """
        if not self._store.check([self._given_up_key]):
            return
        rank, total, name = self._store.get(self._given_up_key).decode().split()
        key = self._keys.get(int(rank))  # an earlier group of that name had other ranks
        if key is None or int(total) < self._reached.total:
            return
        if self._store.get(key).decode().split()[1] == name:
            raise PeerTimeoutError(
                None,
                "this rank reached the collective after others had waited for their whole limit: "
                f"{self._what}",
            )

    def note_failure(self, error: BaseException) -> None:
        """See Communicator. What comes from a peer is no error of this rank."""
        if is_of_communication(error):
            return
        text = f"{type(error).__name__}: {text_of(error)}"
        self._reached.failure = text.encode(errors="replace").decode()
        with suppress(RuntimeError, TimeoutError):
            run_abandonable(lambda: self._write_note(self._store.clone()), _LOOKUP_S, "")

    def _write_note(self, store: Any) -> None:
        """Note how far this rank is, and by what error it is about to leave."""
        reached = self._reached
        note = f"{reached.total} {reached.name} {process_name(os.getpid())}\n{reached.failure}"
        store.set(self._keys[self.global_ranks[self.rank]], note)

    def _missing(self, *, is_lost: bool) -> dict[int, str] | None:
        """Global ranks to blame for a failed collective, with what their errors add to the message.

        None if the store does not answer. After a timeout, notes for late ranks that this rank has
        given up. To blame are those that have left by an error of their own. Else after a timeout
        those that have not reached it, else those whose processes on this host have ended. Where
        contact broke off, those that have ended, else those that have not reached it once slower
        ranks had time to.

        A question to a store hosted by a silent rank never returns, so it is asked over a new
        connection on a thread.
        """
        limit_s = min(self._timeout_s, _LOOKUP_S)
        total = self._reached.total  # the thread may go on after it was given up

        me = self.global_ranks[self.rank]
        others = {rank: key for rank, key in self._keys.items() if rank != me}

        def ask() -> dict[int, str]:
            store = self._store.clone()
            self._write_note(store)
            if not is_lost:
                store.set(self._given_up_key, f"{me} {total} {self._reached.name}")
                ended, late, failed = _ended_and_late(store, others, total)
                return failed or dict.fromkeys(late or ended, "")
            deadline = time.monotonic() + limit_s / 2
            while True:
                ended, late, failed = _ended_and_late(store, others, total)
                if failed or ended or len(late) <= 1 or time.monotonic() >= deadline:
                    return failed or dict.fromkeys(ended or late, "")
                time.sleep(_LOOKUP_PAUSE_S)

        try:
            found: dict[int, str] = run_abandonable(ask, limit_s, "the job's key-value store")
        except (RuntimeError, TimeoutError):
            return None
        return found


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


# Which ranks have not reached a collective, or have died in it


def _ended_and_late(
    store: Any, keys: Mapping[int, str], total: int
) -> tuple[list[int], list[int], dict[int, str]]:
    """Ranks whose processes have ended, and those that have not reached so many collectives.

    Of those that left by an error of their own also a text.
    """
    written = {rank: key for rank, key in keys.items() if store.check([key])}
    texts = store.multi_get(list(written.values())) if written else []
    notes = {r: text.decode().partition("\n") for r, text in zip(written, texts, strict=True)}
    found = {rank: note.split(" ", 2) for rank, (note, _, _) in notes.items()}
    ended = [rank for rank, (_, _, process) in found.items() if has_ended(process)]
    late = [rank for rank in keys if rank not in found or int(found[rank][0]) < total]
    left = "; rank {} left by an error of its own: {}"
    failed = {
        rank: left.format(rank, why)
        for rank, (*_, why) in notes.items()
        if why and int(found[rank][0]) >= total - 1  # else it has gone on since
    }
    return ended, late, failed
