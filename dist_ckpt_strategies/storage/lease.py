"""One job at a time at a place that holds checkpoints: a lock that runs out with its holder.

A lock is a small file, ``.dist-ckpt-lock-N``; of several the one with the largest N counts. Its
holder rewrites it four times per lease. A job that wants the place watches it: where it changes its
holder lives. The watcher makes the file with the next number where it does not change for a whole
lease, by the watcher's clock, where the holder's process has ended on the same host, or where the
holder was of the watcher's own job: ranks of a job remember its random id, and give it to the one
that takes the holder's place; ``dist-ckpt run`` gives it to all. To make a file that is not there
yet is one atomic step: ``O_EXCL`` in a directory, a conditional put in an object store.

What this protects: two jobs that both use it never both go on; the one that lost its lock learns
it at the next look. What it does not: between that look and the end of what follows, a holder that
was stopped for longer than its lease may overlap with the next one: of two saves of one step to
one place, the second makes the first one fail. Nor does it stop programs that save without it.
"""

import atexit
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Collection
from contextlib import suppress

from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    IncompleteCheckpointError,
    StorageError,
)
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import Directory
from dist_ckpt_strategies.storage.host import has_ended, process_name
from dist_ckpt_strategies.storage.io_pool import raise_if_cancelled

logger = logging.getLogger(__name__)

LOCK_PREFIX = ".dist-ckpt-lock-"
_BEATS = 4
"""Of a holder within its lease."""

JOBS: dict[str, str] = {}
"""The job that this process belongs to, a random id, by the name of the place."""
os.register_at_fork(after_in_child=JOBS.clear)


