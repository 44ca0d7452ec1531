"""The coordinator of this process, found by what its launcher has put into the environment."""

from __future__ import annotations

from dist_ckpt_strategies.comm.key_values import LocalKeyValues, TcpKeyValues
from dist_ckpt_strategies.config import (
    Launch,
    launch_from_environment,
    world_from_environment,
)
from dist_ckpt_strategies.inprocess.coordinator import RankInfo
from dist_ckpt_strategies.inprocess.heartbeat import start_heartbeat
from dist_ckpt_strategies.inprocess.store_coordinator import StoreCoordinator

KEY_PREFIX = "dist_ckpt/"
"""Of our keys in a store that others use too."""

_EPOCHS_PER_ATTEMPT = 1_000_000


def coordinator_from_environment() -> StoreCoordinator:
    """The coordinator of this process's job; and from now on, it gives signs of life.

    Under ``dist-ckpt run`` the supervisor's; under torchrun one over the agent's store, which
    hears of exceptions only: when a process dies, torchrun restarts them all. Without either, and
    with no WORLD_SIZE above 1, a coordinator of this process alone.

    Raises:
        StrategyError: the environment names none of these.
        PeerLostError: the launcher's store does not answer.
    """
    launch = launch_from_environment()
    start_heartbeat(launch)
    if launch.address is None:
        return StoreCoordinator(LocalKeyValues(), launch.worker, RankInfo(0, 0, 1, 1))
    host, port = launch.address
    if launch.rank is None:
        return StoreCoordinator(TcpKeyValues(host, port, prefix=KEY_PREFIX), launch.worker)
    return _under_torchrun(launch, launch.rank, (host, port))


def _under_torchrun(launch: Launch, rank: int, address: tuple[str, int]) -> StoreCoordinator:
    world_size, local_rank, local_world_size = world_from_environment()
    host, port = address
    # The agent's store outlives the processes, and with it what they wrote: of each attempt the
    # keys are others, and so are the numbers that process groups are told apart by.
    store = TcpKeyValues(host, port, prefix=f"{KEY_PREFIX}{launch.attempt}/")
    place = RankInfo(
        rank,
        local_rank,
        world_size,
        local_world_size,
        (("MASTER_ADDR", host), ("MASTER_PORT", str(port))),
    )
    first = launch.attempt * _EPOCHS_PER_ATTEMPT + 1
    return StoreCoordinator(store, launch.worker, place, first_epoch=first)
