"""One rank of a campaign: it trains, saves, recovers and tries operations, as it is told."""

from __future__ import annotations

import faulthandler
import logging
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

import dist_ckpt_strategies
from dist_ckpt_strategies.local import (
    CliqueReplicationStrategy,
    LocalCheckpointManager,
)
from dist_ckpt_strategies.recovery import load_latest
from tests.faults.injection import Trap, armed
from tests.faults.operations import LIMIT_S, OPERATIONS, Action
from tests.faults.oracle import Tier
from tests.faults.schedule import NUM_RANKS
from tests.support.entries import Failure, outcome
from tests.support.ranks import allow_processes
from tests.support.sharded_training import (
    ShardedTraining,
    from_local,
    make_groups,
    shards_of,
    state_digest,
    step_once,
    take,
    to_local,
)

FORMAT = ("zarr", 2)
NUM_KEPT = 2
HOST = "127.0.0.1"
_COPIES = 2
_NUM_SHARDS = 2
_SEED = 11
_OTHER_SEED = 99


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """A save in the training.

    Attributes:
        tier: which kind.
        after_steps: how many steps come before it.
        is_async: whether training goes on meanwhile.
        directory: where to, of a global one.
    """

    tier: Tier
    after_steps: int
    is_async: bool
    directory: str = ""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save of an iteration ended: ``failure`` is what was raised."""

    order: SaveOrder
    iteration: int
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Trained:
    """What ``train`` came to.

    Attributes:
        digests: of the state, by step.
        saves: how the saves ended, of those that were begun.
        failure: what ended the training early; not what a save raised.
        has_struck: whether the trap did.
    """

    digests: dict[int, str]
    saves: tuple[SaveResult, ...]
    failure: Failure | None
    has_struck: bool


@dataclass(frozen=True, slots=True)
class Recovered:
    """What ``recover`` came to.

    Attributes:
        tier: where the checkpoint was; None with a failure.
        iteration: of the training, as the package says.
        digest: of the state.
        failure: what was raised in place of all that.
        has_struck: whether the trap did.
        is_loaded: whether the load had ended well before the failure.
    """

    tier: Tier | None
    iteration: int
    digest: str
    failure: Failure | None
    has_struck: bool
    is_loaded: bool = False


class Rank:
    """What a rank has, and does.

    Args:
        rank: its number.
        root: holds the directories of all nodes, and of the global checkpoints.
        store_port: where the ranks find each other.
    """

    def __init__(self, rank: int, root: Path, store_port: int) -> None:
        self._rank, self._root, self._port = rank, root, store_port
        self._training: ShardedTraining | None = None
        self._clique: Any = None
        self._action: Action | None = None

    def join(self, name: str, jump: int, timeout_s: float) -> None:
        """Make process groups with the others; those of before are given up. Collective.

        Args:
            name: tells these groups from others.
            jump: the ranks between a shard and its copy.
            timeout_s: for collectives of the training.
        """
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = timedelta(seconds=timeout_s)
        store = TCPStore(HOST, self._port, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(name, store),
            rank=self._rank,
            world_size=NUM_RANKS,
            timeout=limit,
        )
        self._training = ShardedTraining(make_groups(_NUM_SHARDS), seed=_SEED)
        made = CliqueReplicationStrategy.from_replication_params(jump, _COPIES, timeout_s=timeout_s)
        self._clique = made.local_group

    def begin(self) -> str:
        """Begin the training anew; the state at step 0."""
        self._training = ShardedTraining(self._present.groups, seed=_SEED)
        return state_digest(self._training)

    def train(
        self, steps: int, saves: tuple[SaveOrder, ...], timeout_s: float, trap: Trap | None
    ) -> Trained:
        """Train and save; every save that was begun is waited for."""
        self._limit(timeout_s)
        digests: dict[int, str] = {}
        results: list[SaveResult] = []
        with armed(trap, self._root) as calls:
            failure = outcome(lambda: self._train(steps, saves, timeout_s, digests, results))
        self._leave_lost_peers([failure, *(save.failure for save in results)])
        return Trained(digests, tuple(results), failure, bool(calls.failed))

    def recover(self, places: tuple[str, ...], timeout_s: float, trap: Trap | None) -> Recovered:
        """Forget everything, and load the newest checkpoint."""
        self._limit(timeout_s)
        spoil(self._present)
        with armed(trap, self._root) as calls:
            found = outcome(lambda: self._load(places, timeout_s))
            is_loaded = not isinstance(found, Failure)
            taken = outcome(lambda: self._take(found)) if is_loaded else found
        if isinstance(taken, Failure):
            self._leave_lost_peers([taken])
            return Recovered(None, -1, "", taken, bool(calls.failed), is_loaded)
        digest = state_digest(self._present)
        return Recovered(Tier(found.tier), found.iteration, digest, None, bool(calls.failed))

    def prepare(self, operation: str, directory: Path) -> None:
        """Make ready for attempts of an operation, in an empty directory. Collective."""
        self._limit(LIMIT_S)
        self._action = OPERATIONS[operation](self._rank, directory)

    def attempt(self, directory: Path, trap: Trap | None) -> tuple[Failure | None]:
        """One attempt, in a directory of its own: the Failure, if any."""
        action = self._action
        assert action is not None
        directory.mkdir(parents=True, exist_ok=True)
        act = action(directory)
        with armed(trap, self._root):
            found = outcome(act)
        return (found if isinstance(found, Failure) else None,)

    def clean(self, directory: Path) -> None:
        """Remove what attempts have left."""
        shutil.rmtree(directory, ignore_errors=True)

    def _limit(self, timeout_s: float) -> None:
        """From now on no rank waits longer for a peer."""
        os.environ["DIST_CKPT_TIMEOUT_S"] = str(timeout_s)
        for group in (None, self._present.groups.replica, self._clique):
            _set_pg_timeout(timedelta(seconds=timeout_s), group)

    def _leave_lost_peers(self, failures: list[Failure | None]) -> None:
        """Take the groups down where contact is lost, so that the others need not wait for it."""
        lost = {"PeerLostError", "PeerTimeoutError"}
        if any(one and (lost & set(one.kinds) or not one.is_ours) for one in failures):
            dist.destroy_process_group()

    def _train(
        self,
        steps: int,
        orders: tuple[SaveOrder, ...],
        timeout_s: float,
        digests: dict[int, str],
        results: list[SaveResult],
    ) -> None:
        training = self._present
        manager = self._manager(timeout_s)
        running: list[tuple[SaveOrder, int, Callable[[], Any]]] = []
        try:
            for number in range(steps + 1):
                digests[training.step] = state_digest(training)
                for order in orders:
                    if order.after_steps != number:
                        continue
                    begun: list[Any] = []
                    save = self._save_of(order, timeout_s, manager)
                    failure = outcome(lambda: begun.append(save()))  # noqa: B023 - called here
                    if failure is None and order.is_async:
                        running.append((order, training.step, begun[0].wait))
                    else:
                        results.append(SaveResult(order, training.step, failure))
                if number < steps:
                    step_once(training)
        finally:
            for order, iteration, wait in running:
                failure = outcome(wait)
                is_failure = isinstance(failure, Failure)
                results.append(SaveResult(order, iteration, failure if is_failure else None))

    def _save_of(
        self, order: SaveOrder, timeout_s: float, manager: LocalCheckpointManager
    ) -> Callable[[], Any]:
        training = self._present
        if order.tier is Tier.LOCAL:
            return lambda: manager.save(to_local(training), training.step, is_async=order.is_async)
        save = dist_ckpt_strategies.save_async if order.is_async else dist_ckpt_strategies.save
        return lambda: save(
            to_global(training), order.directory, FORMAT, overwrite=True, timeout_s=timeout_s
        )

    def _load(self, places: tuple[str, ...], timeout_s: float) -> Any:
        def load_global(path: Any) -> Any:
            return dist_ckpt_strategies.load(to_global(self._present), path, timeout_s=timeout_s)

        return load_latest(self._manager(timeout_s), places, load_global)

    def _take(self, found: Any) -> None:
        """Take over what was loaded. Collective: the replica."""
        training, state = self._present, found.state
        if Tier(found.tier) is Tier.LOCAL:
            from_local(training, state)
        else:
            take(training, int(state["step"]), state["objects"], state["random"])

    def _manager(self, timeout_s: float) -> LocalCheckpointManager:
        strategy = CliqueReplicationStrategy(self._clique, timeout_s=timeout_s)
        return LocalCheckpointManager(
            self._root / f"node{self._rank}",
            repl_strategy=strategy,
            keep=NUM_KEPT,
            timeout_s=timeout_s,
        )

    @property
    def _present(self) -> ShardedTraining:
        assert self._training is not None
        return self._training


def spoil(training: ShardedTraining) -> None:
    """Nothing of the state is left; what is not restored will be seen."""
    for tensor in (training.flat, *shards_of(training).values()):
        tensor.detach().fill_(-12345.0)
    training.set_step(-1)
    training.load_objects({"num_updates": -1})
    torch.manual_seed(_OTHER_SEED)


def to_global(training: ShardedTraining) -> dict[str, Any]:
    """What a global checkpoint holds; the tensors are filled in place by a load."""
    groups = training.groups
    replica = dist.get_rank() // groups.num_shards
    state: dict[str, Any] = {
        name: ShardedTensor.from_rank_offsets(
            f"optimizer.{name}", tensor, (0, groups.shard, groups.num_shards), replica_id=replica
        )
        for name, tensor in shards_of(training).items()
    }
    size, rank = dist.get_world_size(), dist.get_rank()
    state["random"] = ShardedObject("random", torch.get_rng_state(), (size,), (rank,))
    return state | {"step": training.step, "objects": dict(training.objects())}


def run_rank(
    rank: int, root: Path, store_port: int, variables: Mapping[str, str], pipe: Connection
) -> None:
    """Carry out orders until the pipe is closed, or the driver is gone."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update({**variables, "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("dist_ckpt_strategies").setLevel(logging.ERROR)  # the driver compares
    allow_processes()
    own = Rank(rank, root, store_port)
    while True:
        try:
            name, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # groups of ranks that were lost may never come down
        answer = outcome(lambda: getattr(own, name)(*args))  # noqa: B023 - called here
        pipe.send((time.monotonic(), answer))


def undisturbed(rank: int, num_steps: int) -> list[str]:
    """Body of a rank: the digests of the state before each step, and of the last one."""
    training = ShardedTraining(make_groups(_NUM_SHARDS), seed=_SEED)
    digests = [state_digest(training)]
    for _ in range(num_steps):
        step_once(training)
        digests.append(state_digest(training))
    return digests
