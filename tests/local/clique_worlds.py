"""Ranks on nodes with disks of their own, states with every kind of tensor, and losses.

Ranks are threads, each with a ``Node``, or processes, which make their own managers.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import CheckpointError, kind_of
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.local.plan import build_cliques
from dist_ckpt_strategies.local.shard_files import ShardDirectory
from dist_ckpt_strategies.local.shard_format import LocalShardId
from tests.support.ranks import run_processes
from tests.support.thread_ranks import ThreadCommunicator, ThreadWorld, run_ranks

RANKS_PER_NODE = 2
TIMEOUT_S = 40.0

SAVED = ("ok", "None")
"""The outcome of a save that worked."""

Outcome = tuple[str, str]
"""What an action came to: ``ok`` and the text of its result, or an error's kind and message.

An error that is none of ours is raised."""


def cliques(factor: int = 2, jump: int = RANKS_PER_NODE, **options: Any) -> Any:
    """A strategy. Collective."""
    return CliqueReplicationStrategy.from_replication_params(
        jump, factor, timeout_s=TIMEOUT_S, max_bucket_bytes=4096, **options
    )


def manager_of(
    rank: int, root: str, strategy: Any = None, *, node: int | None = None, **options: Any
) -> LocalCheckpointManager:
    """A manager whose root is the directory of a node, by default the rank's own."""
    directory = node_directory(root, rank // RANKS_PER_NODE if node is None else node)
    options = {"timeout_s": TIMEOUT_S, "max_bucket_bytes": 3000} | options
    return LocalCheckpointManager(directory, repl_strategy=strategy, **options)


def node_directory(root: str, node: int) -> Path:
    """The disk of a node."""
    return Path(root) / f"node{node}"


def holder_directory(root: str, rank: int) -> Path:
    """Where a rank keeps its shards."""
    return node_directory(root, rank // RANKS_PER_NODE) / str(rank)


def bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A tensor of any bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    content = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return content.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def values_of(rank: int, iteration: int) -> dict[str, Any]:
    """What a rank has at an iteration; another number of tensors on each rank."""
    seed = 1000 * iteration + 17 * rank
    base = bits((40, 30), torch.float32, seed)
    return {
        "iteration": iteration,
        "model": {
            dtype.value: bits((3, 5 + rank), getattr(torch, dtype.value), seed + number)
            for number, dtype in enumerate(DType)
        },
        "views": [base, base.T, base[::2, 1:], base.expand(2, 40, 30)],
        "empty": (torch.empty(0, 3), torch.empty(4, 0, dtype=torch.int64), None),
        "scalar": torch.tensor(0.5 + rank, dtype=torch.float64),
        "optimizer": OrderedDict(
            (
                number,
                {"step": 1.5 * number, "exp_avg": bits((rank + 1, 1000), torch.bfloat16, seed)},
            )
            for number in range(rank + 1)
        ),
        "rng": bits((5000,), torch.uint8, seed),
        "array": np.arange(300, dtype=np.int32).reshape(20, 15) + seed,
        "raw": bytes(range(256)) * (rank + 1),
        "text": "ü\0\ud800",
        "numbers": [1 << 70, -0.0, 1e-320, True],
    }


def state_of(rank: int, iteration: int) -> BasicTensorAwareStateDict:
    """The same, for a save."""
    return BasicTensorAwareStateDict(values_of(rank, iteration))


def described(value: Any) -> Any:
    """The same value with what ``==`` can compare in place of tensors."""
    if isinstance(value, torch.Tensor):
        content = value.contiguous().reshape(-1)
        raw = content.view(torch.uint8).numpy().tobytes() if content.numel() else b""
        return str(value.dtype), tuple(value.shape), raw
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, dict):
        return type(value).__name__, [(key, described(held)) for key, held in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [described(held) for held in value]
    return type(value).__name__, repr(value)


def outcome(action: Callable[[], Any]) -> Outcome:
    """What it came to."""
    try:
        return "ok", str(action())
    except CheckpointError as error:
        return kind_of(error), str(error)


def loaded(manager: LocalCheckpointManager, rank: int) -> str:
    """The iteration that is loaded, if the state is the one that was saved bit for bit."""
    state, shard_id = manager.load()
    shard = LocalShardId.require(shard_id)
    if described(state.state_dict) != described(values_of(rank, shard.save.iteration)):
        return f"{shard_id} differs"
    return str(shard.save.iteration) if shard.global_rank == rank else f"{shard_id} is another's"


def load(manager: LocalCheckpointManager, rank: int) -> Outcome:
    """What a load comes to. Collective."""
    return outcome(lambda: loaded(manager, rank))


def save(manager: LocalCheckpointManager, rank: int, iteration: int) -> Outcome:
    """What a save comes to. Collective."""
    return outcome(lambda: manager.save(state_of(rank, iteration), iteration))


def once(rank: int, action: Callable[[], Any]) -> None:
    """Do it on rank 0, while no other does anything. Collective."""
    dist.barrier()
    if rank == 0:
        action()
    dist.barrier()


def parts_in(root: str, *, iteration: int | None = None, owner: int | None = None) -> list[Path]:
    """The files of all nodes, or those of an iteration, or of a rank's state."""
    return [
        found.path
        for node in sorted(Path(root).glob("node*"))
        for found in ShardDirectory(node).find()
        if iteration in {None, found.shard_id.save.iteration}
        and owner in {None, found.shard_id.global_rank}
    ]


def iterations_in(root: str) -> list[int]:
    """The iterations of which there is any file."""
    return sorted({LocalShardId.require(path.stem).save.iteration for path in parts_in(root)})


def partials_in(root: str) -> list[str]:
    """What killed saves have left."""
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob(".partial-*"))


def remove(paths: Sequence[Path]) -> None:
    """Lose files and directories."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def flip(*paths: Path) -> None:
    """Flip a bit of the first buffer of each file."""
    for path in paths:
        content = bytearray(path.read_bytes())
        content[0] ^= 4
        path.write_bytes(content)


def run(size: int, body: Callable[..., Any], root: Path) -> list[Any]:
    """What every rank returns; raises what one of them raised."""
    results = run_processes(size, body, str(root))
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


Carrier = Callable[[Communicator], Any]
"""What a communicator is replaced by, such as one that changes bytes on the way."""


@dataclass
class Threads:
    """A job whose ranks are threads: the world of each group, and the disks of all nodes."""

    size: int
    root: str
    carriers: dict[int, Carrier] = field(default_factory=dict)
    worlds: dict[tuple[int, ...], ThreadWorld] = field(default_factory=dict)

    def communicator(self, members: Sequence[int], rank: int) -> Communicator:
        """Of some of the ranks, for one of them."""
        fresh = ThreadWorld(len(members), TIMEOUT_S)
        world = self.worlds.setdefault(tuple(members), fresh)
        found = ThreadCommunicator(world, list(members).index(rank), members)
        if rank in self.carriers:
            carried: Communicator = self.carriers[rank](found)
            return carried
        return found


class ThreadManager(LocalCheckpointManager):
    """A manager whose ranks are threads of one process."""

    threads: Threads
    rank: int

    def communicator(self, purpose: str, detail: str = "") -> Communicator:
        """See LocalCheckpointManager."""
        del purpose, detail
        return self.threads.communicator(range(self.threads.size), self.rank)


class ThreadCliques(CliqueReplicationStrategy):
    """A clique whose members are threads of one process."""

    threads: Threads
    rank: int
    global_ranks: tuple[int, ...] = ()
    is_over_default_group = False

    def communicator(self, purpose: str, detail: str = "") -> Communicator:
        """See CliqueReplicationStrategy."""
        del purpose, detail
        return self.threads.communicator(self.global_ranks, self.rank)


@dataclass(frozen=True)
class Node:
    """A rank that is a thread, and what it does with the others."""

    threads: Threads
    rank: int

    @property
    def root(self) -> str:
        """Of all disks."""
        return self.threads.root

    def manager(
        self,
        factor: int = 2,
        jump: int = RANKS_PER_NODE,
        *,
        node: int | None = None,
        bucket: int = 3000,
        **options: Any,
    ) -> LocalCheckpointManager:
        """A manager with cliques, or with none where the factor is 0."""
        strategy = None
        if factor:
            strategy = ThreadCliques(None, max_bucket_bytes=bucket, timeout_s=TIMEOUT_S)
            strategy.threads, strategy.rank = self.threads, self.rank
            made = build_cliques(self.threads.size, jump, factor, allow_uneven=True)
            (strategy.global_ranks,) = (clique for clique in made if self.rank in clique)
        where = node_directory(self.root, self.rank // RANKS_PER_NODE if node is None else node)
        options = {"timeout_s": TIMEOUT_S, "max_bucket_bytes": bucket} | options
        found = ThreadManager(where, repl_strategy=strategy, **options)
        found.threads, found.rank = self.threads, self.rank
        return found

    def save(self, manager: LocalCheckpointManager, iteration: int) -> Outcome:
        """What a save comes to. Collective."""
        return save(manager, self.rank, iteration)

    def load(self, manager: LocalCheckpointManager) -> Outcome:
        """What a load comes to. Collective."""
        return load(manager, self.rank)

    def meet(self) -> None:
        """Wait for the others. Collective."""
        everyone = range(self.threads.size)
        ThreadCommunicator(self.threads.worlds[tuple(everyone)], self.rank).all_gather(None)

    def once(self, action: Callable[[], Any]) -> None:
        """Do it on rank 0, while no other does anything. Collective."""
        self.meet()
        if self.rank == 0:
            action()
        self.meet()


def run_threads(
    size: int, body: Callable[[Node], Any], root: Path, carriers: dict[int, Carrier] | None = None
) -> list[Any]:
    """What every rank returns; ``carriers`` replace the communicators of some ranks."""
    threads = Threads(size, str(root), carriers or {})
    threads.communicator(range(size), 0)
    return run_ranks(size, lambda comm: body(Node(threads, comm.rank)))
