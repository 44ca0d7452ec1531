"""Checkpoints from one format to another, and to the optimizer's state of today."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.shared_work import Count, Ranks
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
from dist_ckpt_strategies.formats.commit import SavePlace
from dist_ckpt_strategies.formats.issues import Watch
from dist_ckpt_strategies.formats.locations import (
    Location,
    complete_commit,
    is_finished,
    located,
    open_save_place,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.zarr3 import chunk_name
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.megatron.types import default_allowed
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
_BUFFERS = 4
"""Blocks that a thread holds at the same time, at most: read, assembled, encoded, flushed."""

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

    @property
    def storage(self) -> Options:
        """How files are read and written."""
        return self.options or options_from_environment()

    def limits(self, to: Format, target: Location) -> ConvertLimits:
        """What the plan has to keep to. An object of a store is held whole, as a block is."""
        default = 5 * 10**9 if to is Format.SAFETENSORS else 512 * MIB
        most = self.block_nbytes if isinstance(target, Bucket) else None
        return ConvertLimits(self.block_nbytes, self.max_file_bytes or default, most)

    def open(self, name: str | Path, allow: Allowed) -> CheckpointReader:
        """The finished checkpoint of that name; see ``open_reader``.

        What is on its way from a store takes memory too, and is bounded like a block.
        """
        options = self.storage
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
    comm: Communicator | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format, bit for bit, in bounded memory.

    Nothing is visible in the target before all is there. A conversion that failed or was killed
    leaves a ``.partial-`` directory, or a ``save-`` prefix, which the same call replaces.

    Collective if ``comm`` has several ranks: each writes its share of the files, the result is the
    same as that of one process, and a failure on one rank is raised on all.

    Args:
        source: directory of a finished checkpoint of ("zarr", 1), ("zarr", 2) or torch_dist; of
            ("zarr", 2) also its URL.
        target: a new or empty directory, or one that an unfinished conversion left; for ("zarr", 2)
            also a URL.
        to: ``zarr@2``, ``zarr@1``, ``torch_dist``, or ``safetensors`` for a model's arrays.
        keys: for safetensors only arrays whose keys match this glob.
        allow: further classes that objects may be unpickled to, for torch_dist.
        options: memory and threads of each process, file sizes.
        watch: called with bytes of elements, done and in all, now and then.
        comm: ranks that share the work, as ``comm.torch_communicator.open_communicator`` gives
            them; None: this process does it alone, also where torch.distributed is initialised.

    Raises:
        CheckpointExistsError: the target holds something.
        ArrayNotFoundError: no array of a model, or none whose key matches.
        PlanError: the target cannot hold an array, or the ranks see different sources.
        StrategyError: one place is within the other, or the target is a URL and the format not
            ("zarr", 2); or one that makes no sense.
        StorageError: the source is damaged, or the target cannot be written.
        UnsafeObjectError: an object needs a class that is not allowed.
    """
    conversion = _Conversion(options, allow, comm)
    return conversion.run(source, target, Format.named(to), keys, is_upgrade=False, watch=watch)


