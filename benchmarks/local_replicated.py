"""Save every rank's state to its node with a copy at a peer, and load it, beside the baseline.

    python benchmarks/local_replicated.py --out local_replicated.jsonl

Four ranks, each a node of its own with a directory of its own; cliques of two; on a disk and on a
memory file system. Each round: save, the blocking part of an asynchronous save, load, and load
after rank 1's directory is gone. Every load is checked. The first round is not counted.

The baselines: of the blocking part, one copy of the rank's bytes into memory that is in use; of a
save, the exchange of the bytes between the two of a clique over gloo, then two plain files written
and flushed; of a load, reading a file into memory in use; of a recovery, for rank 1 sending the
bytes instead.

``nvrx`` is nvidia-resiliency-ext, with a few stand-ins for CUDA; it does not flush its files.
``nvrx, flushed`` is the same with its files flushed at the end of a save, as the others do.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Final, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script finds its neighbours only

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import rounds
from benchmarks.common.command_line import Parser, open_output
from benchmarks.common.disks import file_system, retire, touch_memory, workspace
from benchmarks.page.subjects import FLUSHED_NVRX, LOCAL_BASELINE, NVRX
from dist_ckpt_strategies.cli.bench_rank import SECONDS, Sample, interleaved
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)

MANAGER = "local manager"
NAMES: Final = (LOCAL_BASELINE, MANAGER, NVRX, FLUSHED_NVRX)
_MIB = 1 << 20
_NUM_RANKS = 4
_TENSOR_NBYTES = 4 << 20
_LOST_RANK = 1

Tensors = Sequence[torch.Tensor]


class LocalCandidate(Protocol):
    """One way to keep local checkpoints: this rank's tensors, and a copy of its peer's.

    Every method is collective. ``begin`` is the part of an asynchronous save that training waits
    for, ``finish`` the rest. At a load one rank may have lost its directory.
    """

    def save(self, root: Path, iteration: int) -> None: ...

    def begin(self, root: Path, iteration: int) -> None: ...

    def finish(self) -> None: ...

    def load(self, root: Path) -> Tensors: ...


class _Baseline:
    """What the steps come down to, in one stream each."""

    def __init__(self, rank: int, tensors: Tensors) -> None:
        self._rank = rank
        self._peer = rank ^ 1
        self._tensors = tensors
        self._copies = [tensor.clone() for tensor in tensors]

    def save(self, root: Path, iteration: int) -> None:
        """Exchange everything, then write both files and flush them."""
        del iteration
        for own, copy in zip(self._tensors, self._copies, strict=True):
            for work in (dist.isend(own, self._peer), dist.irecv(copy, self._peer)):
                assert work is not None  # noqa: S101 - both ranks are in the group
                work.wait()
        root.mkdir(parents=True, exist_ok=True)
        for rank, tensors in ((self._rank, self._tensors), (self._peer, self._copies)):
            with (root / str(rank)).open("wb", buffering=0) as file:
                for tensor in tensors:
                    file.write(tensor.numpy().data)
                os.fsync(file.fileno())

    def begin(self, root: Path, iteration: int) -> None:
        """Copy everything."""
        del root, iteration
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)

    def finish(self) -> None:
        """Nothing is left to do."""

    def load(self, root: Path) -> Tensors:
        """Read the own file, or receive it from the peer, which reads its copy."""
        if root.exists():
            with (root / str(self._rank)).open("rb", buffering=0) as file:
                for copy in self._copies:
                    file.readinto(copy.numpy().view(np.uint8).data)
        else:
            for copy in self._copies:
                dist.recv(copy, self._peer)
        if not root.with_name(f"node{self._peer}").exists():
            spare = torch.empty_like(self._tensors[0])
            with (root / str(self._peer)).open("rb", buffering=0) as file:
                for _ in self._tensors:
                    file.readinto(spare.numpy().view(np.uint8).data)
                    dist.send(spare, self._peer)
        return self._copies


class _Manager:
    """This package's manager."""

    def __init__(self, tensors: Tensors) -> None:
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

    def load(self, root: Path) -> Tensors:
        state, _ = self._manager(root).load()
        return list(state.tensors)

    def _manager(self, root: Path) -> LocalCheckpointManager:
        if root not in self._managers:
            self._managers[root] = LocalCheckpointManager(root, repl_strategy=self._strategy)
        return self._managers[root]

    def _state(self) -> BasicTensorAwareStateDict:
        return BasicTensorAwareStateDict({"model": list(self._tensors)})


