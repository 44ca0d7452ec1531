"""Checkpoints from one format to another, and to the optimizer's state of today."""

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from dist_ckpt_strategies.comm.base import Communicator
from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.config import MIB, Options, Verify, options_from_environment
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    PlanError,
    StorageError,
    StorageTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.formats.checkpoint_writer import CheckpointWriter
from dist_ckpt_strategies.formats.commit import DirectoryPlace, complete_commit
from dist_ckpt_strategies.formats.index import SAVES
from dist_ckpt_strategies.formats.locations import (
    SAVE_PREFIX,
    Location,
    holds_packs,
    is_finished,
    located,
    other_contents,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed, dump_object, load_content
from dist_ckpt_strategies.formats.pack import UNVERIFIED
from dist_ckpt_strategies.formats.pack_write import FOLDER
from dist_ckpt_strategies.megatron.types import default_allowed, raises_megatron_errors
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    MARKER_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
)
from dist_ckpt_strategies.tools.pack_writer import PackWriter
from dist_ckpt_strategies.tools.plan_convert import (
    FileTask,
    Format,
    SourceArray,
    build_convert_plan,
)
from dist_ckpt_strategies.tools.readers import CheckpointReader, RegionRead, open_reader
from dist_ckpt_strategies.tools.writers import SafetensorsWriter, TargetWriter, ZarrWriter

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
"""How the keys of optimizer state begin; all other arrays are the model's."""

_OLD_FORM = "fully_sharded_model_space"
"""Written by Megatron-Core up to 0.15.3, and NeMo 1.x."""

_NEW_FORM = "fully_reshardable"
"""Read and written by Megatron-Core 0.15 and later: the same whole arrays, other names."""

_MASTER = re.compile(r"((?:chained_\d+\.)*optimizer\.state\.)fp32_param\.(.+)", re.DOTALL)
_FORM = "param_state_sharding_type"
_METADATA_FORM = "distrib_optim_sharding_type"

_MAX_THREADS = 8
_BUFFERS = 4
"""Blocks that a thread holds at the same time, at most: read, assembled, encoded, flushed."""

_LEAST_BLOCK_NBYTES = 64 << 10
_LARGEST_BLOCK_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Options of a conversion or comparison.

    Attributes:
        max_memory_bytes: bound on the elements in memory at once, over all threads. On top come
            objects, the libraries, and one shard for each thread where the source is torch_dist.
        max_file_bytes: wanted size of the files of safetensors, 5 GB by default, and of packs and
            files of torch_dist, 512 MiB; an array of safetensors, or a shard, that is larger has a
            file of its own.
        num_threads: files handled at the same time; by default one for each core, at least 2.
        options: timeouts. Whatever ``verify`` is, all that is read is verified, or a copy would
            have valid digests of damaged elements. Only packs may be made of what was read with
            ``verify="off"``: they say so, in their feature ``unverified``.
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

    def open(
        self, name: str | Path, allow: Allowed, verify: Verify = Verify.READ
    ) -> CheckpointReader:
        """The finished checkpoint of that name; see ``open_reader``.

        What is on its way from storage takes memory too, and is bounded like a block.
        """
        root = _resolved(name, self.storage)
        options = self.storage.with_changes(verify=verify)
        if isinstance(root, Bucket):
            options = options.with_changes(max_inflight_bytes=2 * self.block_nbytes)
        else:
            _require_checkpoint(root)
            if holds_packs(root):
                options = options.with_changes(max_inflight_bytes=self.block_nbytes)
        return open_reader(root, options, allow)


