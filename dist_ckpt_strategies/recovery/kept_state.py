"""What a rank keeps through a fault."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.recovery.part_transfer import FlatPart, flat_parts
from dist_ckpt_strategies.recovery.plan import HeldState, Phase
from dist_ckpt_strategies.recovery.provider import StateProvider

logger = logging.getLogger(__name__)

Parts = Mapping[str, Mapping[str, torch.Tensor]]


class MemoryChecksumManager:
    """The digests (xxh3) of every tensor of a state, of any dtype, at one step.

    Attributes:
        step: that the digests are of; None where there are none.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._digests: dict[str, dict[str, str]] = {}

    def record(self, step: int, parts: Parts) -> None:
        """Take the digests of a state; looks at every byte."""
        self._digests = _digests_of(parts)
        self.step = step

    def verify(self, parts: Parts) -> bool:
        """Whether the state is the recorded one, bit for bit; True where nothing is recorded."""
        return not self.differences(parts)

    def differences(self, parts: Parts) -> list[str]:
        """The tensors that are not as they were recorded, each in a line that says how."""
        if self.step is None:
            return []
        found: list[str] = []
        now = _digests_of(parts)
        for part_id in sorted(self._digests.keys() | now.keys()):
            before, after = self._digests.get(part_id, {}), now.get(part_id, {})
            found += [
                f"{part_id}: {name}: has digest {after.get(name)}, expected {before.get(name)}"
                for name in sorted(before.keys() | after.keys())
                if before.get(name) != after.get(name)
            ]
        return found

    def clear(self) -> None:
        """Forget the digests."""
        self.step = None
        self._digests = {}


def _digests_of(parts: Parts) -> dict[str, dict[str, str]]:
    return {part_id: part.tensor_digests() for part_id, part in flat_parts(parts).items()}


@dataclass(frozen=True, slots=True)
class KeptState:
    """A state, and how far it is. Replaced as a whole, so that an interruption finds one or other.

    Attributes:
        provider: whose tensors are live.
        step: that it is in.
        phase: how far it is within it.
    """

    provider: StateProvider
    step: int
    phase: Phase


def held_state(
    kept: KeptState | None,
    parts: Mapping[str, FlatPart],
    recorded: MemoryChecksumManager | None,
    *,
    with_digests: bool,
) -> tuple[HeldState | None, str]:
    """What a rank offers to others; of a state that is not what it was, only how far it had come.

    Args:
        kept: what it has; None if nothing.
        parts: of it that others may need.
        recorded: digests of its beginning; None: they are not looked at, and none are told.
        with_digests: tell those of the parts, where they are what a recovery would send.

    Returns:
        It, and why nothing, or no part, in words.
    """
    if kept is None:
        return None, "has no state"
    damage = damage_of(kept, recorded)
    if damage:
        logger.error("the state in memory is not used: %s", "; ".join(damage))
        return HeldState(kept.step, kept.phase, ()), damage[0]
    tells = with_digests and recorded is not None and kept.phase < Phase.COMMITTED
    found = tuple(part.facts(with_digest=tells) for part in parts.values())
    return HeldState(kept.step, kept.phase, found), ""


def damage_of(kept: KeptState, recorded: MemoryChecksumManager | None) -> list[str]:
    """How the state differs from its digests; from the update on they are of what it was before."""
    if recorded is None or kept.phase >= Phase.UPDATING or recorded.step != kept.step:
        return []
    return recorded.differences(kept.provider.parts())


class HeldTensors:
    """A StateProvider of tensors and objects at hand, which trains nothing.

    Args:
        tensors: gives the tensors, by part id and name.
        step: that they are in.
        gathered: ids of the parts that are made anew from others.
        objects: the state that is no tensor.
    """

    def __init__(
        self,
        tensors: Callable[[], Parts],
        *,
        step: int = 0,
        gathered: frozenset[str] = frozenset(),
        objects: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._tensors = tensors
        self._gathered = gathered
        self._objects = objects
        self._step = step

    @property
    def step(self) -> int:
        """See StateProvider."""
        return self._step

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        self._step = step

    def parts(self) -> Parts:
        """See StateProvider."""
        return self._tensors()

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
        """Held tensors have no gradients.

        Raises:
            RestartError: always.
        """
        raise RestartError("held tensors have no gradients to update from")

    def gather_weights(self) -> None:
        """See StateProvider; nothing trains with these."""


def host_copy(provider: StateProvider, step: int, *, holds_parts: bool = True) -> HeldTensors:
    """A copy of a state on the host: others can take it over.

    Args:
        provider: what is copied.
        step: that it is in.
        holds_parts: whether its tensors are; not of a torn state, of which only the step counts.
    """
    parts = provider.parts() if holds_parts else {}
    copied = {
        part_id: {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        for part_id, tensors in parts.items()
    }
    return HeldTensors(
        lambda: copied,
        step=step,
        gathered=provider.gathered_parts(),
        objects=copy.deepcopy(dict(provider.objects())),
    )


class PartsView:
    """A StateProvider of another one's state, with some of its tensors only.

    Args:
        provider: whose state it is.
        parts: gives the tensors of this view, as they are when asked for.
    """

    def __init__(self, provider: StateProvider, parts: Callable[[], Parts]) -> None:
        self._provider = provider
        self.parts = parts
        self.set_step = provider.set_step
        self.gathered_parts = provider.gathered_parts
        self.objects = provider.objects
        self.load_objects = provider.load_objects
        self.apply_update = provider.apply_update
        self.gather_weights = provider.gather_weights

    @property
    def step(self) -> int:
        """See StateProvider."""
        return self._provider.step
