"""The interface of a training for recovery, and its state in memory through a fault.

A training has its state by name, its step, and how an update is finished. Its replicated shards
travel as flat ranges of bytes; digests vouch for what is kept. A lock marks the time of an update.
"""

from __future__ import annotations

import copy
import io
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, Self, cast

import torch
import xxhash

from dist_ckpt_strategies.comm.tensor_bytes import TensorBytes
from dist_ckpt_strategies.device import HostSnapshot, require_plain, to_host
from dist_ckpt_strategies.errors import PlanError, RestartError, StorageError, StrategyError
from dist_ckpt_strategies.formats.objects import dump_object
from dist_ckpt_strategies.recovery.plan import Phase, ShardInfo

_DIGEST_CHUNK_NBYTES = 64 << 20
_PAUSE_S = 0.001

Shards = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors by shard id and name."""


class StateProvider(Protocol):
    """One rank's training state. Nothing here but ``gather_weights`` talks to other ranks.

    A *replicated shard* is a set of tensors; ranks that give one the same id hold equal copies of
    it. Two ranks need not have the same: the weights may be one of all ranks, a shard of the
    optimizer one of the two that hold it.
    """

    @property
    def step(self) -> int:
        """Steps that the state has seen; ``set_step`` changes it."""

    def set_step(self, step: int) -> None:
        """Take the state for that of ``step``; also called when one begins, with its number."""

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The live tensors, by shard id and name: recovery reads them, and writes into them.

        All of them are there from the beginning, an optimizer's moments too: a fresh rank can only
        receive what it has a place for.
        """

    def gathered_parts(self) -> frozenset[str]:
        """Ids of the shards of which ``gather_weights`` gathers every tensor."""

    def objects(self) -> Mapping[str, Any]:
        """State that is no tensor: schedulers, counters, data position. A copy, to be pickled.

        Equal on all ranks that share a shard. Also asked for in ``begin_step``: what is changed
        between that and the update is undone where the step is repeated.
        """

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """Take over what ``objects`` gave on another rank, or here before."""

    def apply_update(self) -> None:
        """Update this rank's shard, and its objects, from its final gradients.

        Local: no peer is asked, and none of the groups of the attempt that ended is left. Called
        for a rank whose step counts and that was interrupted before its update. What needs the
        other ranks, the norm of the gradients for one, is done before the step is committed.
        """

    def gather_weights(self) -> None:
        """Gather the weights from the shards. Collective over the ranks that share them.

        May be called again: equal shards give equal weights.
        """


class StepBuffers:
    """Buffers as they were when the step began; forward and collectives change the live ones."""

    def __init__(self, live: Callable[[], dict[str, torch.Tensor]]) -> None:
        self._live = live
        self._kept: dict[str, torch.Tensor] | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """The copies; the live ones before the first, and from the update to the step's end."""
        return self._live() if self._kept is None else self._kept

    def keep(self) -> None:
        """Copy the live ones: the step before has ended, and no collective changes them yet."""
        self._kept = {name: buffer.detach().clone() for name, buffer in self._live().items()}

    def accept(self) -> None:
        """Take the live ones for those of the state."""
        self._kept = None

    def restore(self) -> None:
        """Fill the live ones from the copies."""
        for live, kept in zip(self._live().values(), self.tensors().values(), strict=True):
            live.detach().copy_(kept)
        self.accept()


class ReplicatedState:
    """The part of a StateProvider that is the same wherever ranks gather nothing."""

    def __init__(self, step: int = 0) -> None:
        self._step = step

    @property
    def step(self) -> int:
        """See StateProvider."""
        return self._step

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        self._step = step

    def gathered_parts(self) -> frozenset[str]:
        """See StateProvider; none: every rank updates all that it has."""
        return frozenset()

    def gather_weights(self) -> None:
        """See StateProvider; there is nothing to gather."""


def provider_of(trainer: Any) -> StateProvider:
    """The StateProvider that a trainer has as ``state_provider``, or is; else a StrategyError."""
    found: Any = getattr(trainer, "state_provider", trainer)
    if not callable(getattr(found, "parts", None)):
        raise StrategyError(
            f"{type(trainer).__name__}: expected a StateProvider, or an object that has one as "
            "state_provider; CheckpointlessCallback and CheckpointlessCompatibleConnector give a "
            "trainer of Lightning one"
        )
    return cast("StateProvider", found)


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

    def inputs(self) -> ShardInfo:
        """This rank's shards for the planner."""
        lines = [
            (name, str(tensor.dtype), list(tensor.shape))
            for name, tensor in zip(self.names, self.tensors, strict=True)
        ]
        layout = xxhash.xxh3_64_hexdigest(json.dumps(lines).encode())
        return ShardInfo(self.shard_id, self.nbytes, layout)

    def tensor_digests(self) -> dict[str, str]:
        """xxh3 of the bytes of each tensor."""
        found: dict[str, str] = {}
        host = HostSnapshot()
        for number, name in enumerate(self.names):
            total, content = xxhash.xxh3_64(), self.bytes_of(number)
            for start in range(0, content.numel(), _DIGEST_CHUNK_NBYTES):
                total.update(to_host([content[start : start + _DIGEST_CHUNK_NBYTES]], host)[0].data)
            found[name] = total.hexdigest()
        return found

    def digest(self) -> str:
        """One digest of all bytes."""
        return xxhash.xxh3_64_hexdigest("".join(self.tensor_digests().values()).encode())

    def require_fillable(self) -> None:
        """Raise a PlanError unless bytes can be written into every tensor."""
        for name, tensor in zip(self.names, self.tensors, strict=True):
            require_plain(tensor, key=f"{self.shard_id}: {name}", is_filled=True)

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
    try:
        return dump_object(value, name="the state's objects")
    except StorageError as error:
        raise PlanError(f"{error}; so they cannot be sent to another rank") from error


