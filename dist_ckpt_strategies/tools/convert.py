"""Checkpoints from one format to another, in part, without damage, or with today's optimizer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.config import MIB, Verify
from dist_ckpt_strategies.core.array import ObjectId
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointExistsError,
    PlanError,
    StorageError,
    StorageTimeoutError,
    StrategyError,
)
from dist_ckpt_strategies.formats.index import SAVES
from dist_ckpt_strategies.formats.locations import Location, is_finished, located, require_path
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.pack import UNVERIFIED
from dist_ckpt_strategies.formats.pack_write import FOLDER
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
    file_errors,
)
from dist_ckpt_strategies.tools.megatron_core import raises_megatron_errors, with_default_allowed
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint, RegionRead
from dist_ckpt_strategies.tools.options import ConvertOptions, resolved
from dist_ckpt_strategies.tools.pack_writer import PackWriter
from dist_ckpt_strategies.tools.plan_convert import (
    FileTask,
    Format,
    SourceArray,
    build_convert_plan,
)
from dist_ckpt_strategies.tools.rescue import find_readable, read_all, rescued_common
from dist_ckpt_strategies.tools.upgrade import upgraded_common, upgraded_keys
from dist_ckpt_strategies.tools.writers import SafetensorsWriter, TargetWriter, ZarrWriter

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer\.")
"""How the keys of optimizer state begin; all other arrays are the model's."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What a conversion left out, because it is damaged in the source.

    Attributes:
        key: of an array; of a shard of an object, ``KEY/shard_OFFSET_SHAPE``; ``common.pt``.
        why: names the file, and as far as they are known the range and the rank that wrote it.
    """

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did.

    Attributes:
        num_arrays: arrays of the target.
        num_objects: shards of objects.
        nbytes: bytes of the elements of all arrays.
        seconds: that it took.
        missing: what ``skip_damaged`` left out, sorted by key; several where a key has several
            damaged ranges.
    """

    num_arrays: int
    num_objects: int
    nbytes: int
    seconds: float
    missing: tuple[Missing, ...] = ()


@raises_megatron_errors
def convert(  # noqa: PLR0913
    source: str | Path,
    target: str | Path,
    to: str | tuple[str, int],
    *,
    keys: str | None = None,
    skip_damaged: bool = False,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
    comm: Communicator | None = None,
) -> ConvertReport:
    """Convert a checkpoint to another format, bit for bit, in bounded memory.

    The target becomes visible when it is complete. A failed or killed conversion leaves a
    ``.partial-`` directory, which the same call replaces. To packs, a killed one leaves packs that
    nothing names; the same call succeeds beside them.

    Collective if ``comm`` has several ranks: each writes its share of the files, the result is the
    same as that of one process, and a failure on one rank is raised on all.

    Args:
        source: what ``dist_ckpt_strategies.open`` reads.
        target: a new or empty directory, or one that an unfinished conversion left; for
            ("safetensors", 1) also a URL.
        to: ``pack`` or ("safetensors", 1), ``zarr@1``, ``zarr@3``, ``torch_dist``, or
            ``safetensors`` for a model's arrays, whole.
        keys: only arrays and objects whose keys match this glob.
        skip_damaged: read everything first, and leave out arrays and objects that are damaged,
            which the report lists. Without common state that can be read, an empty one is written.
        allow: further classes that objects may be unpickled to, for torch_dist.
        options: memory and threads of each process, file sizes.
        watch: called from time to time with the bytes done and in total.
        comm: ranks that share the work, as ``comm.torch_communicator.open_communicator`` gives
            them; None: this process works alone, even if torch.distributed is initialised.

    Raises:
        CheckpointExistsError: the target holds something.
        ArrayNotFoundError: no array whose key matches, or none of a model for safetensors.
        PlanError: the target cannot hold an array, or the ranks see different sources.
        StrategyError: one place is within the other, or the target is a URL and its format takes
            none; or one is no address.
        StorageError: the source is damaged, or the target cannot be written.
        UnsafeObjectError: an object needs a class that is not allowed.
    """
    conversion = _Conversion(options, allow, comm, keys, skip_damaged=skip_damaged)
    return conversion.run(source, target, Format.of(to), watch)


