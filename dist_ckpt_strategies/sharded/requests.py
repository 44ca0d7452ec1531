"""What an asynchronous local save returns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from dist_ckpt_strategies.comm.agree import agree_and_gather
from dist_ckpt_strategies.comm.base import Communicator, who_is_where
from dist_ckpt_strategies.config import limit_of_wait
from dist_ckpt_strategies.errors import MissingDependencyError, PlanError, SaveTimeoutError
from dist_ckpt_strategies.megatron.requests import AsyncRequest
from dist_ckpt_strategies.sharded.background import BackgroundWork, wait_for_mark


@dataclass(frozen=True, slots=True)
class SaveName:
    """What a request is told from others by.

    Attributes:
        token: of the save alone, and equal on all ranks.
        what: is ended, in words; each rank may see it in its own way.
    """

    token: str
    what: str


class _Finalisation:
    """Ends a save, once, however often it is called; if that fails, every call raises the same."""

    def __init__(
        self,
        comm: Communicator,
        name: SaveName,
        work: BackgroundWork[Any],
        finalise: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.work = work
        self.timeout_s = timeout_s
        self._comm = comm
        self._name = name
        self._finalise = finalise
        self._is_the_same = False
        self._is_called = False
        self._error: Exception | None = None

    def __call__(self) -> None:
        """End the save. Collective."""
        if self._error is not None:
            raise self._error
        if self._is_called:
            return
        if not self._is_the_same:
            self._require_the_same(agree_and_gather(self._comm, lambda: astuple(self._name)))
        self._is_called = True
        try:
            self._finalise()
        except SaveTimeoutError:
            self._is_called = False  # it may still end well
            raise
        except Exception as error:
            self._error = error
            raise

    def await_work(self, timeout_s: float) -> None:
        """Return when every rank's share has ended, well or not. Collective.

        However long that is, the ranks meet again before any has waited too long for another.

        Raises:
            SaveTimeoutError: some rank's takes longer; on every rank.
            PlanError: ranks wait for different saves; all may still be waited for.
        """
        if self._is_called:
            return
        deadline = time.monotonic() + timeout_s
        longest_s = limit_of_wait(self.timeout_s)

        def is_done() -> bool:
            left_s = max(0.0, deadline - time.monotonic())
            if self.work.ends_within(min(left_s, longest_s)):
                return True
            if left_s <= longest_s:
                raise SaveTimeoutError(None, f"the save is not done after {timeout_s:g} s")
            return False

        are_done = False
        while not are_done:
            answers = agree_and_gather(self._comm, lambda: [*astuple(self._name), is_done()])
            self._require_the_same([name for *name, _ in answers])
            are_done = all(done for *_, done in answers)

    def _require_the_same(self, names: Sequence[Sequence[str]]) -> None:
        tokens, texts = zip(*names, strict=True)
        if len(set(tokens)) > 1:
            raise PlanError(
                "expected all ranks to end their saves in the same order, found "
                + who_is_where(self._comm, tokens, texts)
            )
        self._is_the_same = True


class LocalSaveRequest(AsyncRequest):  # type: ignore[misc]
    """A save that goes on behind training; Megatron-Core's queues take it as a request of theirs.

    It works without a queue too: ``done()`` and ``wait()``. It is finalised once, by a queue or by
    ``wait``; if the save has failed on any rank, that raises on every rank.
    """

    __slots__ = ()

    _fields = ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs")
    """Fewer than NVRx's request has today: its queue makes one of its own class of those, as it
    does of requests from before it had the others. Here the others always are as they are by
    default, and Megatron-Core's queue asks the instance for them."""

    @classmethod
    def of(
        cls,
        comm: Communicator,
        name: SaveName,
        work: BackgroundWork[Any],
        finalise: Callable[[], None],
        timeout_s: float,
    ) -> LocalSaveRequest:
        """The request of a save.

        Args:
            comm: the ranks that save together.
            name: of this save.
            work: what goes on behind training.
            finalise: called by every rank once that has ended on all of them.
            timeout_s: longest wait for it, in seconds.
        """
        end = _Finalisation(comm, name, work, finalise, timeout_s)
        return cls(wait_for_mark, (str(work.end_mark), os.getpid()), [end], {})

    def for_nvrx(self) -> Any:
        """The same request in the class of NVRx.

        The queue of 0.4.1 makes that itself; one that does not, if persistent, passes over
        requests of others.

        Raises:
            MissingDependencyError: nvidia-resiliency-ext is not installed.
        """
        try:
            from nvidia_resiliency_ext.checkpointing.async_ckpt import (  # noqa: PLC0415
                core as nvrx,
            )
        except ImportError as error:
            raise MissingDependencyError(
                f"NVRx's queue needs a package that does not import here ({error}); install "
                "nvidia-resiliency-ext, or use Megatron-Core's queue"
            ) from error
        return nvrx.AsyncRequest(
            self.async_fn, self.async_fn_args, self.finalize_fns, self.async_fn_kwargs
        )

    def done(self) -> bool:
        """Whether this rank's share of the save has ended, well or not. Rank-local."""
        return bool(self.finalize_fns[0].work.is_done())

    def wait(self, timeout_s: float | None = None) -> None:
        """Finalise the save: every rank's part is there then, or every rank raises.

        Collective over all ranks of the manager.

        Args:
            timeout_s: longest wait for this rank's share, in seconds; by default the manager's.

        Raises:
            StorageError: a part could not be written.
            SaveTimeoutError: on some rank it takes too long; the save goes on, and may be waited
                for again.
            PlanError: another rank waits for another save; all may be waited for again.
            PeerError: another rank failed.
        """
        end = self.finalize_fns[0]
        end.await_work(end.timeout_s if timeout_s is None else timeout_s)
        for finalize in self.finalize_fns:
            finalize()