def _require_checkpoint(root: Path) -> None:
    with file_errors(None, root):
        is_none = root.is_dir() and not (root / MARKER_NAME).exists()
        other = other_contents(root) if is_none else ""
    if other:
        raise CheckpointNotFoundError(f"{root} is no checkpoint: {other}", path=str(root))


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
    to: str | tuple[str, int],
    *,
    keys: str | None = None,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
    comm: Communicator | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format, bit for bit, in bounded memory.

    The target becomes visible when it is complete. A failed or killed conversion leaves a
    ``.partial-`` directory, or a ``save-`` prefix, which the same call replaces. To packs, a killed
    one leaves packs that nothing names; the same call succeeds beside them.

    Collective if ``comm`` has several ranks: each writes its share of the files, the result is the
    same as that of one process, and a failure on one rank is raised on all.

    Args:
        source: directory of a finished checkpoint of ("safetensors", 1), ("zarr", 1), ("zarr", 2)
            or torch_dist; of ("safetensors", 1) and ("zarr", 2) also its URL.
        target: a new or empty directory, or one that an unfinished conversion left; for
            ("safetensors", 1) and ("zarr", 2) also a URL.
        to: ``pack`` or ("safetensors", 1), ``zarr@2``, ``zarr@1``, ``torch_dist``, or
            ``safetensors`` for a model's arrays.
        keys: for safetensors only arrays whose keys match this glob.
        allow: further classes that objects may be unpickled to, for torch_dist.
        options: memory and threads of each process, file sizes.
        watch: called from time to time with the bytes done and in total.
        comm: ranks that share the work, as ``comm.torch_communicator.open_communicator`` gives
            them; None: this process works alone, even if torch.distributed is initialised.

    Raises:
        CheckpointExistsError: the target holds something.
        ArrayNotFoundError: no array of a model, or none whose key matches.
        PlanError: the target cannot hold an array, or the ranks see different sources.
        StrategyError: one place is within the other, or the target is a URL and its format takes
            none; or one is no address.
        StorageError: the source is damaged, or the target cannot be written.
        UnsafeObjectError: an object needs a class that is not allowed.
    """
    allowed = [*default_allowed(), *allow]
    conversion = _Conversion(options or ConvertOptions(), allowed, Ranks(comm), keys)
    return conversion.run(source, target, Format.of(to), watch)


@raises_megatron_errors
def upgrade(  # noqa: PLR0913
    source: str | Path,
    target: str | Path,
    to: str | tuple[str, int] | None = None,
    *,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
    comm: Communicator | None = None,
) -> ConvertReport:
    """Convert a checkpoint whose optimizer state has an older form, so that training continues.

    The form ``fully_sharded_model_space``, of Megatron-Core up to 0.15.3 and NeMo 1.x, becomes
    ``fully_reshardable``: master parameters get their new names, and the common state says so.
    Everything else is as in ``convert``, but that ``to`` is by default the source's own format.

    Raises:
        StrategyError: there is nothing to upgrade; others as in ``convert``.
    """
    chosen = None if to is None else Format.of(to)
    if chosen is Format.SAFETENSORS:
        raise PlanError("format: safetensors holds no optimizer state; use convert for the model")
    allowed = [*default_allowed(), *allow]
    conversion = _Conversion(options or ConvertOptions(), allowed, Ranks(comm), is_upgrade=True)
    return conversion.run(source, target, chosen, watch)


@dataclass(frozen=True)
class _Conversion:
    """One conversion, on all ranks that share it."""

    options: ConvertOptions
    allow: Allowed
    ranks: Ranks
    keys: str | None = None
    is_upgrade: bool = False

    def run(
        self, source: str | Path, target: str | Path, to: Format | None, watch: Watch | None
    ) -> ConvertReport:
        """Plan, write to a place of its own, and move that into the target. Collective."""
        started, ranks = time.monotonic(), self.ranks
        reader, writer, common = ranks.run(lambda: self._open(source, target, to))
        plan = writer.plan
        ranks.require_alike([task.nbytes for task in plan.tasks])

        def begin() -> str:
            _require_free(writer, "" if self.is_upgrade else reader.root)
            return writer.begin()

        save_id = ranks.run_on_first(begin)
        of_rank = plan.arrays[ranks.rank :: ranks.size]
        ranks.run(lambda: writer.open(save_id, ranks.first, of_rank))
        try:
            gathered = self._write(reader, writer, watch)

            def finish() -> None:
                records = dict(chain.from_iterable(gathered))
                reader.save.read(lambda: writer.finish(records, reader, common))

            ranks.run_on_first(finish)
        except StorageTimeoutError:
            raise  # a thread may still write
        except StorageError:
            writer.abandon()
            raise
        ranks.run_on_first(writer.commit)
        seconds = time.monotonic() - started
        return ConvertReport(len(plan.arrays), len(plan.objects), plan.nbytes, seconds)

    def _write(
        self, reader: CheckpointReader, writer: TargetWriter, watch: Watch | None
    ) -> list[list[tuple[int, Any]]]:
        """Write this rank's tasks, durably; what all ranks have written. Collective."""
        tasks = writer.plan.tasks

        def write(task: FileTask, count: Count) -> Any:
            def read(reads: Sequence[RegionRead]) -> None:
                reader.read(reads)
                count(sum(target.nbytes for *_, target in reads))

            return reader.save.read(lambda: writer.write(task, read))

        records = self.ranks.share(
            tasks,
            lambda task: task.nbytes,
            write,
            num_threads=self.options.threads,
            watch=watch,
        )

        def flush() -> list[tuple[int, Any]]:
            writer.flush([tasks[number] for number in records])
            return list(records.items())

        return self.ranks.gather(flush)

    def _open(
        self, source: str | Path, target: str | Path, to: Format | None
    ) -> tuple[CheckpointReader, TargetWriter, bytes]:
        """The source, the target, and on the first rank the file of the common state."""
        is_unverified = self.options.storage.verify is Verify.OFF and to is Format.PACK
        verify = Verify.OFF if is_unverified else Verify.READ
        reader = self.options.open(source, self.allow, verify)
        to = to or reader.format
        features = {UNVERIFIED} if is_unverified else {*reader.features}
        writer, common = self._writer(reader, target, to, sorted(features)), b""
        if self.ranks.rank == 0 and writer.marker is not None:
            common = reader.common_content()
            if self.is_upgrade:
                common = upgraded_common(common, f"{reader.root}/{COMMON_NAME}", self.allow)
        return reader, writer, common

    def _writer(
        self, reader: CheckpointReader, target: str | Path, to: Format, features: Sequence[str]
    ) -> TargetWriter:
        """Check the target's address, and plan; nothing is written."""
        options, block_nbytes = self.options.storage, self.options.block_nbytes
        root = located(target, options)
        if to not in {Format.PACK, Format.ZARR2}:
            require_path(root, f"a target of format {to}")
        # Other ranks do not look up what the first is about to make: see make_directories.
        real = root if self.ranks.rank else _resolved(target, options)
        if f"{real}/".startswith(f"{reader.root}/") or f"{reader.root}/".startswith(f"{real}/"):
            raise StrategyError(
                f"{root}: the target must be a place beside the source, {reader.root}, not the "
                "same, nor one within the other"
            )
        arrays = _chosen(reader, to, self.keys)
        file_nbytes = 5 * 10**9 if to is Format.SAFETENSORS else 512 * MIB
        plan = build_convert_plan(
            arrays,
            to,
            upgraded_keys(array.key for array in arrays) if self.is_upgrade else {},
            () if to is Format.SAFETENSORS else reader.objects,
            file_nbytes=self.options.max_file_bytes or file_nbytes,
            object_nbytes=block_nbytes if isinstance(root, Bucket) else None,
            features=features,
        )
        if plan.layout is not None:
            return PackWriter(root, plan, plan.layout, block_nbytes, features)
        if to in {Format.ZARR1, Format.ZARR2}:
            version = 1 if to is Format.ZARR1 else 2
            of_saves = CheckpointWriter(
                version, root, options, global_rank=0, keeps_old=True, overwrite=False
            )
            return ZarrWriter(of_saves, plan, block_nbytes)
        place = DirectoryPlace(root, options, keeps_old=True, overwrite=False)
        if to is Format.SAFETENSORS:
            return SafetensorsWriter(root, place, plan, block_nbytes)
        from dist_ckpt_strategies.tools.torch_dist import TorchDistWriter  # noqa: PLC0415

        return TorchDistWriter(root, place, plan, block_nbytes, self.allow)


