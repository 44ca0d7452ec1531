"""A part as one stretch of bytes: its tensors by name, one right behind the other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import xxhash

from dist_ckpt_strategies.device import (
    as_bytes,
    is_in_order,
    may_overlap,
    require_plain,
    to_host,
)
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.plan.messages import Message, Slice, build_messages
from dist_ckpt_strategies.plan.recover import PartFacts

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


@dataclass(frozen=True, slots=True)
class LayoutDifference:
    """A tensor that two ranks have differently; None where one has none of that name."""

    name: str
    first: tuple[str, tuple[int, ...]] | None
    second: tuple[str, tuple[int, ...]] | None

    def __str__(self) -> str:
        """In words."""
        shown = [
            "no such tensor" if one is None else f"{one[0].removeprefix('torch.')} {one[1]}"
            for one in (self.first, self.second)
        ]
        return f"{self.name}: {shown[0]} and {shown[1]}"


def layout_differences(
    first: Sequence[TensorLine], second: Sequence[TensorLine]
) -> list[LayoutDifference]:
    """The tensors in which two lists of them differ."""
    mine = {name: (dtype, tuple(shape)) for name, dtype, shape in first}
    theirs = {name: (dtype, tuple(shape)) for name, dtype, shape in second}
    return [
        LayoutDifference(name, mine.get(name), theirs.get(name))
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
