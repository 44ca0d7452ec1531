"""Checks whether this process can take part in another attempt."""

import datetime as dt
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial

from dist_ckpt_strategies.comm.abort import run_abandonable
from dist_ckpt_strategies.comm.teardown import Communication
from dist_ckpt_strategies.config import local_rank
from dist_ckpt_strategies.device import gpu_of_local_rank, synchronize_gpu, uses_cuda
from dist_ckpt_strategies.errors import RestartError
from dist_ckpt_strategies.inprocess.rendezvous import Fault


@dataclass(frozen=True, slots=True)
class HPState:
    """The argument of abort, finalize and health checks.

    Attributes:
        rank: global rank of this process.
        world_size: number of ranks of the job.
        restart_round: the rendezvous's number of the attempt.
        attempt: number of attempts of this process, this one included.
        fault: the fault that ended the attempt.
        communication: process groups and connections that this process opened in the attempt.
    """

    rank: int
    world_size: int
    restart_round: int
    attempt: int
    fault: Fault | None = None
    communication: Communication | None = None


Checked = tuple[HPState, BaseException | None]


class HealthCheck(ABC):
    """A check between two attempts; an exception ends this process, not the job."""

    @abstractmethod
    def __call__(self, state: HPState, train_ex: BaseException | None = None) -> Checked:
        """Both arguments, unchanged.

        Args:
            state: state of the attempt that has ended.
            train_ex: the exception of the function, if it raised one.
        """


class CudaHealthCheck(HealthCheck):
    """Checks that the GPU answers; passes if this process has not used CUDA.

    The GPU is that of LOCAL_RANK, else the current one of this thread.

    Args:
        timeout: longest time for the GPU to answer.
    """

    def __init__(self, timeout: dt.timedelta = dt.timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: HPState, train_ex: BaseException | None = None) -> Checked:
        """See HealthCheck.

        Raises:
            TimeoutError: the GPU does not answer in time.
            RestartError: it answers with an error.
        """
        if uses_cuda():
            device = gpu_of_local_rank(local_rank())
            what = f"CUDA device {device}"
            ask = partial(synchronize_gpu, device)
            try:
                run_abandonable(ask, self.timeout.total_seconds(), what)
            except RuntimeError as error:
                raise RestartError(f"{what}: {error}") from error
        return state, train_ex


class FaultCounter(HealthCheck):
    """Limits the number of faults of this rank.

    Args:
        max_faults: number of faults allowed; None: unlimited.
    """

    def __init__(self, max_faults: int | None = None) -> None:
        self.max_faults = max_faults
        self.num_faults = 0

    def __call__(self, state: HPState, train_ex: BaseException | None = None) -> Checked:
        """See HealthCheck.

        Raises:
            RestartError: it has raised more.
        """
        if state.fault is not None and state.fault.global_rank == state.rank:
            self.num_faults += 1
        if self.max_faults is not None and self.num_faults > self.max_faults:
            raise RestartError(
                f"rank {state.rank}: {self.num_faults} faults, {self.max_faults} allowed"
            )
        return state, train_ex


class ChainedHealthCheck(HealthCheck):
    """Runs several checks in order; the first exception is raised.

    Args:
        checks: the checks.
    """

    def __init__(self, *checks: HealthCheck) -> None:
        self.checks = checks

    def __call__(self, state: HPState, train_ex: BaseException | None = None) -> Checked:
        """See HealthCheck."""
        for check in self.checks:
            state, train_ex = check(state, train_ex)
        return state, train_ex
