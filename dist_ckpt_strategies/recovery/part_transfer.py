"""A part as one stretch of bytes: its tensors by name, one right behind the other."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
import xxhash

from dist_ckpt_strategies.comm.agree import agree, agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, Receive, Send
from dist_ckpt_strategies.core.messages import Message, Slice, build_messages
from dist_ckpt_strategies.device import (
    as_bytes,
    is_in_order,
    may_overlap,
    require_plain,
    to_host,
)
from dist_ckpt_strategies.errors import CorruptCheckpointError, PlanError, RestartError
from dist_ckpt_strategies.recovery.plan import ByteCopy, PartFacts, RecoveryPlan

_DIGEST_CHUNK_NBYTES = 64 << 20

TensorLine = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


class FlatPart:
    """The bytes of a part's tensors, whatever their dtypes, strides and device.

    Tensors whose memory is in order are used where they are. Of the others a copy in order is
    kept as long as this object; after something has landed in it, ``settle`` copies it back.

    Args:
        part_id: for messages.
        tensors: by name.

    Raises:
        PlanError: a tensor has no memory of its own.
    """

    def __init__(self, part_id: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.part_id = part_id
        self.names = sorted(tensors)
        self._tensors = [tensors[name].detach() for name in self.names]
        for name, tensor in zip(self.names, self._tensors, strict=True):
            require_plain(tensor, key=f"{part_id}: {name}")
        self._sizes = [tensor.numel() * tensor.element_size() for tensor in self._tensors]
        self._offsets = [0, *accumulate(self._sizes)][: len(self._sizes)]
        self._twins: dict[int, torch.Tensor] = {}
        self.nbytes = sum(self._sizes)

    def lines(self) -> list[TensorLine]:
        """Name, dtype and shape of each tensor."""
        return [
            (name, str(tensor.dtype), tuple(tensor.shape))
            for name, tensor in zip(self.names, self._tensors, strict=True)
        ]

    def facts(self, *, with_digest: bool = False) -> PartFacts:
        """What the planner needs to know; takes a look at every byte for the digest."""
        layout = xxhash.xxh3_64_hexdigest(json.dumps(self.lines()).encode())
        return PartFacts(self.part_id, self.nbytes, layout, self.digest() if with_digest else None)

    def digest(self) -> str:
        """xxh3 of all bytes."""
        total = xxhash.xxh3_64()
        for number, size in enumerate(self._sizes):
            for start in range(0, size, _DIGEST_CHUNK_NBYTES):
                chunk = self._bytes(number)[start : start + _DIGEST_CHUNK_NBYTES]
                total.update(to_host([chunk])[0].data)
        return total.hexdigest()

    def tensor_digests(self) -> dict[str, str]:
        """xxh3 of the bytes of each tensor."""
        return {
            name: xxhash.xxh3_64_hexdigest(to_host([self._bytes(number)])[0].data)
            for number, name in enumerate(self.names)
        }

    def messages(self, start: int, nbytes: int, max_nbytes: int) -> tuple[Message, ...]:
        """The messages that carry a range of the bytes; equal where the tensors are."""
        end = start + nbytes
        chosen: list[tuple[int, int, int]] = []
        for number, (offset, size) in enumerate(zip(self._offsets, self._sizes, strict=True)):
            low, high = max(offset, start), min(offset + size, end)
            if low < high:
                chosen.append((number, low, high))
        built = build_messages(
            [low for _, low, _ in chosen], [high - low for _, low, high in chosen], max_nbytes
        )
        return tuple(
            Message(
                message.byte_offset,
                message.nbytes,
                tuple(self._moved(piece, chosen[piece.buffer]) for piece in message.slices),
            )
            for message in built
        )

    def outgoing(self, message: Message, device: torch.device) -> torch.Tensor:
        """The bytes of a message, on a device: the tensor's own memory where that will do."""
        direct = self._direct(message, device)
        if direct is not None:
            return direct
        buffer = torch.empty(message.nbytes, dtype=torch.uint8, device=device)
        for target, own in self._slices(message, buffer):
            target.copy_(own)
        return buffer

    def landing(self, message: Message, device: torch.device) -> torch.Tensor:
        """Where a message may land, on a device; ``land`` follows once it has."""
        direct = self._direct(message, device)
        if direct is not None:
            return direct
        return torch.empty(message.nbytes, dtype=torch.uint8, device=device)

    def land(self, message: Message, buffer: torch.Tensor) -> None:
        """Take a message over from where it has landed."""
        if self._direct(message, buffer.device) is not None:
            return
        for source, own in self._slices(message, buffer):
            own.copy_(source)

    def settle(self) -> None:
        """Bring what has landed in copies to the tensors themselves."""
        for number, twin in self._twins.items():
            self._tensors[number].copy_(twin)
        self._twins.clear()

    def require_fillable(self) -> None:
        """Raise unless bytes can be written into every tensor.

        Raises:
            PlanError: elements of one share their memory.
        """
        for name, tensor in zip(self.names, self._tensors, strict=True):
            if may_overlap(tensor):
                raise PlanError(
                    f"{self.part_id}: {name}: its elements share memory, so it cannot be filled",
                    key=self.part_id,
                )

    def copy_from(self, other: FlatPart) -> int:
        """Take over the tensors of an equal part; bytes copied, none where they are the same."""
        copied = 0
        for mine, theirs in zip(self._tensors, other._tensors, strict=True):
            if not _is_same_memory(mine, theirs):
                mine.copy_(theirs)
                copied += mine.numel() * mine.element_size()
        return copied

    def _direct(self, message: Message, device: torch.device) -> torch.Tensor | None:
        if len(message.slices) != 1:
            return None
        piece = message.slices[0]
        if self._tensors[piece.buffer].device.type != device.type:
            return None
        return self._bytes(piece.buffer)[piece.start : piece.start + piece.nbytes]

    def _slices(
        self, message: Message, buffer: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of a buffer for the whole message, each with the tensor's own bytes."""
        found = []
        for piece in message.slices:
            at = self._offsets[piece.buffer] + piece.start - message.byte_offset
            own = self._bytes(piece.buffer)[piece.start : piece.start + piece.nbytes]
            found.append((buffer[at : at + piece.nbytes], own))
        return found

    def _bytes(self, number: int) -> torch.Tensor:
        tensor = self._tensors[number]
        if is_in_order(tensor):
            return as_bytes(tensor)
        if number not in self._twins:
            self._twins[number] = tensor.resolve_conj().resolve_neg().contiguous()
        return as_bytes(self._twins[number])

    def _moved(self, piece: Slice, where: tuple[int, int, int]) -> Slice:
        number, low, _ = where
        return Slice(number, low - self._offsets[number] + piece.start, piece.nbytes)


def flat_parts(parts: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, FlatPart]:
    """The parts of a provider, by id, sorted."""
    return {part_id: FlatPart(part_id, parts[part_id]) for part_id in sorted(parts)}


def layout_differences(first: Sequence[TensorLine], second: Sequence[TensorLine]) -> list[str]:
    """The tensors in which two lists of them differ, in words."""
    mine, theirs = (
        {name: f"{dtype.removeprefix('torch.')} {tuple(shape)}" for name, dtype, shape in lines}
        for lines in (first, second)
    )
    missing = "no such tensor"
    return [
        f"{name}: {mine.get(name, missing)} and {theirs.get(name, missing)}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.data_ptr() == second.data_ptr()
        and first.device == second.device
        and first.stride() == second.stride()
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
    )


_MIN_MESSAGE_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Item:
    """A message of a copy, with the rank at the other end."""

    copy: ByteCopy
    message: Message
    peer: int


@dataclass(frozen=True, slots=True)
class _Staged:
    """What goes out and comes in in one round: items with their bytes, and these as messages."""

    going: list[tuple[_Item, torch.Tensor]]
    coming: list[tuple[_Item, torch.Tensor]]
    sends: list[Send]
    receives: list[Receive]


class PartTransfer:
    """The bytes of one rank, in and out, round by round; each message has its digest compared.

    Args:
        comm: the ranks of the plan.
        plan: equal on all of them.
        sources: this rank's parts at the target.
        targets: the parts of its new state.
        max_bucket_nbytes: bound on what is under way to, or from, all peers together; equal on all
            ranks. A message to each of them may be 1 MiB in any case.

    Attributes:
        sources: ranks that this one receives from.
        sent_nbytes: that it sends, all in all.
        received_nbytes: that it receives.
    """

    def __init__(
        self,
        comm: Communicator,
        plan: RecoveryPlan,
        sources: Mapping[str, FlatPart],
        targets: Mapping[str, FlatPart],
        max_bucket_nbytes: int,
    ) -> None:
        self._comm = comm
        self._plan = plan
        self._from = sources
        self._to = targets
        # Sender and receiver cut a copy alike: the bound comes from the plan, and from an argument
        # that is the same on all ranks.
        self._max_nbytes = max(_MIN_MESSAGE_NBYTES, max_bucket_nbytes // max(1, plan.max_peers()))
        self._out: defaultdict[int, list[_Item]] = defaultdict(list)
        self._in: defaultdict[int, list[_Item]] = defaultdict(list)
        self._sent: defaultdict[int, list[str]] = defaultdict(list)
        self._arrived: defaultdict[int, list[str]] = defaultdict(list)
        self._failure: Exception | None = None
        self.sources = tuple(sorted({c.source for c in plan.copies if c.receiver == comm.rank}))
        self.sent_nbytes = sum(c.nbytes for c in plan.copies if c.source == comm.rank)
        self.received_nbytes = sum(c.nbytes for c in plan.copies if c.receiver == comm.rank)

    def copy_own(self) -> int:
        """Copy this rank's own parts over to the new state; bytes copied."""
        copied = 0
        for part_id in self._plan.local_parts(self._comm.rank):
            if part_id in self._to:
                copied += self._to[part_id].copy_from(self._from[part_id])
        return copied

    def run(self) -> None:
        """Carry all the bytes, and compare their digests. Collective."""
        if not self._plan.copies:
            return
        for number in range(max(agree_and_gather(self._comm, self._prepare))):
            self._round(number)
        claimed = agree_and_gather(self._comm, self._claims)
        agree(self._comm, lambda: self._verify(claimed))

    def _prepare(self) -> int:
        rank = self._comm.rank
        for copy in self._plan.copies:
            if copy.source == rank:
                self._add(self._out[copy.receiver], self._from[copy.part_id], copy, copy.receiver)
            if copy.receiver == rank:
                self._to[copy.part_id].require_fillable()
                self._add(self._in[copy.source], self._to[copy.part_id], copy, copy.source)
        return max(map(len, (*self._out.values(), *self._in.values())), default=0)

    def _add(self, items: list[_Item], part: FlatPart, copy: ByteCopy, peer: int) -> None:
        messages = part.messages(copy.start, copy.nbytes, self._max_nbytes)
        items.extend(_Item(copy, message, peer) for message in messages)

    def _round(self, number: int) -> None:
        # Agreed on, as there may be no memory for it on one rank, and nobody is to wait for that.
        staged = agree(self._comm, lambda: self._staged(number))
        exchange = self._comm.begin_exchange(staged.sends, staged.receives)
        with self._noting_failures():
            for item, data in staged.going:
                self._sent[item.peer].append(_digest(data))
        exchange.wait()
        with self._noting_failures():
            for item, landing in staged.coming:
                self._to[item.copy.part_id].land(item.message, landing)
                self._arrived[item.peer].append(_digest(landing))

    def _staged(self, number: int) -> _Staged:
        """The messages of a round, with those that go out in order, and room for the others."""
        self._require_no_failure()
        device = self._comm.device
        out = [items[number] for items in self._out.values() if number < len(items)]
        into = [items[number] for items in self._in.values() if number < len(items)]
        try:
            going = [(i, self._from[i.copy.part_id].outgoing(i.message, device)) for i in out]
            coming = [(i, self._to[i.copy.part_id].landing(i.message, device)) for i in into]
        except (MemoryError, RuntimeError) as error:  # CUDA's is one of the latter
            raise RestartError(f"no room for messages: {error}") from error
        return _Staged(
            going,
            coming,
            [Send(item.peer, data) for item, data in going],
            [Receive(item.peer, landing) for item, landing in coming],
        )

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """What fails here is raised in the next step that all agree on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised there
            self._failure = self._failure or error

    def _require_no_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _claims(self) -> dict[str, list[str]]:
        """The digests of what this rank has sent, by receiver."""
        self._require_no_failure()
        return {str(to): found for to, found in self._sent.items()}

    def _verify(self, claimed: Sequence[Mapping[str, Sequence[str]]]) -> None:
        for source, items in sorted(self._in.items()):
            expected = claimed[source].get(str(self._comm.rank), ())
            for item, sent, found in zip(items, expected, self._arrived[source], strict=True):
                if sent != found:
                    at = item.message.byte_offset
                    raise CorruptCheckpointError(
                        f"{item.copy.part_id}: bytes {at} to {at + item.message.nbytes} from rank "
                        f"{self._comm.global_rank(source)} have digest {found}, expected {sent}",
                        key=item.copy.part_id,
                    )
        for part in self._to.values():
            part.settle()


def _digest(data: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(to_host([data])[0].data)
