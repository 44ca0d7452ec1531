"""Carry out a ConvertPlan: from storage to storage, on a few threads, resumable, visible last."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dist_ckpt_strategies.plan.convert import ConvertPlan
from dist_ckpt_strategies.spec.conversion import Unit
from dist_ckpt_strategies.spec.region import Region
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.conversion.journal import Notes, Record
from dist_ckpt_strategies.storage.conversion.sources import Source
from dist_ckpt_strategies.storage.conversion.targets import Contents, Flushing, Target
from dist_ckpt_strategies.storage.findings import Watch
from dist_ckpt_strategies.storage.locations import Location, publish, withdraw_marker

_NOTED_S = 10.0
"""After so many seconds what is done is made durable and noted in the journal."""

_WAITING_PER_THREAD = 4
"""Units handed to the threads ahead of time, for each of them."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        num_arrays: arrays of the target.
        num_objects: shards of objects.
        nbytes: bytes of the elements of all arrays.
        resumed_nbytes: those among them that earlier runs had done.
        seconds: that this run took.
    """

    num_arrays: int
    num_objects: int
    nbytes: int
    resumed_nbytes: int
    seconds: float


def run_convert(  # noqa: PLR0913, PLR0917
    plan: ConvertPlan,
    source: Source,
    root: Location,
    target: Target,
    flush: Flushing,
    contents: Contents,
    journal: Notes,
    num_threads: int,
    watch: Watch | None = None,
) -> ConvertReport:
    """Write the target, and make it visible.

    Memory: for each thread the boxes that the plan's limits allow; one object at a time.

    Args:
        plan: what is written.
        source: where elements come from.
        root: the target's directory, or its place in an object store.
        target: writes there.
        flush: makes that durable.
        contents: objects and common state.
        journal: what earlier runs have done.
        num_threads: units handled at the same time.
        watch: told about bytes of elements, done and in all.

    Raises:
        StorageError: something of the source is missing or damaged, or nothing can be written;
            what was done stays, and the next run goes on from there.
    """
    started = time.monotonic()
    withdraw_marker(root)  # of a run that lacked only its journal's removal: its files change now
    target.begin(plan)
    done = {
        number: record
        for number, record in journal.done.items()
        if target.is_there(plan.units[number], record)
    }
    progress = _Progress(plan, watch)
    resumed = progress.add(done)
    work = _Work(plan, source, target, done)
    with _pool(num_threads) as pool:
        for fresh in work.batches(pool, num_threads, progress):
            flush.run(plan.units[number].name for number in fresh)
            journal.add(fresh)
            done |= fresh
    num_objects = len(source.objects) if target.marker else 0
    target.finish(plan, done, contents)
    flush.run(unit.name for unit in plan.units)
    if target.marker is not None:
        publish(root, target.marker)
    journal.remove()
    return ConvertReport(
        len(plan.arrays), num_objects, plan.nbytes, resumed, time.monotonic() - started
    )


class _Pool(ThreadPoolExecutor):
    """On an error what has not begun is dropped, and what has is waited for."""

    def __exit__(self, kind: object, *_: object) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)


def _pool(num_threads: int) -> _Pool:
    return _Pool(num_threads, thread_name_prefix="dist-ckpt-convert")


class _Progress:
    """Counts bytes for whoever watches."""

    def __init__(self, plan: ConvertPlan, watch: Watch | None) -> None:
        self._plan = plan
        self._watch = watch
        self._done = 0
        self._counting = threading.Lock()

    def add(self, records: Mapping[int, Record]) -> int:
        """Count units as done; all bytes that are."""
        return self.add_nbytes(sum(self._plan.units[number].nbytes for number in records))

    def add_nbytes(self, nbytes: int) -> int:
        """Count bytes; all that are done."""
        with self._counting:
            self._done += nbytes
            if self._watch is not None:
                self._watch(self._done, self._plan.nbytes)
            return self._done


class _Work:
    """The units that are still to be done."""

    def __init__(
        self, plan: ConvertPlan, source: Source, target: Target, done: Mapping[int, Record]
    ) -> None:
        self._source = source
        self._target = target
        self._noted_nbytes = plan.limits.noted_nbytes
        self._left = [(n, unit) for n, unit in enumerate(plan.units) if n not in done]

    def batches(
        self, pool: ThreadPoolExecutor, num_threads: int, progress: _Progress
    ) -> Iterator[dict[int, Record]]:
        """Records of the units that are done now, as many together as are worth a flush."""
        running: dict[Future[Record], tuple[int, Unit]] = {}
        fresh: dict[int, Record] = {}
        held, since = 0, time.monotonic()
        left = iter(self._left)
        while True:
            while len(running) < _WAITING_PER_THREAD * num_threads:
                item = next(left, None)
                if item is None:
                    break
                running[pool.submit(self._do, item[1], progress)] = item
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number, unit = running.pop(future)
                fresh[number] = future.result()
                held += unit.nbytes
            if held >= self._noted_nbytes or time.monotonic() - since >= _NOTED_S:
                yield fresh
                fresh, held, since = {}, 0, time.monotonic()
        if fresh:
            yield fresh

    def _do(self, unit: Unit, progress: _Progress) -> Record:
        def read(key: str, region: Region, target: HostArray) -> None:
            self._source.read(key, region, target)
            progress.add_nbytes(region.numel * target.dtype.itemsize)

        return self._target.write(unit, read)
