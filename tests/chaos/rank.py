"""One rank of the run: it carries out orders until its pipe is closed."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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
from dist_ckpt_strategies.local import CliqueReplicationStrategy, LocalCheckpointManager
from dist_ckpt_strategies.recovery import load_latest
from tests.chaos.oracle import Tier
from tests.chaos.orders import (
    Begin,
    Join,
    Order,
    Recover,
    Recovered,
    SaveOrder,
    SaveResult,
    Train,
    Trained,
)
from tests.chaos.schedule import NUM_RANKS
from tests.chaos.state import NUM_SHARDS, SEED, from_global, spoil, to_global
from tests.chaos.traps import Traps
from tests.support.entries import Failure, outcome
from tests.support.sharded_training import (
    ShardedTraining,
    from_local,
    make_groups,
    state_digest,
    step_once,
    to_local,
)

FORMAT = ("zarr", 2)
NUM_KEPT = 2
HOST = "127.0.0.1"
_COPIES = 2


@dataclass(frozen=True, slots=True)
class Place:
    """What a rank is told when it starts.

    Attributes:
        rank: its number.
        root: holds the directories of all nodes, and of the global checkpoints.
        store_port: where the ranks meet.
        variables: for its environment.
    """

    rank: int
    root: Path
    store_port: int
    variables: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Running:
    """A save that was begun."""

    order: SaveOrder
    iteration: int
    wait: Callable[[], Any]


class Rank:
    """What a rank has, and does."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._node = place.root / f"node{place.rank}"
        self._traps = Traps(str(place.root))
        self._training: ShardedTraining | None = None
        self._clique: Any = None

    def join(self, order: Join) -> None:
        """Make the process groups."""
        if dist.is_initialized():
            dist.destroy_process_group()
        limit = timedelta(seconds=order.timeout_s)
        store = TCPStore(HOST, self._place.store_port, is_master=False, timeout=limit)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(order.meeting, store),
            rank=self._place.rank,
            world_size=NUM_RANKS,
            timeout=limit,
        )
        self._training = ShardedTraining(make_groups(NUM_SHARDS), seed=SEED)
        made = CliqueReplicationStrategy.from_replication_params(
            order.jump, _COPIES, timeout_s=order.timeout_s
        )
        self._clique = made.local_group

    def begin(self, _: Begin) -> str:
        """The state at step 0."""
        self._training = ShardedTraining(self._present.groups, seed=SEED)
        return state_digest(self._training)

    def train(self, order: Train) -> Trained:
        """Train and save; every save that was begun is waited for."""
        self._limit(order.timeout_s)
        digests: dict[int, str] = {}
        saves: list[SaveResult] = []
        with self._traps.armed(order.trap):
            failure = outcome(lambda: self._train(order, digests, saves))
        self._part([failure, *(save.failure for save in saves)])
        return Trained(digests, tuple(saves), failure, self._traps.has_sprung)

    def recover(self, order: Recover) -> Recovered:
        """Forget everything, and load."""
        self._limit(order.timeout_s)
        spoil(self._present)
        with self._traps.armed(order.trap):
            found = outcome(lambda: self._load(order))
            is_loaded = not isinstance(found, Failure)
            taken = outcome(lambda: self._take(found)) if is_loaded else found
        has_sprung = self._traps.has_sprung
        if isinstance(taken, Failure):
            self._part([taken])
            return Recovered(None, -1, "", (), "", taken, has_sprung, is_loaded)
        digest = state_digest(self._present)
        return Recovered(
            Tier(found.tier),
            found.iteration,
            found.name,
            tuple(map(str, found.attempts)),
            digest,
            None,
            has_sprung,
        )

    def _limit(self, timeout_s: float) -> None:
        """From now on nobody waits longer for a peer."""
        os.environ["DIST_CKPT_TIMEOUT_S"] = str(timeout_s)
        for group in (None, self._present.groups.replica, self._clique):
            _set_pg_timeout(timedelta(seconds=timeout_s), group)

    def _part(self, failures: Sequence[Failure | None]) -> None:
        """Take the groups down where contact is lost, so that the others need not wait for it."""
        is_lost = any(one and ("PeerLostError" in one.kinds or not one.is_ours) for one in failures)
        is_late = any(one and "PeerTimeoutError" in one.kinds for one in failures)
        if is_lost or is_late:
            dist.destroy_process_group()

    def _train(self, order: Train, digests: dict[int, str], saves: list[SaveResult]) -> None:
        training = self._present
        manager = self._manager(order.timeout_s)
        running: list[_Running] = []
        try:
            for number in range(order.steps + 1):
                digests[training.step] = state_digest(training)
                for save in order.saves:
                    if save.after_steps == number:
                        self._save(save, order.timeout_s, manager, running, saves)
                if number < order.steps:
                    step_once(training)
        finally:
            saves.extend(_result(one, one.wait) for one in running)

    def _save(
        self,
        order: SaveOrder,
        timeout_s: float,
        manager: LocalCheckpointManager,
        running: list[_Running],
        saves: list[SaveResult],
    ) -> None:
        iteration = self._present.step
        begun: list[Any] = []

        def save() -> None:
            begun.append(self._begun_save(order, iteration, timeout_s, manager))

        result = _result(_Running(order, iteration, save), save)
        if result.failure is None and order.is_async:
            running.append(_Running(order, iteration, begun[0].wait))
        else:
            saves.append(result)

    def _begun_save(
        self, order: SaveOrder, iteration: int, timeout_s: float, manager: LocalCheckpointManager
    ) -> Any:
        training = self._present
        if order.tier is Tier.LOCAL:
            return manager.save(to_local(training), iteration, is_async=order.is_async)
        save = dist_ckpt_strategies.save_async if order.is_async else dist_ckpt_strategies.save
        return save(
            to_global(training), order.directory, FORMAT, overwrite=True, timeout_s=timeout_s
        )

    def _load(self, order: Recover) -> Any:
        training, manager = self._present, self._manager(order.timeout_s)

        def load_global(path: Any) -> Any:
            return dist_ckpt_strategies.load(to_global(training), path, timeout_s=order.timeout_s)

        return load_latest(manager, order.places, load_global)

    def _take(self, found: Any) -> None:
        """Take over what was loaded. Collective: the replica."""
        training = self._present
        if Tier(found.tier) is Tier.LOCAL:
            from_local(training, found.state)
        else:
            from_global(training, found.state)

    def _manager(self, timeout_s: float) -> LocalCheckpointManager:
        strategy = CliqueReplicationStrategy(self._clique, timeout_s=timeout_s)
        return LocalCheckpointManager(
            self._node, repl_strategy=strategy, keep=NUM_KEPT, timeout_s=timeout_s
        )

    @property
    def _present(self) -> ShardedTraining:
        assert self._training is not None
        return self._training


