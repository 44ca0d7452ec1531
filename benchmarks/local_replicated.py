"""Save every rank's state to its node with a copy at a peer, and get it back, beside the baseline.

    python benchmarks/local_replicated.py --out local_replicated.jsonl
    python benchmarks/local_replicated.py --smoke

Four ranks, each a node of its own with a directory of its own; cliques of two. Alternating
candidates, medians; on a disk and on a memory file system. Each round: save, the blocking part of
an asynchronous save, load, and load after rank 1's directory is gone. Every load is checked. The
first round is not counted.

The baselines: of the blocking part, one copy of the rank's bytes into memory that is in use; of a
save, the exchange of the bytes between the two of a clique over gloo, then two plain files written
and flushed; of a load, reading a file into memory in use; of a recovery, for rank 1 sending the
bytes instead. ``baseline, new memory`` loads into new memory, which a process that has just started
has to. The last column gives the ratio to the baseline of a save whatever the step: exchange
and write.

``nvrx`` is nvidia-resiliency-ext, with a few stand-ins for CUDA; it does not flush its files.
``nvrx, flushed`` is the same with its files flushed at the end of a save, as the others do.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import numpy as np
import torch
import torch.distributed as dist
import typer

from benchmarks.common.command_line import Comparison, Output, comparison_command
from benchmarks.common.disks import file_system, touch_memory, workspace
from benchmarks.common.processes import RankContext, Ranks, join_gloo
from benchmarks.common.rounds import SECONDS, Sample, alternate
from dist_ckpt_strategies.device import host_memory
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)

BASELINE, NVRX = "baseline", "nvrx"
NAMES = (BASELINE, "baseline, new memory", "local manager", NVRX, "nvrx, flushed")
STEPS = ("save", "blocking part", "load", "recovery")
_MIB = 1 << 20
_NUM_RANKS = 4
_TENSOR_NBYTES = 4 << 20
_LOST_RANK = 1


class LocalCandidate(Protocol):
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
    """One rank: every candidate over the same tensors."""

    def __init__(self, context: RankContext, nbytes: int, names: Sequence[str]) -> None:
        join_gloo(context)
        self._rank = context.global_rank
        generator = torch.Generator().manual_seed(self._rank)
        count = max(1, nbytes // _TENSOR_NBYTES)
        shape = (min(nbytes, _TENSOR_NBYTES) // 4,)
        self._tensors = [torch.randn(shape, generator=generator) for _ in range(count)]
        self._candidates = {name: _candidate(name, self._rank, self._tensors) for name in names}
        self._loaded: list[torch.Tensor] | None = None

    def save(self, name: str, directory: Path, repetition: int) -> None:
        """Save. Timed."""
        self._candidates[name].save(self._root(name, directory), 2 * repetition + 1)

    def blocking_part(self, name: str, directory: Path, repetition: int) -> None:
        """Begin an asynchronous save. Timed."""
        self._candidates[name].begin(self._root(name, directory), 2 * repetition + 2)

    def load(self, name: str, directory: Path, _repetition: int) -> None:
        """Load. Timed."""
        self._loaded = self._candidates[name].load(self._root(name, directory))

    def recovery(self, name: str, directory: Path, _repetition: int) -> None:
        """Load, after a loss. Timed."""
        self._loaded = self._candidates[name].recover(self._root(name, directory))

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
            self._candidates[name].finish()
        loaded, self._loaded = self._loaded, None
        if loaded is not None and not _are_equal(loaded, self._tensors):
            raise ValueError(f"{name}: {step} gave other values than were saved")

    def remove(self, name: str, directory: Path) -> None:
        """Remove all that a candidate has stored."""
        shutil.rmtree(self._root(name, directory), ignore_errors=True)

    def _root(self, name: str, directory: Path) -> Path:
        return directory / name / f"node{self._rank}"


def _are_equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


class _Baseline:
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


class _NewMemoryBaseline(_Baseline):
    """The same, but what is loaded goes to new memory, as in a process that has just started."""

    def load(self, root: Path) -> list[torch.Tensor]:
        self._renew()
        return super().load(root)

    def recover(self, root: Path) -> list[torch.Tensor]:
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
        self._manager(root).save(self._state(), iteration)

    def begin(self, root: Path, iteration: int) -> None:
        self._request = self._manager(root).save(self._state(), iteration, is_async=True)

    def finish(self) -> None:
        self._request.wait()

    def load(self, root: Path) -> list[torch.Tensor]:
        state, _ = self._manager(root).load()
        return list(state.tensors)

    def recover(self, root: Path) -> list[torch.Tensor]:
        return self.load(root)

    def _manager(self, root: Path) -> LocalCheckpointManager:
        if root not in self._managers:
            self._managers[root] = LocalCheckpointManager(root, repl_strategy=self._strategy)
        return self._managers[root]

    def _state(self) -> BasicTensorAwareStateDict:
        return BasicTensorAwareStateDict({"model": list(self._tensors)})


def _candidate(name: str, rank: int, tensors: Sequence[torch.Tensor]) -> LocalCandidate:
    if name.startswith(NVRX):
        from benchmarks.candidates import nvrx  # noqa: PLC0415 - imported where it takes part

        found: LocalCandidate = (nvrx.Nvrx if name == NVRX else nvrx.FlushedNvrx)(rank, tensors)
        return found
    return {BASELINE: _Baseline, "baseline, new memory": _NewMemoryBaseline}.get(name, _Manager)(
        rank, tensors
    )


def make_worker(nbytes: int, names: Sequence[str], context: RankContext) -> LocalWorker:
    """One of the ranks, in its process. Collective."""
    return LocalWorker(context, nbytes, names)


@dataclass(frozen=True, slots=True)
class LocalCase:
    """One size on one file system."""

    file_system: str
    rank_nbytes: int
    num_ranks: int = _NUM_RANKS
    num_copies: int = 2


def _rounds(
    ranks: Ranks, case: LocalCase, names: Sequence[str], directory: Path, repetitions: int
) -> Iterator[Sample]:
    """All steps of every candidate in turn."""
    for repetition, name in alternate(names, repetitions + 1):
        for step in STEPS:
            touch_memory(2 * case.rank_nbytes * case.num_ranks)
            if step == "recovery":
                ranks.step("lose", name, directory)
            seconds = ranks.step(step.replace(" ", "_"), name, directory, repetition).seconds
            ranks.step("settle", name, step)
            if repetition > 0:
                yield Sample(step, name, repetition, {SECONDS: seconds})
        ranks.step("remove", name, directory)


@comparison_command(NAMES, (BASELINE,), sizes_gb=())
def main(
    comparison: Comparison,
    output: Output,
    *,
    mib: Annotated[int, typer.Option(min=1, help="MiB of each rank's state.")] = 256,
) -> None:
    """Save, load and recover local checkpoints with every candidate in turn."""
    nbytes = (1 if comparison.is_smoke else mib) * _MIB
    args = ("benchmarks.local_replicated", nbytes, comparison.names)
    with Ranks(_NUM_RANKS, *args, timeout_s=comparison.timeout_s) as ranks:
        for place in comparison.places:
            case = LocalCase(file_system(place), nbytes)
            with workspace(place) as directory:
                rounds = _rounds(ranks, case, comparison.names, directory, comparison.repetitions)
                output.write_samples(case, rounds)


if __name__ == "__main__":
    typer.run(main)
