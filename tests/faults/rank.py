"""One rank of a campaign: it trains, saves, recovers and tries operations, as the driver says."""

import faulthandler
import logging
import os
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _set_pg_timeout

import dist_ckpt_strategies
from dist_ckpt_strategies import load_latest
from dist_ckpt_strategies.local import CliqueReplicationStrategy, LocalCheckpointManager
from tests.faults.injection import Trap, armed
from tests.faults.operations import LIMIT_S, OPERATIONS, Action
from tests.faults.oracle import NUM_RANKS, Found, Tier
from tests.faults.schedule import Save
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
    to_global,
    to_local,
)

NUM_KEPT = 2
HOST = "127.0.0.1"
_FORMAT = ("safetensors", 1)
_COPIES = 2
NUM_SHARDS = 2
SEED = 11
_OTHER_SEED = 99


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save of an iteration ended: ``failure`` is what was raised."""

    save: Save
    iteration: int
    directory: str
    failure: Failure | None


@dataclass(frozen=True, slots=True)
class Trained:
    """What ``train`` came to."""

    digests: dict[int, str]  # of the state, by step
    saves: tuple[SaveResult, ...]  # how the saves ended, of those that were begun
    failure: Failure | None  # what ended the training early; not what a save raised
    has_struck: bool  # whether the trap did


@dataclass(frozen=True, slots=True)
class Recovered:
    """What ``recover`` came to."""

    found: Found | Failure  # which checkpoint, as the package says; or what was raised
    digest: str  # of the state
    has_struck: bool  # whether the trap did
    is_loaded: bool = False  # whether the load ended well, also where taking the state over failed


class Rank:
    """What a rank has, and does, below the directory of all nodes and global checkpoints."""

    _training: ShardedTraining  # in the groups that ``join`` made
    _clique: Any
    _action: Action  # that ``prepare`` made ready

    def __init__(self, rank: int, root: Path, store_port: int) -> None:
        self._rank, self._root, self._port = rank, root, store_port

    def join(self, name: str, jump: int, timeout_s: float) -> None:
        """Make process groups with the others; those of before are given up. Collective."""
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
        self._training = ShardedTraining(make_groups(NUM_SHARDS), seed=SEED)
        made = CliqueReplicationStrategy.from_replication_params(jump, _COPIES, timeout_s=timeout_s)
        self._clique = made.local_group

    def begin(self) -> str:
        self._training = ShardedTraining(self._training.groups, seed=SEED)
        return state_digest(self._training)

    def train(
        self, steps: int, saves: tuple[Save, ...], address: str, timeout_s: float, trap: Trap | None
    ) -> Trained:
        """Train and save; every save that was begun is waited for."""
        self._limit(timeout_s)
        digests: dict[int, str] = {}
        begun: list[tuple[Save, int, str, Any]] = []
        training, manager = self._training, self._manager(timeout_s)

        def work() -> None:
            for number in range(steps + 1):
                digests[training.step] = state_digest(training)
                directory = f"{address}/iter_{training.step:07d}"
                for save in (one for one in saves if one.after_steps == number):
                    where = "" if save.tier is Tier.LOCAL else directory
                    saved = outcome(lambda: self._save(save, where, timeout_s, manager))  # noqa: B023
                    begun.append((save, training.step, where, saved))
                if number < steps:
                    step_once(training)

        with armed(trap, self._root) as calls:
            failure = outcome(work)
            results = []
            for save, iteration, where, saved in begun:
                is_running = not (saved is None or isinstance(saved, Failure))
                ended = outcome(saved.wait) if is_running else saved
                failed = ended if isinstance(ended, Failure) else None
                results.append(SaveResult(save, iteration, where, failed))
        self._leave_lost_peers([failure, *(result.failure for result in results)])
        return Trained(digests, tuple(results), failure, bool(calls.failed))

    def recover(self, places: tuple[str, ...], timeout_s: float, trap: Trap | None) -> Recovered:
        """Forget everything, and load the newest checkpoint."""
        self._limit(timeout_s)
        spoil(self._training)
        with armed(trap, self._root) as calls:
            found = outcome(lambda: self._load(places, timeout_s))
            is_loaded = not isinstance(found, Failure)
            taken = outcome(lambda: self._take(found)) if is_loaded else found
        if isinstance(taken, Failure):
            self._leave_lost_peers([taken])
            return Recovered(taken, "", bool(calls.failed), is_loaded)
        which = Found(found.iteration, Tier(found.tier))
        return Recovered(which, state_digest(self._training), bool(calls.failed), is_loaded)

    def prepare(self, operation: str, directory: Path) -> None:
        """Make ready for attempts of an operation, in an empty directory. Collective."""
        self._limit(LIMIT_S)
        self._action = OPERATIONS[operation](self._rank, directory)

    def attempt(self, directory: Path, trap: Trap | None) -> Failure | None:
        """One attempt, in a directory of its own."""
        directory.mkdir(parents=True, exist_ok=True)
        act = self._action(directory)
        with armed(trap, self._root):
            found = outcome(act)
        return found if isinstance(found, Failure) else None

    def _limit(self, timeout_s: float) -> None:
        """From now on no rank waits longer for a peer."""
        os.environ["DIST_CKPT_TIMEOUT_S"] = str(timeout_s)
        for group in (None, self._training.groups.replica, self._clique):
            _set_pg_timeout(timedelta(seconds=timeout_s), group)

    def _leave_lost_peers(self, failures: list[Failure | None]) -> None:
        """Take the groups down where contact is lost, so that the others need not wait for it."""
        lost = {"PeerLostError", "PeerTimeoutError"}
        if any(one and (lost & set(one.kinds) or not one.is_ours) for one in failures):
            dist.destroy_process_group()

    def _save(
        self, save: Save, directory: str, timeout_s: float, manager: LocalCheckpointManager
    ) -> Any:
        """The request of a save that goes on, else None."""
        training = self._training
        if save.tier is Tier.LOCAL:
            return manager.save(to_local(training), training.step, is_async=save.is_async)
        call: Any = dist_ckpt_strategies.save_async if save.is_async else dist_ckpt_strategies.save
        state = to_global(training)
        return call(state, directory, _FORMAT, overwrite=True, timeout_s=timeout_s)

    def _load(self, places: tuple[str, ...], timeout_s: float) -> Any:
        def load_global(path: Any) -> Any:
            return dist_ckpt_strategies.load(to_global(self._training), path, timeout_s=timeout_s)

        return load_latest(self._manager(timeout_s), places, load_global)

    def _take(self, found: Any) -> None:
        training, state = self._training, found.state
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


def spoil(training: ShardedTraining) -> None:
    """Nothing of the state is left; what is not restored will be seen."""
    for tensor in (training.flat, *shards_of(training).values()):
        tensor.detach().fill_(-12345.0)
    training.set_step(-1)
    training.load_objects({"num_updates": -1})
    torch.manual_seed(_OTHER_SEED)


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
        pipe.send(answer)
