"""The replicated shards of a rank as flat ranges of bytes, and what else travels, as bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
import xxhash

from dist_ckpt_strategies.comm.exchange import Incoming, Outgoing
from dist_ckpt_strategies.device import TensorBytes, may_overlap, require_plain, to_host
from dist_ckpt_strategies.errors import PlanError
from dist_ckpt_strategies.recovery.plan import ShardCopy, ShardFacts

_DIGEST_CHUNK_NBYTES = 64 << 20

Shards = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by shard id and name."""


class FlatShard(TensorBytes):
    """The bytes of a shard's tensors, sorted by name, one right after the other.

    A tensor without memory of its own is a PlanError.
    """

    def __init__(self, shard_id: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.shard_id = shard_id
        self.names = sorted(tensors)
        for name in self.names:
            require_plain(tensors[name], key=f"{shard_id}: {name}")
        super().__init__([tensors[name] for name in self.names])

    def facts(self) -> ShardFacts:
        """What the planner needs to know."""
        lines = [
            (name, str(tensor.dtype), list(tensor.shape))
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]
        layout = xxhash.xxh3_64_hexdigest(json.dumps(lines).encode())
        return ShardFacts(self.shard_id, self.nbytes, layout)

    def tensor_digests(self) -> dict[str, str]:
        """xxh3 of the bytes of each tensor."""
        found: dict[str, str] = {}
        for number, name in enumerate(self.names):
            total, content = xxhash.xxh3_64(), self.bytes_of(number)
            for start in range(0, content.numel(), _DIGEST_CHUNK_NBYTES):
                total.update(to_host([content[start : start + _DIGEST_CHUNK_NBYTES]])[0].data)
            found[name] = total.hexdigest()
        return found

    def digest(self) -> str:
        """One digest of all bytes."""
        return xxhash.xxh3_64_hexdigest("".join(self.tensor_digests().values()).encode())

    def outgoing(self, copy: ShardCopy) -> Outgoing:
        """The shard, to be sent."""
        return Outgoing(self.shard_id, copy.receiver, self.nbytes, self.read)

    def incoming(self, copy: ShardCopy, device: torch.device) -> Incoming:
        """The shard, to be filled over a communicator of this device."""
        return Incoming(
            self.shard_id,
            copy.source,
            self.nbytes,
            self.write,
            lambda start, nbytes: self.landing(start, nbytes, device),
            self.shard_id,
        )

    def require_fillable(self) -> None:
        """Raise a PlanError unless bytes can be written into every tensor."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if may_overlap(tensor):
                raise PlanError(
                    f"{self.shard_id}: {name}: its elements share memory, so it cannot be filled",
                    key=self.shard_id,
                )

    def copy_from(self, other: FlatShard) -> int:
        """Copy the tensors of an equal shard; returns the bytes copied, none of shared memory."""
        copied = 0
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            if not _is_same_memory(mine, theirs):
                mine.copy_(theirs)
                copied += mine.numel() * mine.element_size()
        return copied


def flat_shards(shards: Shards) -> dict[str, FlatShard]:
    """The shards of a provider, by id, sorted."""
    return {shard_id: FlatShard(shard_id, shards[shard_id]) for shard_id in sorted(shards)}


def _is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.data_ptr() == second.data_ptr()
        and first.device == second.device
        and first.stride() == second.stride()
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
    )


def dump_objects(value: Any) -> bytes:
    """A value for another rank of this job; a PlanError if it cannot be pickled."""
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
