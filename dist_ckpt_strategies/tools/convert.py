"""Checkpoints from one format to another, and to the optimizer's state of today. No ranks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.config import MIB, Options, options_from_environment
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.core.region import Region
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointExistsError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.formats.bucket_commit import SAVE_PREFIX
from dist_ckpt_strategies.formats.issues import Watch
from dist_ckpt_strategies.formats.locations import (
    Location,
    complete_commit,
    is_finished,
    located,
    make_directory,
    open_save_place,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.zarr3 import chunk_name
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.storage.base import HostArray
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
)
from dist_ckpt_strategies.tools.plan_convert import (
    ConvertLimits,
    ConvertPlan,
    FileTask,
    Format,
    SourceArray,
    build_convert_plan,
    is_of_optimizer,
)
from dist_ckpt_strategies.tools.readers import (
    CheckpointReader,
    is_safetensors_directory,
    open_reader,
)
from dist_ckpt_strategies.tools.upgrade import upgraded_common, upgraded_keys
from dist_ckpt_strategies.tools.writers import CheckpointWriter, Contents, TargetFiles, open_writer

_MAX_THREADS = 8
_WAITING_PER_THREAD = 4
"""Tasks handed to the threads ahead of time, for each of them."""

_BUFFERS = 4
"""Blocks that a thread holds at the same time, at most: read, put together, encoded, flushed."""

_LEAST_BLOCK_NBYTES = 64 << 10
_LARGEST_BLOCK_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How a conversion or a comparison is carried out.

    Attributes:
        max_memory_bytes: bound on the elements in memory at once, over all threads; objects come
            on top, one at a time, and the libraries.
        max_file_bytes: wanted size of the files of safetensors and torch_dist; an array that is
            larger has a file of its own in safetensors. 5 GB and 512 MiB by default.
        num_threads: files handled at the same time; by default one for each core, at least 2.
        options: timeouts, and what is verified while it is read.
    """

    max_memory_bytes: int = 256 * MIB
    max_file_bytes: int | None = None
    num_threads: int | None = None
    options: Options | None = None

    def __post_init__(self) -> None:
        """Refuse what can only be a mistake."""
        for name in ("max_memory_bytes", "max_file_bytes", "num_threads"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise StrategyError(f"option {name}: expected a number > 0, found {value!r}")

    @property
    def threads(self) -> int:
        """Files handled at the same time."""
        cores = len(os.sched_getaffinity(0))
        return self.num_threads or max(2, min(_MAX_THREADS, cores))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        share = self.max_memory_bytes // (_BUFFERS * self.threads)
        return max(_LEAST_BLOCK_NBYTES, min(_LARGEST_BLOCK_NBYTES, share))

    def limits(self, to: Format, target: Location) -> ConvertLimits:
        """What the plan has to keep to. An object of a store is held whole, as a block is."""
        default = 5 * 10**9 if to is Format.SAFETENSORS else 512 * MIB
        most = self.block_nbytes if isinstance(target, Bucket) else None
        return ConvertLimits(self.block_nbytes, self.max_file_bytes or default, most)

    def open(self, name: str | Path, allow: Allowed) -> CheckpointReader:
        """The finished checkpoint of that name; see ``open_reader``.

        What is on its way from a store takes memory too, and is bounded like a block.
        """
        options = self.options or options_from_environment()
        root = resolved(name, options)
        if isinstance(root, Bucket):
            options = options.with_changes(max_inflight_bytes=2 * self.block_nbytes)
        return open_reader(root, options, allow)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        num_arrays: arrays of the target.
        num_objects: shards of objects.
        nbytes: bytes of the elements of all arrays.
        seconds: that it took.
    """

    num_arrays: int
    num_objects: int
    nbytes: int
    seconds: float


@raises_megatron_errors
def convert(  # noqa: PLR0913
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    keys: str | None = None,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format, bit for bit, in bounded memory. One process.

    Nothing is visible in the target before all is there. A conversion that was killed leaves a
    ``.partial-`` directory, or a ``save-`` prefix, which the same call replaces.

    Args:
        source: directory of a finished checkpoint of ("zarr", 1), ("zarr", 2) or torch_dist; of
            ("zarr", 2) also its URL.
        target: a new or empty directory, or one that an unfinished conversion left; for ("zarr", 2)
            also a URL.
        to: ``zarr@2``, ``zarr@1``, ``torch_dist``, or ``safetensors`` for a model's arrays.
        keys: for safetensors only arrays whose keys match this glob.
        allow: further classes that objects may be unpickled to, for torch_dist.
        options: memory, threads, file sizes.
        watch: told about bytes of elements, done and in all, by any thread.

    Raises:
        CheckpointExistsError: the target holds something.
        ArrayNotFoundError: no array of a model, or none whose key matches.
        PlanError: the target cannot hold an array.
        StrategyError: one place is within the other, or the target is a URL and the format not
            ("zarr", 2); or one that makes no sense.
        StorageError: the source is damaged, or the target cannot be written.
        UnsafeObjectError: an object needs a class that is not allowed.
    """
    conversion = _Conversion(source, target, Format.named(to), options, allow)
    return conversion.run(keys, is_upgrade=False, watch=watch)


@raises_megatron_errors
def upgrade(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    *,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
) -> ConvertReport:
    """Convert a checkpoint whose optimizer state is of an older form, so that training goes on.

    The form ``fully_sharded_model_space``, of Megatron-Core up to 0.15.3 and NeMo 1.x, becomes
    ``fully_reshardable``: master parameters get their new names, and the common state says so.
    Everything else is as in ``convert``.

    Args:
        source: see convert.
        target: see convert.
        to: format of the target; by default the source's own.
        allow: further classes that the common state and objects may be unpickled to.
        options: see convert.
        watch: see convert.

    Raises:
        StrategyError: there is nothing to upgrade; others as in ``convert``.
    """
    chosen = None if to is None else Format.named(to)
    if chosen is Format.SAFETENSORS:
        raise PlanError("format: safetensors holds no optimizer state; use convert for the model")
    conversion = _Conversion(source, target, chosen, options, allow)
    return conversion.run(None, is_upgrade=True, watch=watch)


def resolved(name: str | Path, options: Options) -> Location:
    """The place of that name; a directory absolute, links resolved.

    Raises:
        StrategyError: it is no address.
    """
    location = located(name, options)
    return location.resolve() if isinstance(location, Path) else location


class _Conversion:
    """One conversion: its places are checked when it is made."""

    def __init__(
        self,
        source: str | Path,
        target: str | Path,
        to: Format | None,
        options: ConvertOptions | None,
        allow: Allowed,
    ) -> None:
        self._options = options or ConvertOptions()
        self._storage = self._options.options or options_from_environment()
        self._allow = [*default_allowed(), *allow]
        self._root = resolved(target, self._storage)
        if to is not None:
            _require_taken(self._root, to)
        self._source = self._options.open(source, self._allow)
        self._to = to or _own_format(self._source)
        _require_taken(self._root, self._to)
        root = self._source.root
        if _is_within(root, self._root) or _is_within(self._root, root):
            raise StrategyError(
                f"{self._root}: the target must be a place beside the source, {root}, not "
                "the same, nor one within the other"
            )

    def run(self, keys: str | None, *, is_upgrade: bool, watch: Watch | None) -> ConvertReport:
        """Plan, write to a place of its own, and move that into the target."""
        started = time.monotonic()
        source, to = self._source, self._to
        arrays = self._chosen(keys)
        object_ids: Sequence[ObjectId] = () if to is Format.SAFETENSORS else source.objects
        plan = build_convert_plan(
            arrays,
            to,
            self._options.limits(to, self._root),
            upgraded_keys(array.key for array in arrays) if is_upgrade else {},
            [object_id.key for object_id in object_ids],
            **({"chunk_name": chunk_name} if to is Format.ZARR2 else {}),
        )
        common = source.common_content()
        if is_upgrade:
            common = upgraded_common(common, f"{source.root}/{COMMON_NAME}", self._allow)
        objects = ((object_id, source.object_content(object_id)) for object_id in object_ids)
        _require_room(self._root, "" if is_upgrade else f"{source.root}")
        place = open_save_place(self._root, self._storage, keeps_old=True, overwrite=False)
        place.join(place.new_save_id())
        place.begin(None)
        location = place.location
        files = location if isinstance(location, Bucket) else TargetFiles(location, self._storage)
        writer = open_writer(files, to, self._options.block_nbytes, self._allow)
        writer.begin(plan)
        records = self._write_arrays(plan, writer, watch)
        writer.finish(plan, records, Contents(objects, common, source.layout))
        if isinstance(files, TargetFiles):  # a store has what it has acknowledged
            files.flush([task.name for task in plan.tasks])
        place.commit(writer.marker.to_json() if writer.marker else None)
        seconds = time.monotonic() - started
        return ConvertReport(len(plan.arrays), len(object_ids), plan.nbytes, seconds)

    def _chosen(self, keys: str | None) -> list[SourceArray]:
        """The arrays to convert."""
        arrays = self._source.arrays
        if self._to is not Format.SAFETENSORS:
            if keys is not None:
                raise PlanError(
                    f"keys: {self._to} takes whole checkpoints; only safetensors a choice of arrays"
                )
            return list(arrays)
        found = [
            array
            for array in arrays
            if not is_of_optimizer(array.key) and (keys is None or fnmatchcase(array.key, keys))
        ]
        if not found:
            of_keys = "" if keys is None else f" whose keys match {keys!r}"
            raise ArrayNotFoundError(
                f"{self._source.root}: no arrays of a model{of_keys} among its {len(arrays)}"
            )
        return found

    def _write_arrays(
        self, plan: ConvertPlan, writer: CheckpointWriter, watch: Watch | None
    ) -> dict[int, Any]:
        """What ``write`` gave for each task, by number. After a failure no further one begins."""
        progress = Progress(plan.nbytes, watch)

        def read(key: str, region: Region, target: HostArray) -> None:
            self._source.read(key, region, target)
            progress.add(region.numel * target.dtype.itemsize)

        records: dict[int, Any] = {}
        running: dict[Future[Any], int] = {}
        waiting: Iterator[tuple[int, FileTask]] = iter(enumerate(plan.tasks))
        threads = self._options.threads
        with ThreadPoolExecutor(threads, thread_name_prefix="dist-ckpt-convert") as pool:
            try:
                while True:
                    while len(running) < _WAITING_PER_THREAD * threads:
                        number, task = next(waiting, (None, None))
                        if number is None or task is None:
                            break
                        running[pool.submit(writer.write, task, read)] = number
                    if not running:
                        return records
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        records[running.pop(future)] = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


class Progress:
    """Counts bytes, from any thread, and reports them."""

    def __init__(self, total: int, watch: Watch | None) -> None:
        self._total, self._watch = total, watch
        self._done = 0
        self._counting = threading.Lock()

    def add(self, nbytes: int) -> None:
        """Count bytes as done."""
        with self._counting:
            self._done += nbytes
            if self._watch is not None:
                self._watch(self._done, self._total)


def _require_taken(root: Location, to: Format) -> None:
    """Raise where the target is in an object store, and the format does not go there."""
    if to is not Format.ZARR2:
        require_path(root, f"a target of format {to}")


def _require_room(root: Location, source: str) -> None:
    """Raise unless there is nothing, or what an unfinished conversion left.

    Raises:
        CheckpointExistsError: there is something else; where ``source`` is given, names the command
            that compares the two.
    """
    make_directory(root)
    complete_commit(root)
    if isinstance(root, Bucket):
        root.require_bucket()
        names = {name.partition("/")[0] for name in root.names("")}
        is_free = all(name.startswith(SAVE_PREFIX) for name in names)
    else:
        with file_errors(None, root):
            names = {path.name for path in root.iterdir()}
        is_free = all(name.startswith((PARTIAL_PREFIX, REMOVED_PREFIX)) for name in names)
    if not is_free:
        is_whole = is_finished(root) or is_safetensors_directory(root)
        hint = f"; `dist-ckpt diff` compares it with {source}" if source else ""
        what = f"a finished checkpoint{hint}" if is_whole else "files of something else"
        raise CheckpointExistsError(
            f"{root} holds {what}; name a new or empty directory", path=str(root)
        )


def _own_format(source: CheckpointReader) -> Format:
    marker = source.marker
    if marker.sharded_backend in {Format.TORCH_DIST, Format.SAFETENSORS}:
        return Format(marker.sharded_backend)
    return Format(f"{marker.sharded_backend}@{marker.sharded_backend_version}")


def _is_within(inner: Location, outer: Location) -> bool:
    """Whether one place is the other, or a part of it."""
    if isinstance(inner, Path) or isinstance(outer, Path):
        return isinstance(inner, Path) and inner.is_relative_to(str(outer))
    return f"{inner}/".startswith(f"{outer}/")