@raises_megatron_errors
def copy(  # noqa: PLR0913
    source: str | Path,
    target: str | Path,
    *,
    keys: str | None = None,
    allow: Allowed = (),
    options: ConvertOptions | None = None,
    watch: Watch | None = None,
    comm: Communicator | None = None,
) -> ConvertReport:
    """Copy a checkpoint, or its arrays and objects whose keys match, in its own format.

    Reads the bytes of these alone, and the common state. Bytes of packs are compared with their
    digests, which are copied. Otherwise as ``convert``.
    """
    return _Conversion(options, allow, comm, keys).run(source, target, None, watch)


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
    return _Conversion(options, allow, comm, is_upgrade=True).run(source, target, chosen, watch)


class _Conversion:
    """One conversion, on all ranks that share it."""

    def __init__(
        self,
        options: ConvertOptions | None,
        allow: Allowed,
        comm: Communicator | None,
        keys: str | None = None,
        *,
        is_upgrade: bool = False,
        skip_damaged: bool = False,
    ) -> None:
        self.options, self.ranks = options or ConvertOptions(), Ranks(comm)
        self.allow, self.keys = allow, keys
        self.is_upgrade, self.skip_damaged = is_upgrade, skip_damaged

    def run(
        self, source: str | Path, target: str | Path, to: Format | None, watch: Watch | None
    ) -> ConvertReport:
        """Plan, write to a place of its own, and move that into the target. Collective."""
        started, ranks = time.monotonic(), self.ranks
        is_unverified = self.options.storage.verify is Verify.OFF and to is Format.PACK
        verify = Verify.OFF if is_unverified else Verify.READ
        opened = ranks.run(lambda: self.options.open(source, self.allow, verify))
        to = to or opened.kind
        root = ranks.run(lambda: self._place(opened, target, to))
        chosen = self._chosen(opened, to, watch)
        writer = ranks.run(lambda: self._writer(opened, root, to, chosen, is_unverified))
        plan = writer.plan
        ranks.require_alike([task.nbytes for task in plan.tasks])

        def begin() -> str:
            _require_free(writer, "" if self.is_upgrade else opened.root)
            return writer.begin()

        save_id = ranks.run_on_first(begin)
        of_rank = plan.arrays[ranks.rank :: ranks.size]
        ranks.run(lambda: writer.open(save_id, of_rank))
        try:
            self._write(opened, writer, chosen.common, watch)
        except StorageTimeoutError:
            raise  # a thread may still write
        except StorageError:
            writer.abandon()
            raise
        ranks.run_on_first(writer.commit)
        seconds = time.monotonic() - started
        counts = len(plan.arrays), len(plan.objects), plan.nbytes
        return ConvertReport(*counts, seconds, chosen.missing)

    def _write(
        self, opened: OpenedCheckpoint, writer: TargetWriter, common: bytes, watch: Watch | None
    ) -> None:
        """Write all of it, durably. Collective."""
        tasks = writer.plan.tasks

        def write(task: FileTask, count: Count) -> Any:
            def read(reads: Sequence[RegionRead]) -> None:
                opened.read_into(reads)
                count(sum(target.nbytes for *_, target in reads))

            return opened.unchanged(lambda: writer.write(task, read))

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

        gathered = self.ranks.gather(flush)

        def finish() -> None:
            of_tasks = dict(chain.from_iterable(gathered))
            opened.unchanged(lambda: writer.finish(of_tasks, opened, common))

        self.ranks.run_on_first(finish)

    def _chosen(self, opened: OpenedCheckpoint, to: Format, watch: Watch | None) -> _Chosen:
        """What is converted, without what is damaged if that is skipped. Collective."""
        pattern = "*" if self.keys is None else self.keys
        is_model = to is Format.SAFETENSORS

        def choose() -> _Chosen:
            wanted = [key for key in opened if fnmatchcase(key, pattern)]
            wanted = [key for key in wanted if not (is_model and _OPTIMIZER.match(key))]
            objects = [one for one in opened.object_ids if fnmatchcase(one.key, pattern)]
            objects = [] if is_model else objects
            if not wanted and (is_model or (self.keys is not None and not objects)):
                of_keys = "" if self.keys is None else f" whose keys match {self.keys!r}"
                what = "no arrays of a model" if is_model else "nothing"
                raise ArrayNotFoundError(f"{opened.root}: {what}{of_keys} among its {len(opened)}")
            if not self.skip_damaged:
                common = b"" if is_model or self.ranks.rank else opened.common_content()
                return _Chosen(opened.find(wanted), objects, self._common(opened, common))
            arrays, damaged = find_readable(opened, wanted)
            return _Chosen(arrays, objects, missing=tuple(Missing(*row) for row in damaged.items()))

        chosen = self.ranks.run(lambda: opened.unchanged(choose))
        if not self.skip_damaged:
            return chosen
        bounds = self.options.threads, self.options.block_nbytes
        damage = read_all(self.ranks, opened, chosen.arrays, chosen.objects, bounds, watch)
        common, why = self.ranks.run(lambda: rescued_common(opened, is_wanted=not is_model))
        listed = {*chosen.missing, *(Missing(*row) for row in (*damage, *why))}
        gone = {one.key for one in listed}
        return _Chosen(
            [array for array in chosen.arrays if array.key not in gone],
            [one for one in chosen.objects if one.unique_key not in gone],
            self._common(opened, common),
            tuple(sorted(listed, key=lambda one: (one.key, one.why))),
        )

    def _common(self, opened: OpenedCheckpoint, content: bytes) -> bytes:
        path = f"{opened.root}/{COMMON_NAME}"
        is_upgraded = self.is_upgrade and self.ranks.rank == 0
        if not is_upgraded:
            return content
        return upgraded_common(content, path, with_default_allowed(self.allow))

    def _place(self, opened: OpenedCheckpoint, target: str | Path, to: Format) -> Location:
        """The target's address, which has been checked."""
        options = self.options.storage
        root = located(target, options)
        if to is not Format.PACK:
            require_path(root, f"a target of format {to}")
        # Other ranks do not look up what the first is about to make: see make_directories.
        real = root if self.ranks.rank else resolved(target, options)
        if f"{real}/".startswith(f"{opened.root}/") or f"{opened.root}/".startswith(f"{real}/"):
            raise StrategyError(
                f"{root}: the target must be a place beside the source, {opened.root}, not the "
                "same, nor one within the other"
            )
        return root

    def _writer(
        self,
        opened: OpenedCheckpoint,
        root: Location,
        to: Format,
        chosen: _Chosen,
        is_unverified: bool,  # noqa: FBT001
    ) -> TargetWriter:
        """Plan what is written; nothing is written yet."""
        options, block_nbytes = self.options.storage, self.options.block_nbytes
        keys = [array.key for array in chosen.arrays]
        features = [UNVERIFIED] if is_unverified else sorted(opened.features)
        plan = build_convert_plan(
            chosen.arrays,
            to,
            upgraded_keys(keys) if self.is_upgrade else {},
            chosen.objects,
            file_nbytes=self.options.max_file_bytes or _FILE_NBYTES.get(to, 512 * MIB),
            object_nbytes=block_nbytes if isinstance(root, Bucket) else None,
            features=features,
        )
        if to is Format.PACK:
            digests = {} if is_unverified else opened.block_digests(keys)
            return PackWriter(root, plan, block_nbytes, features, digests)
        if to is Format.TORCH_DIST:
            from dist_ckpt_strategies.tools.torch_dist_writer import (  # noqa: PLC0415 - torch
                TorchDistWriter,
            )

            allow = with_default_allowed(self.allow)
            return TorchDistWriter(root, plan, block_nbytes, options, allow)
        writer = SafetensorsWriter if to is Format.SAFETENSORS else ZarrWriter
        return writer(root, plan, block_nbytes, options)


_FILE_NBYTES = {Format.SAFETENSORS: 5 * 10**9}


@dataclass(frozen=True, slots=True)
class _Chosen:
    """What is converted; ``common``, the file of the common state, on the first rank."""

    arrays: Sequence[SourceArray]
    objects: Sequence[ObjectId]
    common: bytes = b""
    missing: tuple[Missing, ...] = ()


def _require_free(writer: TargetWriter, source: Location | str) -> None:
    """Raise unless there is nothing, or what an unfinished conversion left."""
    root = writer.root
    stale: tuple[str, ...] = (PARTIAL_PREFIX, REMOVED_PREFIX)
    if isinstance(root, Bucket):
        root.require_bucket()
        names = root.names()
    else:
        with file_errors(None, root):
            names = os.listdir(root) if root.exists() else ()  # noqa: PTH208
    if isinstance(writer, PackWriter):
        stale = (*stale, FOLDER, SAVES, LOCK_NAME)
    if not all(name.startswith(stale) for name in names):
        hint = f"; `dist-ckpt diff` compares it with {source}" if source else ""
        what = f"a finished checkpoint{hint}" if is_finished(root) else "files of something else"
        raise CheckpointExistsError(
            f"{root} holds {what}; name a new or empty directory", path=str(root)
        )