def load_objects(content: bytes) -> Any:
    """The objects that a rank of this job gave ``dump_objects``; tensors are on the CPU."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)  # noqa: TID251 - not from disk


class MemoryChecksumManager:
    """The digests (xxh3) of every tensor of a state, of any dtype, at one step or at None."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._digests: dict[str, dict[str, str]] = {}

    def record(self, step: int, parts: Shards) -> None:
        """Take the digests of a state; looks at every byte."""
        self._digests = _digests_of(parts)
        self.step = step

    def differences(self, parts: Shards) -> list[str]:
        """The tensors that are not as they were recorded, each in a line that says how.

        None where nothing is recorded.
        """
        if self.step is None:
            return []
        found: list[str] = []
        now = _digests_of(parts)
        for shard_id in sorted(self._digests.keys() | now.keys()):
            before, after = self._digests.get(shard_id, {}), now.get(shard_id, {})
            found += [
                f"{shard_id}: {name}: has digest {after.get(name)}, expected {before.get(name)}"
                for name in sorted(before.keys() | after.keys())
                if before.get(name) != after.get(name)
            ]
        return found

    def clear(self) -> None:
        """Forget the digests."""
        self.step = None
        self._digests = {}


def _digests_of(shards: Shards) -> dict[str, dict[str, str]]:
    return {shard_id: one.tensor_digests() for shard_id, one in flat_shards(shards).items()}


@dataclass(frozen=True, slots=True)
class InMemoryCheckpoint:
    """A state, and how far it is; replaced as a whole, so that an interruption finds one.

    ``begun``: its objects when its step began; None before that, and from the update on.
    """

    provider: StateProvider
    step: int
    phase: Phase
    begun: Mapping[str, Any] | None = None

    def objects(self) -> Mapping[str, Any]:
        """The objects that belong to the tensors."""
        return self.provider.objects() if self.begun is None else self.begun

    def damage(self, recorded: MemoryChecksumManager | None) -> list[str]:
        """How it differs from the digests of its step's beginning, which the update ends."""
        if recorded is None or self.phase >= Phase.UPDATING or recorded.step != self.step:
            return []
        return recorded.differences(self.provider.parts())


class HeldTensors(ReplicatedState):
    """A StateProvider of tensors and objects at hand, which trains nothing."""

    def __init__(
        self,
        tensors: Callable[[], Shards],
        *,
        step: int = 0,
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(step)
        self.parts = tensors
        self._objects = objects

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider."""
        return self._objects

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider."""
        self._objects = copy.deepcopy(dict(objects))

    def apply_update(self) -> NoReturn:
        """Raise a RestartError: held tensors have no gradients."""
        raise RestartError("held tensors have no gradients to update from")


def copied_to_host(checkpoint: InMemoryCheckpoint, shards: Shards) -> InMemoryCheckpoint:
    """A state whose tensors, those of ``shards``, are copies on the host."""
    flat_shards(shards)  # a tensor without memory cannot be copied
    every = [tensor for tensors in shards.values() for tensor in tensors.values()]
    copies = iter(HostSnapshot().take(every))
    copied = {shard_id: dict(zip(names, copies)) for shard_id, names in shards.items()}  # noqa: B905 - as many as there are names
    objects = copy.deepcopy(dict(checkpoint.objects()))
    host = HeldTensors(lambda: copied, step=checkpoint.step, objects=objects)
    return InMemoryCheckpoint(host, checkpoint.step, checkpoint.phase)


class ParameterUpdateLock:
    """Held by the one thread that changes parameters.

    Waiting for it is done in slices, so that an exception that another thread or a signal raises
    arrives. Taking it is one operation of the interpreter: a signal handler that looks at
    ``held_by`` sees it either held or not, never in between.
    """

    def __init__(self) -> None:
        self._slot: dict[str, int] = {}

    def acquire(self) -> None:
        """Take the lock, however long that takes; a RestartError if this thread has it already."""
        own = threading.get_ident()
        if self.held_by(own):
            raise RestartError("the parameter update lock is held by this thread already")
        while self._slot.setdefault("owner", own) != own:
            time.sleep(_PAUSE_S)

    def release(self) -> None:
        """Give the lock back; a RestartError unless this thread holds it."""
        owner = self._slot.get("owner")
        if owner != threading.get_ident():
            who = "by no thread" if owner is None else f"by thread {owner}"
            raise RestartError(
                f"thread {threading.get_ident()} gives the parameter update lock back: it is held "
                f"{who}"
            )
        self._slot.pop("owner")

    def held_by(self, thread_id: int) -> bool:
        """Whether the thread of that ``threading.get_ident()`` holds the lock."""
        return self._slot.get("owner") == thread_id

    def locked(self) -> bool:
        """Whether any thread holds the lock."""
        return bool(self._slot)

    def __enter__(self) -> Self:
        """Take the lock."""
        self.acquire()
        return self

    def __exit__(self, *_error: object) -> None:
        """Give it back."""
        self.release()
