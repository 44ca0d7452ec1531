"""What a rank does in the benchmark of local checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.contenders.roster import (
    FLUSHED_NVRX,
    LOCAL_FLOOR,
    LOCAL_MANAGER,
    NEW_MEMORY_FLOOR,
    NVRX,
)
from benchmarks.measuring.harness import RankContext, join_gloo
from dist_ckpt_strategies.device import host_memory
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)

_TENSOR_NBYTES = 4 << 20
_LOST_RANK = 1


class LocalContender(Protocol):
    """One way to keep local checkpoints. Every method is collective."""

    def save(self, root: Path, iteration: int) -> None:
        """Store this rank's state, and a copy of its peer's."""
        ...

    def begin(self, root: Path, iteration: int) -> None:
        """The part of an asynchronous save that training waits for."""
        ...

    def finish(self) -> None:
        """The rest of it."""
        ...

    def load(self, root: Path) -> list[torch.Tensor]:
        """This rank's tensors."""
        ...

    def recover(self, root: Path) -> list[torch.Tensor]:
        """The same, after one rank has lost its directory."""
        ...


class LocalWorker:
    """One rank: every contender over the same tensors."""

    def __init__(self, context: RankContext, nbytes: int, names: Sequence[str]) -> None:
        join_gloo(context)
        self._rank = context.global_rank
        generator = torch.Generator().manual_seed(self._rank)
        count = max(1, nbytes // _TENSOR_NBYTES)
        shape = (min(nbytes, _TENSOR_NBYTES) // 4,)
        self._tensors = [torch.randn(shape, generator=generator) for _ in range(count)]
        self._contenders = {name: MAKERS[name](self._rank, self._tensors) for name in names}
        self._loaded: list[torch.Tensor] | None = None

    def save(self, name: str, directory: Path, repetition: int) -> None:
        """Save. Timed."""
        self._contenders[name].save(self._root(name, directory), 2 * repetition + 1)

    def blocking_part(self, name: str, directory: Path, repetition: int) -> None:
        """Begin an asynchronous save. Timed."""
        self._contenders[name].begin(self._root(name, directory), 2 * repetition + 2)

    def load(self, name: str, directory: Path, _repetition: int) -> None:
        """Load. Timed."""
        self._loaded = self._contenders[name].load(self._root(name, directory))

    def recovery(self, name: str, directory: Path, _repetition: int) -> None:
        """Load, after a loss. Timed."""
        self._loaded = self._contenders[name].recover(self._root(name, directory))

    def lose(self, name: str, directory: Path) -> None:
        """Remove the directory of one rank."""
        if self._rank == _LOST_RANK:
            shutil.rmtree(self._root(name, directory))
        dist.barrier()

    def settle(self, name: str, step: str) -> None:
        """End what goes on behind, and check what was loaded.

        Raises:
            ValueError: it is not what was saved.
        """
        if step == "blocking part":
            self._contenders[name].finish()
        loaded, self._loaded = self._loaded, None
        if loaded is not None and not _are_equal(loaded, self._tensors):
            raise ValueError(f"{name}: {step} gave other values than were saved")

    def remove(self, name: str, directory: Path) -> None:
        """Remove all that a contender has stored."""
        shutil.rmtree(self._root(name, directory), ignore_errors=True)

    def _root(self, name: str, directory: Path) -> Path:
        return directory / name / f"node{self._rank}"


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


class _Floor:
    """What the steps come down to, in one stream each."""

    def __init__(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        self._rank = rank
        self._peer = rank ^ 1
        self._tensors = tensors
        self._copies = [torch.zeros_like(tensor) for tensor in tensors]

    def save(self, root: Path, iteration: int) -> None:  # noqa: ARG002 - one of four alike
        """Exchange everything, then write both files and flush them."""
        self._exchange(self._tensors, self._copies)
        root.mkdir(parents=True, exist_ok=True)
        for name, tensors in ((str(self._rank), self._tensors), (str(self._peer), self._copies)):
            with (root / name).open("wb", buffering=0) as file:
                for tensor in tensors:
                    file.write(tensor.numpy().data)
                os.fsync(file.fileno())

    def begin(self, root: Path, iteration: int) -> None:  # noqa: ARG002
        """Copy everything."""
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)

    def finish(self) -> None:
        """Nothing is left to do."""

    def load(self, root: Path) -> list[torch.Tensor]:
        """Read the own file."""
        self._read(root / str(self._rank))
        return self._copies

    def recover(self, root: Path) -> list[torch.Tensor]:
        """Read the own file; but one rank's is gone, its peer reads the copy and sends it."""
        if self._rank != _LOST_RANK:
            self._read(root / str(self._rank))
        if self._rank == _LOST_RANK:
            for tensor in self._copies:
                dist.recv(tensor, self._peer)
        elif self._peer == _LOST_RANK:
            self._send_lost(root)
        return self._copies

    def _read(self, path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            for copy in self._copies:
                file.readinto(copy.numpy().view(np.uint8).data)

    def _send_lost(self, root: Path) -> None:
        spare = torch.empty_like(self._tensors[0])
        with (root / str(_LOST_RANK)).open("rb", buffering=0) as file:
            for _ in self._tensors:
                file.readinto(spare.numpy().view(np.uint8).data)
                dist.send(spare, _LOST_RANK)

    def _exchange(self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        for mine, theirs in zip(out, into, strict=True):
            for work in (dist.isend(mine, self._peer), dist.irecv(theirs, self._peer)):
                assert work is not None  # noqa: S101 - both ranks are in the group
                work.wait()


class _NewMemoryFloor(_Floor):
    """The same, but what is loaded goes to new memory, as in a process that has just started."""

    def load(self, root: Path) -> list[torch.Tensor]:
        """See LocalContender."""
        self._renew()
        return super().load(root)

    def recover(self, root: Path) -> list[torch.Tensor]:
        """See LocalContender."""
        self._renew()
        return super().recover(root)

    def _renew(self) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in self._tensors]
        memory = host_memory(sum(sizes), is_pinned=False)
        pieces = torch.split(memory, sizes)
        self._copies = [
            piece.view(tensor.dtype) for piece, tensor in zip(pieces, self._tensors, strict=True)
        ]


class _Manager:
    """This package's manager."""

    def __init__(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        self._rank = rank
        self._tensors = tensors
        self._strategy = CliqueReplicationStrategy.from_replication_params(1, 2)
        self._managers: dict[Path, LocalCheckpointManager] = {}
        self._request: Any = None

    def save(self, root: Path, iteration: int) -> None:
        """See LocalContender."""
        self._manager(root).save(self._state(), iteration)

    def begin(self, root: Path, iteration: int) -> None:
        """See LocalContender."""
        self._request = self._manager(root).save(self._state(), iteration, is_async=True)

    def finish(self) -> None:
        """See LocalContender."""
        self._request.wait()

    def load(self, root: Path) -> list[torch.Tensor]:
        """See LocalContender."""
        state, _ = self._manager(root).load()
        return list(state.tensors)

    def recover(self, root: Path) -> list[torch.Tensor]:
        """See LocalContender."""
        return self.load(root)

    def _manager(self, root: Path) -> LocalCheckpointManager:
        if root not in self._managers:
            self._managers[root] = LocalCheckpointManager(root, repl_strategy=self._strategy)
        return self._managers[root]

    def _state(self) -> BasicTensorAwareStateDict:
        return BasicTensorAwareStateDict({"model": list(self._tensors)})


def _nvrx(rank: int, tensors: Sequence[torch.Tensor]) -> LocalContender:
    """nvidia-resiliency-ext, imported where it takes part."""
    from benchmarks.contenders.nvrx import Nvrx  # noqa: PLC0415

    contender: LocalContender = Nvrx(rank, tensors)
    return contender


def _flushed_nvrx(rank: int, tensors: Sequence[torch.Tensor]) -> LocalContender:
    """The same, with its files flushed."""
    from benchmarks.contenders.nvrx import FlushedNvrx  # noqa: PLC0415

    contender: LocalContender = FlushedNvrx(rank, tensors)
    return contender


MAKERS: Mapping[str, Callable[[int, Sequence[torch.Tensor]], LocalContender]] = {
    LOCAL_FLOOR: _Floor,
    NEW_MEMORY_FLOOR: _NewMemoryFloor,
    LOCAL_MANAGER: _Manager,
    NVRX: _nvrx,
    FLUSHED_NVRX: _flushed_nvrx,
}


def make_worker(nbytes: int, names: Sequence[str], context: RankContext) -> LocalWorker:
    """One of the ranks, in its process. Collective."""
    return LocalWorker(context, nbytes, names)
