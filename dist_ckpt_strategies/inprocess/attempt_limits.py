"""How often a block is tried again: what fails every time is not mended by that."""

from __future__ import annotations

from dist_ckpt_strategies.errors import RestartLimitError
from dist_ckpt_strategies.inprocess.coordinator import FaultMode
from dist_ckpt_strategies.inprocess.health_check import HPState


class AttemptLimits:
    """Counts the attempts of one call.

    Args:
        max_attempts: of this process; None for any number.
        max_idle: in a row, ended by this rank's own exception before a step was done; None for
            any number.
    """

    def __init__(self, max_attempts: int | None, max_idle: int | None) -> None:
        self._max_attempts = max_attempts
        self._max_idle = max_idle
        self._num_idle = 0

    def require_another(
        self, state: HPState, *, did_step: bool, train_ex: BaseException | None
    ) -> None:
        """Raise unless there may be another attempt after this one.

        Args:
            state: of the attempt that has ended; asked once for each.
            did_step: whether it has got on by a step.
            train_ex: what the block raised, where it did.

        Raises:
            RestartLimitError: there may not.
        """
        limit = self._max_attempts
        if limit is not None and state.attempt >= limit:
            raise RestartLimitError(
                f"{state.attempt} attempts, {limit} allowed; the last: {state.fault}"
            ) from train_ex
        self._count_idle(state, did_step=did_step)
        if self._max_idle is not None and self._num_idle >= self._max_idle:
            raise RestartLimitError(
                f"{self._num_idle} attempts in a row ended in an exception of this rank before a "
                f"step was done; the last: {state.fault}"
            ) from train_ex

    def _count_idle(self, state: HPState, *, did_step: bool) -> None:
        fault = state.fault
        if did_step:
            self._num_idle = 0
        elif (
            fault is not None
            and fault.global_rank == state.rank
            and fault.mode is FaultMode.EXCEPTION
        ):
            self._num_idle += 1