def _resolved(name: str | Path, options: Options) -> Location:
    location = located(name, options)
    return location.resolve() if isinstance(location, Path) else location


def _chosen(source: CheckpointReader, to: Format, keys: str | None) -> Sequence[SourceArray]:
    """The arrays to convert."""
    if to is not Format.SAFETENSORS:
        if keys is not None:
            text = f"keys: {to} takes whole checkpoints; only safetensors a choice of arrays"
            raise PlanError(text)
        return source.arrays
    pattern = "*" if keys is None else keys
    models = (array for array in source.arrays if not _OPTIMIZER.match(array.key))
    found = [array for array in models if fnmatchcase(array.key, pattern)]
    if not found:
        of_keys = "" if keys is None else f" whose keys match {keys!r}"
        raise ArrayNotFoundError(
            f"{source.root}: no arrays of a model{of_keys} among its {len(source.arrays)}"
        )
    return found


def _require_free(writer: TargetWriter, source: Location | str) -> None:
    """Raise unless there is nothing, or what an unfinished conversion left."""
    root = writer.root
    complete_commit(root)
    if isinstance(root, Bucket):
        root.require_bucket()
        names = root.names()
    else:
        with file_errors(None, root):
            names = os.listdir(root) if root.exists() else ()  # noqa: PTH208
    stale = (SAVE_PREFIX,) if isinstance(root, Bucket) else (PARTIAL_PREFIX, REMOVED_PREFIX)
    if isinstance(writer, PackWriter):
        stale = (*stale, FOLDER, SAVES, LOCK_NAME)
    if not all(name.startswith(stale) for name in names):
        hint = f"; `dist-ckpt diff` compares it with {source}" if source else ""
        what = f"a finished checkpoint{hint}" if is_finished(root) else "files of something else"
        raise CheckpointExistsError(
            f"{root} holds {what}; name a new or empty directory", path=str(root)
        )


