"""What a rank keeps through a fault."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from dist_ckpt_strategies.device import to_host
from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.recovery.checksums import MemoryChecksumManager
from dist_ckpt_strategies.recovery.part_transfer import FlatPart
from dist_ckpt_strategies.recovery.plan import HeldState, Phase
from dist_ckpt_strategies.recovery.state_provider import HasLateObjects, StateProvider

logger = logging.getLogger(__name__)


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
    no_objects = why_no_objects(kept)
    if damage:
        logger.error("the state in memory is not used: %s", "; ".join(damage))
        return HeldState(kept.step, kept.phase, (), no_objects), damage[0]
    tells = with_digests and recorded is not None and kept.phase < Phase.COMMITTED
    found = tuple(part.facts(with_digest=tells) for part in parts.values())
    return HeldState(kept.step, kept.phase, found, no_objects), ""


def why_no_objects(kept: KeptState) -> str:
    """Of the step after this one; a provider that does not say has them with its update."""
    if kept.phase is Phase.RUNNING or not isinstance(kept.provider, HasLateObjects):
        return ""
    return kept.provider.why_no_objects()


def damage_of(kept: KeptState, recorded: MemoryChecksumManager | None) -> list[str]:
    """How the state differs from its digests; from the update on they are of what it was before."""
    if recorded is None or kept.phase >= Phase.UPDATING or recorded.step != kept.step:
        return []
    return recorded.differences(kept.provider.parts())


class HostCopy:
    """A copy of a state on the host, as a StateProvider: others can take it over.

    Args:
        provider: what is copied.
        holds_parts: whether its tensors are; not of a torn state, of which only the step counts.
    """

    def __init__(self, provider: StateProvider, step: int, *, holds_parts: bool = True) -> None:
        self._step = step
        self._objects = copy.deepcopy(dict(provider.objects()))
        self._gathered = provider.gathered_parts()
        self._parts = {
            part_id: _on_host(tensors)
            for part_id, tensors in (provider.parts().items() if holds_parts else ())
        }

    @property
    def step(self) -> int:
        """See StateProvider."""
        return self._step

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        self._step = step

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateProvider."""
        return self._parts

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
        """A copy has no gradients.

        Raises:
            RestartError: always.
        """
        raise RestartError("a copy on the host has no gradients to update from")

    def gather_weights(self) -> NoReturn:
        """A copy trains nothing.

        Raises:
            RestartError: always.
        """
        raise RestartError("a copy on the host gathers no weights")


class PartsView:
    """A StateProvider of another one's state, with some of its tensors only.

    Args:
        provider: whose state it is.
        parts: gives the tensors of this view, as they are when asked for.
        is_bare: whether the view is of tensors alone: no objects, no step, nothing to gather.
    """

    def __init__(
        self,
        provider: StateProvider,
        parts: Callable[[], Mapping[str, Mapping[str, torch.Tensor]]],
        *,
        is_bare: bool = False,
    ) -> None:
        self._provider = provider
        self._parts = parts
        self._is_bare = is_bare

    @property
    def step(self) -> int:
        """See StateProvider."""
        return 0 if self._is_bare else self._provider.step

    def set_step(self, step: int) -> None:
        """See StateProvider."""
        if not self._is_bare:
            self._provider.set_step(step)

    def parts(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        """See StateProvider."""
        return self._parts()

    def gathered_parts(self) -> frozenset[str]:
        """See StateProvider."""
        return frozenset() if self._is_bare else self._provider.gathered_parts()

    def objects(self) -> Mapping[str, Any]:
        """See StateProvider."""
        return {} if self._is_bare else self._provider.objects()

    def load_objects(self, objects: Mapping[str, Any]) -> None:
        """See StateProvider."""
        if not self._is_bare:
            self._provider.load_objects(objects)

    def apply_update(self) -> None:
        """See StateProvider."""
        self._provider.apply_update()

    def gather_weights(self) -> None:
        """See StateProvider."""
        self._provider.gather_weights()


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies, in pinned memory where they come from CUDA."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        source = tensor.detach()
        if source.device.type == "cpu":
            found[name] = source.clone()
            continue
        raw = source.resolve_conj().resolve_neg().contiguous()
        host = torch.from_numpy(to_host([raw.reshape(-1).view(torch.uint8)])[0])
        found[name] = host.view(raw.dtype).reshape(raw.shape)
    return found
