"""What a training script calls before its wrapped block: wait_rank()."""

from __future__ import annotations

import multiprocessing

from dist_ckpt_strategies.config import update_environment
from dist_ckpt_strategies.inprocess.launched import coordinator_from_environment
from dist_ckpt_strategies.inprocess.places import environment_of

__all__ = ["wait_rank"]


def wait_rank() -> None:
    """Set RANK, WORLD_SIZE and the other variables of this process's place; a spare waits for it.

    Call it after the imports and before anything distributed. In processes that the script starts
    with multiprocessing it does nothing.

    Raises:
        StrategyError: nothing here coordinates the job; see coordinator_from_environment.
        PeerLostError: the launcher's store is gone.
    """
    if multiprocessing.current_process().name != "MainProcess":
        return
    coordinator = coordinator_from_environment()
    try:
        update_environment(environment_of(coordinator.wait_rank()))
    finally:
        coordinator.close()
