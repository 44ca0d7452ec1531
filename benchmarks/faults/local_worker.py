"""What a rank does in the fault campaign: local saves and loads, and whether what came back is it.

States follow from rank and iteration alone, so that whoever loads one knows what it has to be.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks.faults.outcomes import Ending, Outcome, refused
from benchmarks.measuring.harness import RankContext, join_gloo
from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.local.shard_format import LocalShardId

PRELOAD = ("benchmarks.local_faults",)
"""What ranks are forked with: all that the script imports. Nothing of it has been used."""

NUM_COPIES = 2
BUCKET_NBYTES = 64 << 10
_DTYPES = ("uint8", "int32", "bfloat16", "float16", "float8_e4m3fn", "complex64", "bool")


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """What all ranks of a campaign have in common.

    Attributes:
        root: holds a directory for each rank, which is a node of its own.
        large_nbytes: size of each of a state's large tensors.
        num_large: how many there are.
        keep: saves that are kept.
        timeout_s: longest wait for a peer.
    """

    root: Path
    large_nbytes: int
    num_large: int
    keep: int
    timeout_s: float

    def node(self, rank: int) -> Path:
        """The disk of a rank."""
        return self.root / f"node{rank}"

    def state(self, rank: int, iteration: int) -> dict[str, Any]:
        """What a rank has at an iteration."""
        generator = torch.Generator().manual_seed(1000 * iteration + rank)

        def bits(nbytes: int) -> torch.Tensor:
            return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

        large = [bits(self.large_nbytes).view(torch.float32) for _ in range(self.num_large)]
        small = {
            name: bits(16 * (5 + rank)).bitwise_and(1 if name == "bool" else 255)
            for name in _DTYPES
        }
        return {
            "iteration": iteration,
            "model": large,
            "small": {name: found.view(getattr(torch, name)) for name, found in small.items()},
            "nothing": (torch.empty(0, 3), None),
            "scalar": torch.tensor(0.5 + rank, dtype=torch.float64),
            "array": np.arange(100 + rank, dtype=np.int32) + iteration,
            "raw": bytes(range(100)),
            "text": f"rank {rank}",
        }


class KnownStates:
    """What each rank has to load. Threads may share it."""

    def __init__(self, spec: WorldSpec) -> None:
        self._spec = spec
        self._expected: dict[tuple[int, int], str] = {}

    def load(self, manager: LocalCheckpointManager, rank: int) -> Outcome:
        """Load, and compare every bit with what the rank had at that iteration. Collective."""
        try:
            state, text = manager.load()
        except CheckpointError as error:
            return refused(error)
        shard_id = LocalShardId.require(text)
        iteration = shard_id.save.iteration
        if (rank, iteration) not in self._expected:
            self._expected[rank, iteration] = fingerprint(self._spec.state(rank, iteration))
        is_same = fingerprint(state.state_dict) == self._expected[rank, iteration]
        if is_same and shard_id.global_rank == rank:
            return Outcome(Ending.LOADED, iteration)
        return Outcome(Ending.DIFFERENT, iteration, f"{text} is not what rank {rank} saved")


class ThreadManager(LocalCheckpointManager):
    """A manager whose ranks are threads of one process."""

    def __init__(self, spec: WorldSpec, comm: Communicator) -> None:
        super().__init__(spec.node(comm.rank), max_bucket_bytes=BUCKET_NBYTES)
        self._comm = comm

    def communicator(self, purpose: str, detail: str = "") -> Communicator:  # noqa: ARG002
        """The ranks that it was given."""
        return self._comm


class FaultWorker:
    """One rank and its manager."""

    def __init__(self, context: RankContext, spec: WorldSpec) -> None:
        join_gloo(context)
        self._rank, self._spec = context.global_rank, spec
        node = spec.node(self._rank)
        node.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(spec.root)  # where a killed rank may leave something
        self._manager = LocalCheckpointManager(
            node,
            repl_strategy=CliqueReplicationStrategy.from_replication_params(
                1, NUM_COPIES, timeout_s=spec.timeout_s, max_bucket_bytes=BUCKET_NBYTES
            ),
            keep=spec.keep,
            timeout_s=spec.timeout_s,
            max_bucket_bytes=BUCKET_NBYTES,
        )
        self._states = KnownStates(spec)

    def save(self, iteration: int) -> Outcome:
        """Save."""
        return self._saved(iteration, is_async=False)

    def save_behind(self, iteration: int) -> Outcome:
        """Save asynchronously, and wait for the end."""
        return self._saved(iteration, is_async=True)

    def load(self) -> Outcome:
        """Load, and compare every bit with what this rank had at that iteration."""
        return self._states.load(self._manager, self._rank)

    def _saved(self, iteration: int, *, is_async: bool) -> Outcome:
        state = BasicTensorAwareStateDict(self._spec.state(self._rank, iteration))
        try:
            request = self._manager.save(state, iteration, is_async)
            if request is not None:
                request.wait()
        except CheckpointError as error:
            return refused(error)
        return Outcome(Ending.SAVED, iteration)


def make_worker(spec: WorldSpec, context: RankContext) -> FaultWorker:
    """The worker of one rank, made in its process."""
    return FaultWorker(context, spec)


def fingerprint(value: Any) -> str:
    """Equal for equal values only: types, shapes, and the bits of every tensor and number."""
    digest = xxhash.xxh3_128()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape}".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, dict):
        digest.update(f"dict {len(value)}".encode())
        for key, held in value.items():
            digest.update(f"{key!r}:".encode())
            _feed(digest, held)
    elif isinstance(value, (list, tuple)):
        digest.update(f"{type(value).__name__} {len(value)}".encode())
        for held in value:
            _feed(digest, held)
    else:
        digest.update(f"{type(value).__name__} {value!r};".encode())
