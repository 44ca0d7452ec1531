"""What recovery asks of a training, and the state that it keeps in memory through a fault.

A training has its state by name, its step, and how an update is finished; digests vouch for what is
kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, cast

import torch

from dist_ckpt_strategies.device import HostSnapshot
from dist_ckpt_strategies.errors import RestartError, StrategyError
from dist_ckpt_strategies.recovery.plan import Phase
from dist_ckpt_strategies.recovery.shards import Shards, flat_shards


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
        """Take the state for that of ``step``."""

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """The live tensors, by shard id and name: recovery reads them, and writes into them.

        All of them are there from the beginning, an optimizer's moments too: a fresh rank can only
        receive what it has a place for.
        """

    def gathered_parts(self) -> frozenset[str]:
        """Ids of the shards of which ``gather_weights`` gathers every tensor."""

    def objects(self) -> Mapping[str, Any]:
        """State that is no tensor: schedulers, counters, data position. A copy, to be pickled.

        Equal on all ranks that share a shard. It changes together with the tensors: in the update.
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


class HasStateProvider(Protocol):
    """What stands for a StateProvider: a trainer that an integration has given one."""

    state_provider: StateProvider


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


def provider_of(trainer: StateProvider | HasStateProvider) -> StateProvider:
    """The StateProvider that a trainer has as ``state_provider``, or is; else a StrategyError."""
    found: Any = getattr(trainer, "state_provider", trainer)
    if not callable(getattr(found, "parts", None)):
        raise StrategyError(
            f"{type(trainer).__name__}: expected a StateProvider, or an object that has one as "
            "state_provider; CheckpointlessCallback and CheckpointlessCompatibleConnector give a "
            "trainer of Lightning one"
        )
    return cast("StateProvider", found)


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
    """A state, and how far it is; replaced as a whole, so that an interruption finds one."""

    provider: StateProvider
    step: int
    phase: Phase

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
        gathered: frozenset[str] = frozenset(),
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(step)
        self.parts = tensors
        self._gathered = gathered
        self._objects = objects

    def gathered_parts(self) -> frozenset[str]:
        """See StateProvider."""
        return self._gathered

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider."""
        return self._objects

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider."""
        self._objects = copy.deepcopy(dict(objects))

    def apply_update(self) -> NoReturn:
        """Raise a RestartError: held tensors have no gradients."""
        raise RestartError("held tensors have no gradients to update from")


def host_copy(provider: StateProvider, shards: Shards, step: int) -> HeldTensors:
    """A copy of a state on the host, with these of its tensors: others can take it over."""
    every = [tensor for tensors in shards.values() for tensor in tensors.values()]
    copies = iter(HostSnapshot().take(every))
    copied = {shard_id: dict(zip(names, copies)) for shard_id, names in shards.items()}  # noqa: B905 - as many as there are names
    return HeldTensors(
        lambda: copied,
        step=step,
        gathered=provider.gathered_parts(),
        objects=copy.deepcopy(dict(provider.objects())),
    )
