"""Ranks on nodes with disks of their own, states with every kind of tensor, and losses."""

import shutil
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dist_ckpt_strategies.comm.base import Communicator, Parcel
from dist_ckpt_strategies.core.array import DType
from dist_ckpt_strategies.errors import CheckpointError, kind_of
from dist_ckpt_strategies.local import (
    BasicTensorAwareStateDict,
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.local.plan import build_cliques
from tests.support.tensors import bits, noise
from tests.support.thread_ranks import ThreadCommunicator, ThreadWorld, run_ranks

RANKS_PER_NODE = 2
TIMEOUT_S = 40.0

SAVED = ("ok", "None")
"""The outcome of a save that worked."""

Outcome = tuple[str, str]
"""``ok`` and the text of an action's result, or the kind and message of an error of ours."""


def cliques(factor: int = 2, jump: int = RANKS_PER_NODE, **options: Any) -> Any:
    """A strategy. Collective."""
    options = {"timeout_s": TIMEOUT_S, "max_bucket_bytes": 4096} | options
    return CliqueReplicationStrategy.from_replication_params(jump, factor, **options)


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


def values_of(rank: int, iteration: int) -> dict[str, Any]:
    """What a rank has at an iteration; another number of tensors on each rank."""
    seed = 1000 * iteration + 17 * rank
    base = noise((40, 30), torch.float32, seed)
    return {
        "iteration": iteration,
        "model": {
            dtype.value: noise((3, 5 + rank), getattr(torch, dtype.value), seed + number)
            for number, dtype in enumerate(DType)
        },
        "views": [base, base.T, base[::2, 1:], base.expand(2, 40, 30)],
        "empty": (torch.empty(0, 3), torch.empty(4, 0, dtype=torch.int64), None),
        "scalar": torch.tensor(0.5 + rank, dtype=torch.float64),
        "optimizer": OrderedDict(
            (number, {"step": 1.5 * number, "exp_avg": noise((1000,), torch.bfloat16, seed)})
            for number in range(rank + 1)
        ),
        "rng": noise((5000,), torch.uint8, seed),
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
        return str(value.dtype), tuple(value.shape), bits(value)
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
    state, (iteration, owner, session) = manager.load()
    assert session == manager.session_id
    if described(state.state_dict) != described(values_of(rank, iteration)):
        return f"iteration {iteration} differs"
    return str(iteration) if owner == rank else f"iteration {iteration} is that of rank {owner}"


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


def parts_in(root: str, *, iteration: int | str = "*", owner: int | str = "*") -> list[Path]:
    """The files of all nodes, or those of an iteration, or of a rank's state."""
    number = iteration if isinstance(iteration, str) else f"{iteration:07d}"
    return [*Path(root).glob(f"node*/*/iter_{number}_{owner}_local_*.safetensors")]


def iterations_in(root: str) -> list[int]:
    """The iterations of which there is any file."""
    return sorted({int(path.name.split("_")[1]) for path in parts_in(root)})


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


def flipping(comm: Communicator, number: int = 0) -> Communicator:
    """It changes a bit of the n-th block that its rank receives of another."""
    exchange, left = comm.exchange, [number]

    def changed(sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        exchange(sends, receives)
        for from_rank, into in receives:
            if from_rank != comm.rank:
                if left[0] == 0:
                    torch.as_tensor(into)[-1] ^= 0x10
                left[0] -= 1

    vars(comm)["exchange"] = changed
    return comm


@dataclass(frozen=True)
class Node:
    """A rank that is a thread, and what it does with the others.

    Attributes:
        size: of the world.
        root: of the disks of all nodes.
        flipped: a rank, and which block is damaged on its way there in each communicator.
        worlds: of each group of ranks.
    """

    rank: int
    size: int
    root: str
    flipped: tuple[int, int] | None
    worlds: dict[tuple[int, ...], ThreadWorld]

    def communicator(self, members: Sequence[int]) -> Communicator:
        """Of some of the ranks."""
        world = self.worlds.setdefault(tuple(members), ThreadWorld(len(members), TIMEOUT_S))
        found = ThreadCommunicator(world, list(members).index(self.rank), members)
        if self.flipped is not None and self.rank == self.flipped[0]:
            return flipping(found, self.flipped[1])
        return found

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
            made = build_cliques(self.size, jump, factor, allow_uneven=True)
            (members,) = (clique for clique in made if self.rank in clique)
            strategy = ThreadCliques(None, max_bucket_bytes=bucket, timeout_s=TIMEOUT_S)
            strategy.global_ranks = members
            vars(strategy)["communicator"] = lambda *_: self.communicator(members)
        options = {"max_bucket_bytes": bucket} | options
        found = manager_of(self.rank, self.root, strategy, node=node, **options)
        vars(found)["communicator"] = lambda *_: self.communicator(range(self.size))
        return found

    def save(self, manager: LocalCheckpointManager, iteration: int) -> Outcome:
        """What a save comes to. Collective."""
        return save(manager, self.rank, iteration)

    def load(self, manager: LocalCheckpointManager) -> Outcome:
        """What a load comes to. Collective."""
        return load(manager, self.rank)

    def meet(self) -> None:
        """Wait for the others. Collective."""
        self.communicator(range(self.size)).all_gather(None)

    def once(self, action: Callable[[], Any]) -> None:
        """Do it on rank 0, while no other does anything. Collective."""
        self.meet()
        if self.rank == 0:
            action()
        self.meet()


class ThreadCliques(CliqueReplicationStrategy):
    """A clique whose members are threads of one process."""

    global_ranks: tuple[int, ...] = ()
    is_over_default_group = False


def run_threads(
    size: int, body: Callable[[Node], Any], root: Path, flipped: tuple[int, int] | None = None
) -> list[Any]:
    """What every rank returns."""
    worlds: dict[tuple[int, ...], ThreadWorld] = {}
    return run_ranks(size, lambda comm: body(Node(comm.rank, size, str(root), flipped, worlds)))
