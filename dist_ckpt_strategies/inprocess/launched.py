"""The coordinator of this process, found by what its launcher has put into the environment."""

from __future__ import annotations

from dist_ckpt_strategies.comm.key_values import LocalKeyValues, TcpKeyValues
from dist_ckpt_strategies.config import (
    Launch,
    launch_from_environment,
    options_from_environment,
    update_environment,
    world_from_environment,
)
from dist_ckpt_strategies.inprocess.coordinator import Coordinator, Epoch, RankInfo, environment_of
from dist_ckpt_strategies.inprocess.heartbeat import start_heartbeat
from dist_ckpt_strategies.inprocess.store_coordinator import StoreCoordinator

KEY_PREFIX = "dist_ckpt/"
"""Of our keys in a store that others use too."""

_EPOCHS_PER_ATTEMPT = 1_000_000
_LONGEST_SILENCE_S = 30.0
"""Of the launcher's store, where ``timeout_s`` of the options is not shorter."""


class LaunchedCoordinator(StoreCoordinator):
    """A Coordinator that sets this process's variables, as its launcher would have."""

    def barrier(self, timeout_s: float) -> Epoch:
        """See Coordinator; RANK and its kin, and where process groups meet, are set then."""
        epoch = super().barrier(timeout_s)
        place = environment_of(self.wait_rank(timeout_s))
        update_environment({**place, **dict(epoch.environment)})
        return epoch


def coordinator_from_environment() -> Coordinator:
    """The coordinator of this process's job; and from now on, it gives signs of life.

    Under ``dist-ckpt run`` the supervisor's; under torchrun one over the agent's store, which
    hears of exceptions only: when a process dies, torchrun restarts them all. Without either, and
    with no WORLD_SIZE above 1, a coordinator of this process alone.

    Its ``barrier`` sets the variables of the attempt in this process's environment, so that
    ``init_process_group`` finds the other ranks.

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
        store = TcpKeyValues(host, port, prefix=KEY_PREFIX, timeout_s=_silence_s())
        return LaunchedCoordinator(store, launch.worker, master=host)
    return _under_torchrun(launch, launch.rank, (host, port))


def _under_torchrun(launch: Launch, rank: int, address: tuple[str, int]) -> Coordinator:
    world_size, local_rank, local_world_size = world_from_environment()
    host, port = address
    # The agent's store outlives the processes, and with it what they wrote: of each attempt the
    # keys are others, and so are the epochs.
    prefix = f"{KEY_PREFIX}{launch.attempt}/"
    store = TcpKeyValues(host, port, prefix=prefix, timeout_s=_silence_s())
    place = RankInfo(rank, local_rank, world_size, local_world_size)
    first = launch.attempt * _EPOCHS_PER_ATTEMPT + 1
    return LaunchedCoordinator(store, launch.worker, place, first_epoch=first, master=host)


def _silence_s() -> float:
    return min(_LONGEST_SILENCE_S, options_from_environment().timeout_s)