def _result(one: _Running, action: Callable[[], Any]) -> SaveResult:
    failure = outcome(action)
    return SaveResult(one.order, one.iteration, failure if isinstance(failure, Failure) else None)


def run_rank(place: Place, pipe: Connection) -> None:
    """Carry out orders until the pipe is closed, or the driver is gone."""
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    os.environ.update({**place.variables, "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("dist_ckpt_strategies").setLevel(logging.ERROR)  # the driver compares
    rank = Rank(place)
    deeds: dict[type, Callable[[Any], Any]] = {
        Begin: rank.begin,
        Join: rank.join,
        Train: rank.train,
        Recover: rank.recover,
    }
    for order in _orders(pipe):
        answer = outcome(lambda order=order: deeds[type(order)](order))  # type: ignore[misc]
        pipe.send((time.monotonic(), answer))
    os._exit(0)  # groups of a meeting that broke may never come down


def _orders(pipe: Connection) -> Iterator[Order]:
    while True:
        try:
            yield pipe.recv()
        except (EOFError, OSError):
            return


def undisturbed(rank: int, num_steps: int) -> list[str]:
    """Body of a rank: the digests of the state before each step, and of the last one."""
    torch.manual_seed(0)
    training = ShardedTraining(make_groups(NUM_SHARDS), seed=SEED)
    digests = [state_digest(training)]
    for _ in range(num_steps):
        step_once(training)
        digests.append(state_digest(training))
    return digests