class Lease:
    """The lock of a place, for this process. Rank-local: one rank of a job holds it for all.

    Args:
        place: holds the checkpoints; a directory is made where it is missing.
        lease_s: not renewed for so many seconds, another job may take over.
    """

    def __init__(self, place: Directory | Bucket, lease_s: float) -> None:
        self._place, self._lease_s = place, lease_s
        self._id = uuid.uuid4().hex
        self._number = 0
        self._num_beats = 0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = 0

    def acquire(self, timeout_s: float, jobs: Collection[str] = ()) -> None:
        """Take the lock; wait while it is not known whether its holder lives.

        ``jobs`` are the ids that ranks of this job know it by: a holder with one of these was of
        this job, and is replaced.

        Raises:
            CheckpointChangedError: it does, or was not silent for its lease within ``timeout_s``.
            StorageError: the place cannot be read or written.
        """
        if self._thread is not None:
            self.require()
            return
        began = since = time.monotonic()
        seen: tuple[int, dict[str, object]] = (0, {})
        while True:
            state = number, holder = self._current()
            raise_if_cancelled()
            now = time.monotonic()
            if state != seen:
                if number and number == seen[0]:
                    raise self._locked(holder, "is alive")
                seen, since = state, now
            lease_s = float(str(holder.get("lease_s", self._lease_s)))
            has_run_out = now - since > lease_s or has_ended(str(holder.get("process")))
            is_of_job = _is_own(holder) or holder.get("job") in jobs
            if (not number or has_run_out or is_of_job) and self._take(number + 1, holder):
                return
            if now - began > timeout_s:
                raise self._locked(holder, f"may be alive after {timeout_s:g} s of waiting")
            time.sleep(min(0.5, self._lease_s / 20))

    def require(self) -> None:
        """Raise CheckpointChangedError unless this process still holds the lock."""
        number, holder = self._current()
        if not number:
            raise CheckpointChangedError(
                f"{self._place}: this process no longer has the lock, and nobody has: a later "
                "manager took it over, and has given it back, or its file was removed; go on with "
                "a new manager",
                path=str(self._place),
            )
        if (number, holder.get("id")) != (self._number, self._id):
            why = f"as this process was silent for {self._lease_s:g} s"
            if _is_own(holder):
                why = "with a later manager; use that one"
            elif holder.get("job") == JOBS.get(str(self._place), ""):
                why = "as the new rank 0 of this job"
            raise self._locked(holder, f"has taken over, {why}")

    def release(self) -> None:
        """Give the lock back, if this has it; an error is logged: the lock runs out by itself.

        A process that was forked from the holder does not have it.
        """
        if self._thread is None or self._pid != os.getpid():
            return
        atexit.unregister(self.release)
        self._is_over.set()
        self._thread.join(self._lease_s)  # or it might make the file anew
        self._thread = None
        try:
            self.require()
            self._place.delete([self._file(self._number)])
        except StorageError as error:
            logger.warning(
                "%s: the lock is not given back, and expires by itself: %s", self._place, error
            )

    def _take(self, number: int, before: dict[str, object]) -> bool:
        """Make the lock of that number; whether this process has it then."""
        self._number = number
        if not self._place.create(self._file(number), self._content()):
            return False
        newest, holder = self._current()
        if newest != number or holder.get("id") != self._id:
            if newest != number:
                self._place.delete([self._file(number)])
            return False
        raise_if_cancelled()
        names = self._place.names(LOCK_PREFIX)
        self._place.delete(name for name in names if _number_of(name) < number)
        raise_if_cancelled()  # else nobody would give the lock back
        self._is_over.clear()
        self._thread = threading.Thread(target=self._beat, name="dist-ckpt-lease", daemon=True)
        self._thread.start()
        self._pid = os.getpid()
        if before:
            logger.warning("%s: took over from %s", self._place, _name(before))
        atexit.register(self.release)  # of a script that ends without it
        return True

    def _beat(self) -> None:
        """Show that the holder lives, until it gives the lock back or has lost it."""
        while not self._is_over.wait(self._lease_s / _BEATS):
            try:
                self.require()
                self._num_beats += 1
                self._place.write(self._file(self._number), self._content())
            except CheckpointChangedError as error:
                logger.error("%s", error)  # noqa: TRY400 - no traceback is needed
                return
            except StorageError as error:
                logger.warning("the lock could not be renewed this time: %s", error)

    def _current(self) -> tuple[int, dict[str, object]]:
        """Number and holder of the lock that counts; 0 and nothing where there is none."""
        while number := max(map(_number_of, self._place.names(LOCK_PREFIX)), default=0):
            with suppress(IncompleteCheckpointError):  # given back meanwhile
                content = self._place.read(self._file(number))
                with suppress(ValueError):
                    found = json.loads(content)
                    return number, found if isinstance(found, dict) else {}
                return number, {}
        return 0, {}

    def _content(self) -> bytes:
        process = process_name(os.getpid())
        holder = {"id": self._id, "process": process, "pid": os.getpid()}
        host = {
            "job": JOBS.get(str(self._place)),
            "host": socket.gethostname(),
            "lease_s": self._lease_s,
        }
        return json.dumps({**holder, **host, "beat": self._num_beats}).encode()

    def _file(self, number: int) -> str:
        return f"{LOCK_PREFIX}{number:08d}"

    def _locked(self, holder: dict[str, object], what: str) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"{self._place}: another job saves here: {_name(holder)} {what}; wait for its end, or "
            f"save elsewhere. After {holder.get('lease_s', self._lease_s)} s without a sign of "
            "life the place is free",
            path=str(self._place),
        )


def _number_of(name: str) -> int:
    number = name.removeprefix(LOCK_PREFIX)
    return int(number) if number.isdecimal() else 0


def _name(holder: dict[str, object]) -> str:
    if "pid" not in holder:
        return "an unknown process"
    return f"process {holder['pid']} of host {holder.get('host')}"


def _is_own(holder: dict[str, object]) -> bool:
    """Whether this very process holds it, for an earlier attempt of its job."""
    return bool(holder.get("process")) and holder["process"] == process_name(os.getpid())
