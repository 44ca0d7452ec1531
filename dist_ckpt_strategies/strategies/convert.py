"""Checkpoints from one format to another, and to the optimizer's state of today. No ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from dist_ckpt_strategies.config import MIB, Options, options_from_environment
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointExistsError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.megatron.allowed import default_allowed
from dist_ckpt_strategies.megatron.errors import raises_megatron_errors
from dist_ckpt_strategies.plan.convert import ConvertLimits, ConvertPlan, build_convert_plan
from dist_ckpt_strategies.plan.upgrade import is_of_optimizer, upgraded_keys
from dist_ckpt_strategies.run.convert import ConvertReport, run_convert
from dist_ckpt_strategies.spec.array import array_to_wire
from dist_ckpt_strategies.spec.conversion import Format, SourceArray
from dist_ckpt_strategies.spec.object import ObjectId
from dist_ckpt_strategies.storage.buckets.bucket import Bucket
from dist_ckpt_strategies.storage.conversion.bucket_targets import BucketConversion, BucketJournal
from dist_ckpt_strategies.storage.conversion.journal import JOURNAL_NAME, Journal, Notes
from dist_ckpt_strategies.storage.conversion.sources import (
    Source,
    is_of_safetensors,
    open_source,
)
from dist_ckpt_strategies.storage.conversion.targets import (
    Contents,
    Flush,
    Flushing,
    StoreFlush,
    Target,
)
from dist_ckpt_strategies.storage.conversion.torch_targets import (
    SafetensorsConversion,
    TorchDistConversion,
)
from dist_ckpt_strategies.storage.conversion.zarr_targets import (
    Format1Conversion,
    Format2Conversion,
)
from dist_ckpt_strategies.storage.disk.files import COMMON_NAME, PARTIAL_PREFIX, file_errors
from dist_ckpt_strategies.storage.findings import Watch
from dist_ckpt_strategies.storage.format2.layout import chunk_name
from dist_ckpt_strategies.storage.format2.manifest import digest_of
from dist_ckpt_strategies.storage.locations import (
    Location,
    is_finished,
    located,
    make_directory,
    require_path,
)
from dist_ckpt_strategies.storage.objects.pickled import Allowed
from dist_ckpt_strategies.strategies.format2_target import package_versions
from dist_ckpt_strategies.strategies.upgrade import upgraded_common

_MAX_THREADS = 8
_BUFFERS = 4
"""Boxes that a thread holds at the same time, at most: read, put together, encoded, flushed."""

_LEAST_BOX_NBYTES = 64 << 10
_LARGEST_BOX_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How a conversion or a comparison is carried out.

    Attributes:
        max_memory_bytes: bound on the elements in memory at once, over all threads; objects come
            on top, one at a time, and the libraries.
        max_file_bytes: wanted size of the files of safetensors and torch_dist; an array that is
            larger has a file of its own in safetensors. 5 GB and 512 MiB by default.
        num_threads: files handled at the same time; by default one for each core, at least 2.
        noted_bytes: after so many bytes what is done is made durable, so that a run after a kill
            goes on from there. At the latest after 10 s.
        options: timeouts, and what is verified while it is read.
    """

    max_memory_bytes: int = 256 * MIB
    max_file_bytes: int | None = None
    num_threads: int | None = None
    noted_bytes: int = 1024 * MIB
    options: Options | None = None

    def __post_init__(self) -> None:
        """Refuse what can only be a mistake."""
        for name in ("max_memory_bytes", "max_file_bytes", "num_threads", "noted_bytes"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value > 0):
                raise StrategyError(f"option {name}: expected a number > 0, found {value!r}")

    @property
    def threads(self) -> int:
        """Files handled at the same time."""
        cores = len(os.sched_getaffinity(0))
        return self.num_threads or max(2, min(_MAX_THREADS, cores))

    @property
    def box_nbytes(self) -> int:
        """Bytes of a box."""
        share = self.max_memory_bytes // (_BUFFERS * self.threads)
        return max(_LEAST_BOX_NBYTES, min(_LARGEST_BOX_NBYTES, share))

    def limits(self, to: Format, target: Location) -> ConvertLimits:
        """What the plan has to keep to. An object of a store is held whole, as a box is."""
        default = 5 * 10**9 if to is Format.SAFETENSORS else 512 * MIB
        most = self.box_nbytes if isinstance(target, Bucket) else None
        file_nbytes = self.max_file_bytes or default
        return ConvertLimits(self.box_nbytes, file_nbytes, self.noted_bytes, most)

    def reading(self, source: Location) -> Options:
        """How boxes of a source are read: what is on its way from a store takes memory too."""
        options = self.options or options_from_environment()
        if isinstance(source, Path):
            return options
        return options.with_changes(max_inflight_bytes=2 * self.box_nbytes)


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

    Nothing is visible before all is there. A run that was killed, repeated with the same
    arguments, goes on where that one stopped.

    Args:
        source: directory of a finished checkpoint: ("zarr", 1), ("zarr", 2), or torch_dist of
            Megatron-Core 0.16. Of ("zarr", 2) also its URL.
        target: a directory that is new, empty, or holds an unfinished run of this conversion; to
            ("zarr", 2) also a URL.
        to: ``"zarr@2"``, ``"zarr@1"``, ``"torch_dist"``; or ``"safetensors"`` for the model's
            arrays alone.
        keys: for safetensors: take only arrays whose keys match this glob.
        allow: further classes that objects may be unpickled to, where torch_dist is involved.
        options: memory, files, threads.
        watch: told about bytes, done and in all, by any thread.

    Raises:
        CheckpointExistsError: there is something else in the target.
        IncompatibleVersionError: the source is of a format that is not read.
        PlanError: the target's format cannot hold an array.
        StrategyError: a URL, and another format than ("zarr", 2); or one that makes no sense.
        StorageError: the source is damaged, or the target cannot be written.
        UnsafeObjectError: an object needs a class that is not allowed.
    """
    job = _Job(source, target, Format.named(to), options or ConvertOptions(), allow, watch)
    return job.run(keys, is_upgrade=False)


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
    job = _Job(source, target, chosen, options or ConvertOptions(), allow, watch)
    return job.run(None, is_upgrade=True)


class _Job:
    """One conversion, from its arguments to its report."""

    def __init__(
        self,
        source: str | Path,
        target: str | Path,
        to: Format | None,
        options: ConvertOptions,
        allow: Allowed,
        watch: Watch | None,
    ) -> None:
        self._options = options
        self._storage = options.options or options_from_environment()
        root, self._root = (resolved(place, self._storage) for place in (source, target))
        if to is not None:
            _require_taken(self._root, to)
        self._allow = [*default_allowed(), *allow]
        self._source: Source = open_source(root, options.reading(root), self._allow)
        self._to = to or Format(_own_format(self._source))
        _require_taken(self._root, self._to)
        self._watch = watch
        if is_within(root, self._root) or is_within(self._root, root):
            raise StrategyError(
                f"{self._root}: the target must be a place beside the source, {root}, not "
                "the same, nor one within the other"
            )

    def run(self, keys: str | None, *, is_upgrade: bool) -> ConvertReport:
        """Plan, then do."""
        source, to = self._source, self._to
        arrays = self._chosen(keys)
        renames = upgraded_keys(array.key for array in arrays) if is_upgrade else {}
        object_ids = () if to is Format.SAFETENSORS else source.objects
        plan = build_convert_plan(
            arrays,
            to,
            self._options.limits(to, self._root),
            renames,
            [object_id.key for object_id in object_ids],
            **({"chunk_name": chunk_name} if to is Format.ZARR2 else {}),
        )
        common = source.common_content()
        if is_upgrade:
            common = upgraded_common(common, f"{source.root}/{COMMON_NAME}", self._allow)
        contents = Contents(self._contents(), common, source.layout, package_versions())
        journal = self._journal(plan, is_upgrade=is_upgrade)
        target, flush = self._target()
        return run_convert(
            plan,
            source,
            self._root,
            target,
            flush,
            contents,
            journal,
            self._options.threads,
            self._watch,
        )

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

    def _contents(self) -> Iterator[tuple[ObjectId, bytes]]:
        for object_id in self._source.objects:
            yield object_id, self._source.object_content(object_id)

    def _journal(self, plan: ConvertPlan, *, is_upgrade: bool) -> Notes:
        """What was done before; a new one in a new or empty directory."""
        root, source = self._root, self._source
        make_directory(root)
        if not _has_room(root):
            hint = "" if is_upgrade else f"; `dist-ckpt diff` compares it with {source.root}"
            what = f"a finished checkpoint{hint}" if _is_whole(root) else "files of something else"
            raise CheckpointExistsError(
                f"{root} holds {what}; name a new or empty directory", path=str(root)
            )
        facts = [
            source.identity,
            plan.target,
            asdict(plan.limits),
            is_upgrade,
            [array_to_wire(array) for array in plan.arrays],
        ]
        purpose = digest_of(json.dumps(facts).encode())
        return BucketJournal(root, purpose) if isinstance(root, Bucket) else Journal(root, purpose)

    def _target(self) -> tuple[Target, Flushing]:
        root = self._root
        if isinstance(root, Bucket):
            return BucketConversion(root), StoreFlush()
        flush = Flush(root, self._storage)
        return self._target_on_disk(root, flush), flush

    def _target_on_disk(self, root: Path, flush: Flush) -> Target:
        box_nbytes = self._options.box_nbytes
        if self._to is Format.ZARR1:
            return Format1Conversion(root, flush, box_nbytes)
        if self._to is Format.ZARR2:
            return Format2Conversion(root, flush, box_nbytes)
        if self._to is Format.TORCH_DIST:
            return TorchDistConversion(root, flush, self._allow)
        return SafetensorsConversion(root, flush)


def _require_taken(root: Location, to: Format) -> None:
    """Raise where the target is in an object store, and the format does not go there."""
    if to is not Format.ZARR2:
        require_path(root, f"a target of format {to}")


def _has_room(root: Location) -> bool:
    """Whether there is nothing, or an unfinished conversion.

    One that was killed before it had a journal leaves at most a file not yet renamed to that.
    """
    if isinstance(root, Bucket):
        root.require_bucket()
        return root.is_empty() or any(True for _ in root.names(JOURNAL_NAME))
    with file_errors(None, root):
        names = {path.name for path in root.iterdir()}
    return JOURNAL_NAME in names or all(name.startswith(PARTIAL_PREFIX) for name in names)


def _is_whole(root: Location) -> bool:
    """Whether there is what a conversion leaves once it is done."""
    return is_finished(root) or (isinstance(root, Path) and is_of_safetensors(root))


def _own_format(source: Source) -> str:
    marker = source.marker
    if marker.sharded_backend in {Format.TORCH_DIST, Format.SAFETENSORS}:
        return marker.sharded_backend
    return f"{marker.sharded_backend}@{marker.sharded_backend_version}"


def resolved(name: str | Path, options: Options) -> Location:
    """The place of that name; a directory absolute, links resolved.

    Raises:
        StrategyError: it is no address.
    """
    location = located(name, options)
    return location.resolve() if isinstance(location, Path) else location


def is_within(inner: Location, outer: Location) -> bool:
    """Whether one place is the other, or a part of it."""
    if isinstance(inner, Path) or isinstance(outer, Path):
        return isinstance(inner, Path) and inner.is_relative_to(str(outer))
    return f"{inner}/".startswith(f"{outer}/")