def upgraded_keys(keys: Iterable[str]) -> dict[str, str]:
    """The new key of each array that has one: ``fp32_param`` is called ``param`` now."""
    found = {key: _MASTER.fullmatch(key) for key in keys}
    return {key: f"{match[1]}param.{match[2]}" for key, match in found.items() if match}


def upgraded_common(content: bytes, path: str, allow: Allowed) -> bytes:
    """The file of the common state in which every distributed optimizer is fully_reshardable.

    Parameters' own states of the old form, which hold no more than a step, are gone; the step is
    that of the parameter groups, and put there where they lack it. Raises a StrategyError if no
    optimizer in it is of the old form, or its steps differ.
    """
    state = load_content(content, path, "common state", allow)
    optimizers = [found for found in _dicts(state) if _FORM in found]
    old = [found for found in optimizers if found[_FORM] == _OLD_FORM]
    if not old:
        forms = sorted({str(found[_FORM]) for found in optimizers})
        raise StrategyError(
            f"{path}: nothing to upgrade; expected a distributed optimizer of the form "
            f"{_OLD_FORM}, found {', '.join(forms) or 'none'}"
        )
    for optimizer in old:
        optimizer[_FORM] = _NEW_FORM
        params = _dicts(optimizer.pop("param_state", {}))
        numbers = [param["step"] for param in params if "step" in param]
        steps = {step.item() if hasattr(step, "item") else step for step in numbers}
        for group in optimizer.get("optimizer", {}).get("param_groups", ()):
            if "step" in group or not steps:
                continue
            if len(steps) > 1:
                raise StrategyError(
                    f"{path}: parameters of one optimizer have taken different numbers of steps "
                    f"({sorted(steps)}), which {_NEW_FORM} cannot express"
                )
            (group["step"],) = steps
    for found in _dicts(state):
        if found.get(_METADATA_FORM) == _OLD_FORM:
            found[_METADATA_FORM] = _NEW_FORM
    return dump_object(state, name="common state")


def _dicts(value: Any) -> Iterator[dict[Any, Any]]:
    """Every dict within nested dicts and lists, the outer ones first."""
    if isinstance(value, dict):
        yield value
        for held in value.values():
            yield from _dicts(held)
    elif isinstance(value, (list, tuple)):
        for held in value:
            yield from _dicts(held)
