"""What a rank does: it saves, and loads into tensors that are there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
import xxhash

from benchmarks.common.disks import flush_share
from benchmarks.common.processes import RankContext
from benchmarks.common.states import Shard
from benchmarks.contenders.one_state import Contender, Make, Tensors


class Target:
    """Tensors that loads fill, and what they are to be filled with: what they hold now."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._digests = {key: _digest(tensor) for key, tensor in tensors.items()}

    def clear(self) -> None:
        """Overwrite the tensors, so that a load that does nothing is found out."""
        for tensor in self._tensors.values():
            tensor.zero_()

    def accept(self, loaded: Tensors) -> None:
        """Copy from tensors that are not these themselves."""
        for key, tensor in self._tensors.items():
            if loaded[key].data_ptr() != tensor.data_ptr():
                tensor.copy_(loaded[key])

    def check(self, name: str) -> None:
        """Compare the tensors with what they are to hold.

        Raises:
            ValueError: one differs.
        """
        for key, tensor in self._tensors.items():
            if _digest(tensor) != self._digests[key]:
                raise ValueError(f"{key}: {name} loaded other values than were saved")


def _digest(tensor: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(tensor.view(-1).view(torch.uint8).numpy().data)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A contender, and what its loads fill."""

    contender: Contender
    target: Target


class Worker:
    """One rank: every contender over the same shards."""

    def __init__(self, context: RankContext, nbytes: int, entrants: Mapping[str, Entrant]) -> None:
        self._context = context
        self._nbytes = nbytes
        self._entrants = entrants

    @classmethod
    def over(
        cls,
        context: RankContext,
        shards: tuple[Shard, ...],
        makers: Mapping[str, Make],
        names: Sequence[str],
    ) -> Self:
        """One rank whose contenders, made by the makers, all have the same shards. Collective."""
        target = Target({shard.key: shard.tensor for shard in shards})
        entrants = {name: Entrant(makers[name](shards), target) for name in names}
        return cls(context, sum(shard.tensor.nbytes for shard in shards), entrants)

    def nbytes(self) -> int:
        """Of this rank's shards."""
        return self._nbytes

    def save(self, name: str, directory: Path) -> None:
        """Let the contender save. Timed."""
        self._entrants[name].contender.save(directory)

    def flush(self, directory: Path) -> None:
        """Flush this rank's share of the files in ``directory``. Timed."""
        flush_share(directory, self._context.global_rank, self._context.num_ranks)

    def clear(self, name: str) -> None:
        """Overwrite what the contender is about to load."""
        self._entrants[name].target.clear()

    def load(self, name: str, directory: Path) -> None:
        """Let the contender load, and see to it that the data is in its target. Timed."""
        entrant = self._entrants[name]
        entrant.target.accept(entrant.contender.load(directory))

    def check(self, name: str) -> None:
        """Compare what the contender has loaded with what was saved.

        Raises:
            ValueError: a tensor differs.
        """
        self._entrants[name].target.check(name)
