"""The root directory: its lock, course, metrics of steps, and removal. Rank-local."""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

from dist_ckpt_strategies.config import JOB, environment, options_from_environment
from dist_ckpt_strategies.errors import CheckpointError
from dist_ckpt_strategies.formats.course import (
    Course,
    KeepBest,
    read_course,
    read_metrics,
    write_course,
    write_metrics,
)
from dist_ckpt_strategies.formats.locations import located, place_of
from dist_ckpt_strategies.manager.candidates import Candidate, Tier, checkpoints_at, iteration_of
from dist_ckpt_strategies.manager.policy import SavePolicy
from dist_ckpt_strategies.storage.io_pool import ALL, WORK, Deadline, run_within
from dist_ckpt_strategies.storage.lease import JOBS, Lease
from dist_ckpt_strategies.tools.prune import prune

T = TypeVar("T")

logger = logging.getLogger(__name__)

NAME = r"iter_\d{7,}"
"""Pattern of the names of a manager's checkpoints; others are neither loaded nor removed."""

_MIN_UNFINISHED_S = 3600.0
"""Time without a change after which an unfinished save is removed."""

Resumed = tuple[int | None, str]
"""The step that the training has loaded, if any, and when; stamps of local saves begin like it."""


class Root:
    """The directory or URL that holds the global checkpoints of a training.

    Args:
        address: the directory or URL.
        timeout_s: longest wait for a peer; storage gets a share of it.
        lease_s: seconds without a renewal after which the next job may take the lock.

    Attributes:
        store: reads and writes its files.
    """

    def __init__(self, address: str | Path, timeout_s: float, lease_s: float | None = None) -> None:
        self._place = located(address, options_from_environment())
        self.store = place_of(self._place)
        self._timeout_s = timeout_s
        self._lease = Lease(self.store, lease_s or timeout_s / 4)
        self._removal: threading.Thread | None = None
        self._one_removal = threading.Lock()

    def __str__(self) -> str:
        """Path or URL."""
        return str(self._place)

    def within(self, step: Callable[[], T]) -> T:
        """The result of a step that reads or writes the root's storage."""
        return run_within(Deadline.after(ALL * self._timeout_s), str(self), step)

    def directory(self, step: int) -> str:
        """Path or URL of the checkpoint of a step."""
        return f"{self}/iter_{step:07d}"

    def candidates(self, pattern: str | None = NAME) -> list[Candidate]:
        """The checkpoints, finished or not, the newest first; see ``load_latest``."""
        found = checkpoints_at(self._place, pattern)
        course = Course() if str(self) in found else read_course(self.store)
        rows = (
            (number := iteration_of(name), name, is_finished, not is_finished or course.has(number))
            for name, is_finished in found.items()
        )
        return [Candidate(Tier.GLOBAL, *row) for row in sorted(rows, reverse=True)]

    # The lock

    def job(self) -> str | None:
        """The id of this process's job, if it has one already."""
        return JOBS.get(str(self)) or environment().get(JOB)

    def join(self, job: str) -> None:
        """Take part in a job: its ranks may take over the lock from each other."""
        JOBS[str(self)] = job

    def acquire(self, timeout_s: float, jobs: Collection[str]) -> None:
        """Take the lock, for all ranks; see Lease."""
        self.within(lambda: self._lease.acquire(timeout_s, jobs))

    def require_lock(self) -> None:
        """Raise a CheckpointChangedError if another job has taken over."""
        self.within(self._lease.require)

    def release(self) -> None:
        """Give the lock back."""
        self._lease.release()

    # Of a save

    def write_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note the metrics of a step, if it has any, or had in an earlier save."""
        if metrics or read_metrics(self.store, step):
            write_metrics(self.store, step, metrics)

    def note_course(
        self, step: int, tier: Tier, resumed: Resumed | None, keep_best: KeepBest | None
    ) -> None:
        """Note what was written last, and the rule; after a load, also what was left."""
        before = read_course(self.store)
        left, newest, since = set(before.left), before.newest, before.resumed
        if resumed is not None:
            base = step if resumed[0] is None else resumed[0]
            there = [one for one in self.candidates() if one.is_finished]
            left = {one.iteration for one in there if one.iteration > base or not one.is_ours} - {
                base
            }
            kept = (one.iteration for one in there if one.iteration not in left)
            newest, since = max(kept, default=newest), (base, resumed[1])
        if tier is Tier.GLOBAL:
            left.discard(step)
            newest = step
        after = Course(newest, frozenset(left), resumed=since, keep_best=keep_best)
        if after != before:
            write_course(self.store, after)

    def begin_removal(self, policy: SavePolicy) -> None:
        """Remove what is not to be kept, in the background."""
        if not (policy.keep_last or policy.keep_best):
            return
        removal = threading.Thread(
            target=self._remove, args=[policy], name="dist-ckpt-prune", daemon=True
        )
        try:
            removal.start()
            self._removal = removal
        except RuntimeError as error:  # such as at the end of a script, from Python 3.12 on
            logger.warning("%s: old checkpoints could not be removed yet: %s", self, error)

    def await_removal(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the last removal, at most so long; by default as for a save."""
        if self._removal is not None:
            self._removal.join(WORK * self._timeout_s if timeout_s is None else timeout_s)

    def _remove(self, policy: SavePolicy) -> None:
        with self._one_removal:
            try:
                report = prune(
                    str(self),
                    keep_last=policy.keep_last or 1,
                    keep_every=policy.keep_every,
                    keep_best=policy.keep_best,
                    unfinished=True,
                    older_than_s=max(_MIN_UNFINISHED_S, 2 * self._timeout_s),
                    pattern=NAME,
                )
            except CheckpointError as error:
                logger.warning("%s: old checkpoints could not be removed yet: %s", self, error)
            else:
                names = ", ".join(one.name for one in report.removed)
                logger.info("%s: removed %s", self, names or "nothing")


def now() -> str:
    """The time, as stamps of local saves begin."""
    return f"{time.time_ns():016x}"