@raises_megatron_errors
def upgrade(  # noqa: PLR0913
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    *,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
    comm: Communicator | None = None,
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
        comm: see convert.

    Raises:
        StrategyError: there is nothing to upgrade; others as in ``convert``.
    """
    chosen = None if to is None else Format.named(to)
    if chosen is Format.SAFETENSORS:
        raise PlanError("format: safetensors holds no optimizer state; use convert for the model")
    conversion = _Conversion(options, allow, comm)
    return conversion.run(source, target, chosen, None, is_upgrade=True, watch=watch)


def resolved(name: str | Path, options: Options) -> Location:
    """The place of that name; a directory absolute, links resolved.

    Raises:
        StrategyError: it is no address.
    """
    location = located(name, options)
    return location.resolve() if isinstance(location, Path) else location


@dataclass(frozen=True, slots=True)
class _Opened:
    """What a conversion reads, and what it writes."""

    source: CheckpointReader
    root: Location
    plan: ConvertPlan
    object_ids: Sequence[ObjectId]


class _Conversion:
    """One conversion, on all ranks of a communicator; every method is collective."""

    def __init__(
        self, options: ConvertOptions | None, allow: Allowed, comm: Communicator | None
    ) -> None:
        self._options = options or ConvertOptions()
        self._allow = [*default_allowed(), *allow]
        self._ranks = Ranks(comm)

    def run(
        self,
        source: str | Path,
        target: str | Path,
        to: Format | None,
        keys: str | None,
        *,
        is_upgrade: bool,
        watch: Watch | None,
    ) -> ConvertReport:
        """Plan, write to a place of its own, and move that into the target."""
        started = time.monotonic()
        ranks = self._ranks
        opened = ranks.run(lambda: self._opened(source, target, to, keys, is_upgrade=is_upgrade))
        plan, root = opened.plan, opened.root
        contents = ranks.run(lambda: self._contents(opened, is_upgrade=is_upgrade))
        ranks.run_on_first(lambda: _require_free(root, "" if is_upgrade else opened.source.root))
        place = open_save_place(root, self._options.storage, keeps_old=True, overwrite=False)
        place.join(ranks.run_on_first(place.new_save_id))
        ranks.run_on_first(lambda: place.begin(None))
        writer, flush = ranks.run(lambda: self._open_target(place, plan))
        ranks.run_on_first(writer.begin)
        records = self._write_arrays(opened, writer, watch)

        def flush_own() -> list[tuple[int, Any]]:
            flush(plan.tasks[number].name for number in records)
            return list(records.items())

        gathered = ranks.gather(flush_own)

        def finish() -> None:
            writer.finish(dict(chain.from_iterable(gathered)), contents)
            flush(task.name for task in plan.tasks)
            place.commit(writer.marker.to_json() if writer.marker else None)

        ranks.run_on_first(finish)
        seconds = time.monotonic() - started
        return ConvertReport(len(plan.arrays), len(opened.object_ids), plan.nbytes, seconds)

    def _open_target(
        self, place: SavePlace, plan: ConvertPlan
    ) -> tuple[CheckpointWriter, Callable[[Iterable[str]], None]]:
        """What writes to the place, and what makes files of these names durable."""
        place.require(self._ranks.first)
        location, block_nbytes = place.location, self._options.block_nbytes
        if isinstance(location, Bucket):  # a store has what it has acknowledged
            return open_writer(location, plan, block_nbytes, self._allow), lambda _: None
        files = TargetFiles(location, self._options.storage)
        return open_writer(files, plan, block_nbytes, self._allow), files.flush

    def _write_arrays(
        self, opened: _Opened, writer: CheckpointWriter, watch: Watch | None
    ) -> dict[int, Any]:
        """What ``write`` gave for each of this rank's tasks, by number."""

        def write(task: FileTask, count: Count) -> Any:
            def read(key: str, region: Region, target: HostArray) -> None:
                opened.source.read(key, region, target)
                count(region.numel * target.dtype.itemsize)

            return writer.write(task, read)

        return self._ranks.share(
            opened.plan.tasks,
            lambda task: task.nbytes,
            write,
            num_threads=self._options.threads,
            watch=watch,
        )

    def _opened(
        self,
        source: str | Path,
        target: str | Path,
        to: Format | None,
        keys: str | None,
        *,
        is_upgrade: bool,
    ) -> _Opened:
        """Open the source and check the target's address; nothing is written."""
        root = resolved(target, self._options.storage)
        if to is not None:
            _require_taken(root, to)
        reader = self._options.open(source, self._allow)
        chosen = to or _own_format(reader)
        _require_taken(root, chosen)
        if _is_within(reader.root, root) or _is_within(root, reader.root):
            raise StrategyError(
                f"{root}: the target must be a place beside the source, {reader.root}, not the "
                "same, nor one within the other"
            )
        arrays = _chosen(reader, chosen, keys)
        object_ids = () if chosen is Format.SAFETENSORS else reader.objects
        plan = build_convert_plan(
            arrays,
            chosen,
            self._options.limits(chosen, root),
            upgraded_keys(array.key for array in arrays) if is_upgrade else {},
            [object_id.key for object_id in object_ids],
            **({"chunk_name": chunk_name} if chosen is Format.ZARR2 else {}),
        )
        return _Opened(reader, root, plan, object_ids)

    def _contents(self, opened: _Opened, *, is_upgrade: bool) -> Contents:
        """What there is beside the arrays; empty on all ranks but the first, which writes it."""
        source = opened.source
        if self._ranks.rank:
            return Contents((), b"", {})
        common = source.common_content()
        if is_upgrade:
            common = upgraded_common(common, f"{source.root}/{COMMON_NAME}", self._allow)
        objects = ((one, source.object_content(one)) for one in opened.object_ids)
        return Contents(objects, common, source.layout)


def _chosen(source: CheckpointReader, to: Format, keys: str | None) -> Sequence[SourceArray]:
    """The arrays to convert."""
    if to is not Format.SAFETENSORS:
        if keys is not None:
            raise PlanError(
                f"keys: {to} takes whole checkpoints; only safetensors a choice of arrays"
            )
        return source.arrays
    found = [
        array
        for array in source.arrays
        if not is_of_optimizer(array.key) and (keys is None or fnmatchcase(array.key, keys))
    ]
    if not found:
        of_keys = "" if keys is None else f" whose keys match {keys!r}"
        raise ArrayNotFoundError(
            f"{source.root}: no arrays of a model{of_keys} among its {len(source.arrays)}"
        )
    return found


def _require_taken(root: Location, to: Format) -> None:
    """Raise where the target is in an object store, and the format does not go there."""
    if to is not Format.ZARR2:
        require_path(root, f"a target of format {to}")


def _require_free(root: Location, source: Location | str) -> None:
    """Raise unless there is nothing, or what an unfinished conversion left.

    Raises:
        CheckpointExistsError: there is something else; where ``source`` is given, names the command
            that compares the two.
    """
    complete_commit(root)
    if isinstance(root, Bucket):
        root.require_bucket()
        names = {name.partition("/")[0] for name in root.names("")}
        is_free = all(name.startswith(SAVE_PREFIX) for name in names)
    else:
        with file_errors(None, root):
            names = {path.name for path in root.iterdir()} if root.exists() else set()
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
