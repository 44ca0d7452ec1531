"""The replicated shards of a rank as flat ranges of bytes, and their way to other ranks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import xxhash

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.exchange import Blocks, Incoming, Outgoing
from dist_ckpt_strategies.device import TensorBytes, may_overlap, require_plain, to_host
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.recovery.plan import ByteCopy, PartFacts, RecoveryPlan

_DIGEST_CHUNK_NBYTES = 64 << 20

TensorLine = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


class FlatPart(TensorBytes):
    """The bytes of a part's tensors, sorted by name, one right behind the other.

    Args:
        part_id: for messages.
        tensors: by name.

    Raises:
        PlanError: a tensor has no memory of its own.
    """

    def __init__(self, part_id: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.part_id = part_id
        self.names = sorted(tensors)
        for name in self.names:
            require_plain(tensors[name], key=f"{part_id}: {name}")
        super().__init__([tensors[name] for name in self.names])

    def lines(self) -> list[TensorLine]:
        """Name, dtype and shape of each tensor."""
        return [
            (name, str(tensor.dtype), tuple(tensor.shape))
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]

    def facts(self, *, with_digest: bool = False) -> PartFacts:
        """What the planner needs to know; reads every byte for the digest."""
        layout = xxhash.xxh3_64_hexdigest(json.dumps(self.lines()).encode())
        return PartFacts(self.part_id, self.nbytes, layout, self.digest() if with_digest else None)

    def digest(self) -> str:
        """xxh3 of all bytes."""
        total = xxhash.xxh3_64()
        for number in range(len(self.names)):
            content = self.bytes_of(number)
            for start in range(0, content.numel(), _DIGEST_CHUNK_NBYTES):
                chunk = content[start : start + _DIGEST_CHUNK_NBYTES]
                total.update(to_host([chunk])[0].data)
        return total.hexdigest()

    def tensor_digests(self) -> dict[str, str]:
        """xxh3 of the bytes of each tensor."""
        return {
            name: xxhash.xxh3_64_hexdigest(to_host([self.bytes_of(number)])[0].data)
            for number, name in enumerate(self.names)
        }

    def require_fillable(self) -> None:
        """Raise unless bytes can be written into every tensor.

        Raises:
            PlanError: elements of one share their memory.
        """
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if may_overlap(tensor):
                raise PlanError(
                    f"{self.part_id}: {name}: its elements share memory, so it cannot be filled",
                    key=self.part_id,
                )

    def copy_from(self, other: FlatPart) -> int:
        """Copy the tensors of an equal part; returns the bytes copied, none of shared memory."""
        copied = 0
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            if not _is_same_memory(mine, theirs):
                mine.copy_(theirs)
                copied += mine.numel() * mine.element_size()
        return copied


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


def dump_objects(value: Any) -> bytes:
    """A value for another rank of this job.

    Raises:
        PlanError: it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:
        raise PlanError(
            f"the state's objects cannot be sent to another rank: {type(error).__name__}: {error}"
        ) from error
    return buffer.getvalue()


def load_objects(content: bytes) -> Any:
    """What ``dump_objects`` was given by a rank of this job; tensors are on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)  # noqa: TID251 - not from disk


def blocks_of(
    comm: Communicator,
    plan: RecoveryPlan,
    sources: Mapping[str, FlatPart],
    targets: Mapping[str, FlatPart],
    objects: Mapping[int, torch.Tensor],
) -> Blocks:
    """What this rank sends and receives: bytes of parts, then objects and random states.

    Args:
        comm: the ranks of the plan.
        plan: equal on all of them.
        sources: this rank's parts at the target.
        targets: the parts of its new state.
        objects: the bytes of ``dump_objects``, by rank: this rank's own, and memory for those that
            it receives.
    """
    outgoing: list[Outgoing] = []
    incoming: list[Incoming] = []
    for copy in plan.copies:
        name = f"{copy.part_id}: bytes {copy.start} to {copy.start + copy.nbytes}"
        if copy.source == comm.rank:
            read = _reader(sources[copy.part_id], copy)
            outgoing.append(Outgoing(name, copy.receiver, copy.nbytes, read))
        if copy.receiver == comm.rank:
            incoming.append(_incoming(name, targets[copy.part_id], copy, comm.device))
    for source, receiver in plan.message_pairs():
        name = "objects and random states"
        if source == comm.rank:
            own = TensorBytes([objects[source]])
            outgoing.append(Outgoing(name, receiver, own.nbytes, own.read))
        if receiver == comm.rank:
            found = TensorBytes([objects[source]])
            incoming.append(Incoming(name, source, found.nbytes, found.write))
    return outgoing, incoming


def _reader(part: FlatPart, copy: ByteCopy) -> Callable[[int, torch.Tensor], torch.Tensor]:
    return lambda start, buffer: part.read(copy.start + start, buffer)


def _incoming(name: str, part: FlatPart, copy: ByteCopy, device: torch.device) -> Incoming:
    return Incoming(
        name,
        copy.source,
        copy.nbytes,
        lambda start, content: part.write(copy.start + start, content),
        lambda start, nbytes: part.landing(copy.start + start, nbytes, device),
        copy.part_id,
    )
