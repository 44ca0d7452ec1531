"""Digests of the state in memory, to see whether it is still what it was."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dist_ckpt_strategies.recovery.part_transfer import flat_parts

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