def _candidate(name: str, rank: int, tensors: Tensors) -> LocalCandidate:
    if name == LOCAL_BASELINE:
        return _Baseline(rank, tensors)
    if name == MANAGER:
        return _Manager(tensors)
    from benchmarks.common.nvrx import Nvrx  # noqa: PLC0415 - imported where it takes part

    nvrx: LocalCandidate = Nvrx(tensors, flushes=name == FLUSHED_NVRX)
    return nvrx


def measure(nbytes: int, names: Sequence[str], place: Path, repetitions: int) -> list[Sample]:
    """All steps in one place, on one of the ranks. Collective.

    Raises:
        ValueError: a load returned other values than were saved.
    """
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    shape = (min(nbytes, _TENSOR_NBYTES) // 4,)
    count = max(1, nbytes // _TENSOR_NBYTES)
    tensors = [torch.randn(shape, generator=generator) for _ in range(count)]
    candidates = {name: _candidate(name, rank, tensors) for name in names}
    samples, loaded = [], list[Tensors]()
    for repetition, name in interleaved(names, repetitions):
        one, root = candidates[name], place / name / f"node{rank}"
        load = lambda one=one, root=root: loaded.append(one.load(root))  # noqa: E731
        steps: dict[str, Callable[[], object]] = {
            "save": partial(one.save, root, 2 * repetition + 1),
            "blocking part": partial(one.begin, root, 2 * repetition + 2),
            "load": load,
            "recovery": load,
        }
        for step, call in steps.items():
            if step == "recovery" and rank == _LOST_RANK:
                retire(root, place / "attic")
            rounds.on_first_rank(touch_memory, 2 * nbytes * _NUM_RANKS)
            seconds = rounds.timed(call)
            if step == "blocking part":
                one.finish()
            rounds.on_first_rank(os.sync)  # some candidates do not flush their files
            while loaded:
                pairs = zip(loaded.pop(), tensors, strict=True)
                if not all(torch.equal(one, other) for one, other in pairs):
                    raise ValueError(f"{name}: {step} returned other values than were saved")
            if repetition > 0:
                samples.append(Sample(step, name, repetition, {SECONDS: seconds}))
        rounds.on_first_rank(retire, place / name, place / "attic")
    return samples


def main() -> None:
    """Save, load and recover local checkpoints with every candidate in turn."""
    parser = Parser(__doc__)
    parser.add_comparison(NAMES, (LOCAL_BASELINE,), sizes_gb=(), repetitions=3)
    parser.add_repeated("mib", (32, 256), "MiB of each rank's state", type=int)
    options = parser.parse()
    sizes = [_MIB] if options.smoke else [mib * _MIB for mib in options.mib]
    with open_output(options.out, __file__) as output:
        names = options.names
        if find_spec("nvidia_resiliency_ext") is None:
            for name in {NVRX, FLUSHED_NVRX} & {*names}:
                output.skip(name, "nvidia_resiliency_ext is not installed")
                names.remove(name)
        for nbytes, parent in product(sizes, options.directory):
            with workspace(parent) as place:
                args = (nbytes, names, place, options.repetitions)
                found = rounds.run_on_ranks(_NUM_RANKS, measure, *args, timeout_s=options.timeout_s)
            case = {"file_system": file_system(parent), "rank_nbytes": nbytes}
            output.write_samples({**case, "num_ranks": _NUM_RANKS, "num_copies": 2}, found[0])


if __name__ == "__main__":
    main()
