"""Checkpoints from one format to another, in part, without damage, or with today's optimizer."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, starmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dist_ckpt_strategies.comm.shared_work import Count, Ranks, Watch
from dist_ckpt_strategies.config import MIB, Verify
from dist_ckpt_strategies.core.array import ArraySpec, ObjectId, Region
from dist_ckpt_strategies.errors import (
    ArrayNotFoundError,
    CheckpointExistsError,
    IncompleteCheckpointError,
    PlanError,
    StorageError,
    StorageTimeoutError,
    StrategyError,
    raises_megatron_errors,
)
from dist_ckpt_strategies.formats.index import SAVES, NewSave
from dist_ckpt_strategies.formats.locations import (
    Location,
    is_finished,
    located,
    place_of,
    require_path,
)
from dist_ckpt_strategies.formats.objects import Allowed
from dist_ckpt_strategies.formats.pack import UNVERIFIED, Digests
from dist_ckpt_strategies.formats.pack_commit import new_save_id
from dist_ckpt_strategies.formats.pack_write import FOLDER
from dist_ckpt_strategies.storage.bucket import Bucket
from dist_ckpt_strategies.storage.files import (
    COMMON_NAME,
    LOCK_NAME,
    PARTIAL_PREFIX,
    REMOVED_PREFIX,
)
from dist_ckpt_strategies.storage.store import ArrayRead
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint
from dist_ckpt_strategies.tools.options import ConvertOptions, resolved
from dist_ckpt_strategies.tools.pack_writer import (
    commit_packs,
    delete_packs,
    finish_packs,
    write_packs,
)
from dist_ckpt_strategies.tools.plan_convert import (
    ConvertPlan,
    FileTask,
    Format,
    build_convert_plan,
)
from dist_ckpt_strategies.tools.rescue import find_readable, read_all, rescued_common, undescribed
from dist_ckpt_strategies.tools.safetensors import finish_safetensors, write_safetensors
from dist_ckpt_strategies.tools.upgrade import upgraded_common, upgraded_keys
from dist_ckpt_strategies.tools.writers import (
    Finish,
    Target,
    Write,
    commit_files,
    finish_zarr1,
    stage,
    write_zarr1,
)
from dist_ckpt_strategies.tools.zarr3 import finish_zarr3, write_zarr3

if TYPE_CHECKING:  # torch takes a while to import
    from dist_ckpt_strategies.comm.base import Communicator

_OPTIMIZER = re.compile(r"(?:chained_\d+\.)*optimizer[./]")
"""Begins the keys of optimizer state; all other arrays are the model's."""


@dataclass(frozen=True, slots=True)
class Missing:
    """An array or object that a conversion left out, because it is damaged in the source.

    Attributes:
        key: of an array; of a shard of an object, ``KEY/shard_OFFSET_SHAPE``; ``common.pt``.
        why: names the file, and as far as they are known the range and the rank that wrote it.
    """

    key: str
    why: str


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of a conversion.

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
    conversion = _Conversion(
        options or ConvertOptions(), Ranks(comm), watch, keys, skip_damaged=skip_damaged
    )
    return conversion.run(source, target, Format.of(to), allow)


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
    conversion = _Conversion(options or ConvertOptions(), Ranks(comm), watch, keys)
    return conversion.run(source, target, None, allow)


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
    conversion = _Conversion(options or ConvertOptions(), Ranks(comm), watch, is_upgrade=True)
    return conversion.run(source, target, chosen, allow)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The arrays and objects to convert; ``common``: the file of the common state, on rank 0."""

    arrays: Sequence[ArraySpec]
    objects: Sequence[ObjectId]
    common: bytes = b""
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True)
class _Conversion:
    """A conversion: its options, and the ranks that share it."""

    options: ConvertOptions
    ranks: Ranks
    watch: Watch | None
    keys: str | None = None
    skip_damaged: bool = False
    is_upgrade: bool = False

    def run(
        self, source: str | Path, target: str | Path, to: Format | None, allow: Allowed
    ) -> ConvertReport:
        """Plan, write to a place of its own, and make that the target. Collective."""
        started, ranks = time.monotonic(), self.ranks
        is_unverified = self.options.storage.verify is Verify.OFF and to is Format.PACK
        verify = Verify.OFF if is_unverified else Verify.READ
        opened = ranks.run(lambda: self.options.open(source, allow, verify))
        kind = to or opened.kind
        root = ranks.run(lambda: self._target(opened, target, kind))
        chosen = ranks.run(lambda: opened.unchanged(lambda: self._choose(opened, kind)))
        if self.skip_damaged:
            chosen = self._without_damage(opened, chosen, kind)
        features = [UNVERIFIED] if is_unverified else sorted(opened.features)
        plan = ranks.run(lambda: self._plan(chosen, root, kind, features))
        ranks.require_alike([task.nbytes for task in plan.tasks])

        def begin() -> str:
            _require_free(root, kind, "" if self.is_upgrade else opened.root)
            if isinstance(root, Path) and kind is not Format.PACK:
                return stage(root)
            return new_save_id(place_of(root))

        save_id = ranks.run_on_first(begin)
        writing, *functions = ranks.run(lambda: self._writing_to(opened, root, save_id, plan))
        try:
            save = self._write(opened, writing, functions, chosen.common)
        except StorageTimeoutError:
            raise  # a thread may still write
        except StorageError:
            delete_packs(writing)
            raise
        commit = partial(commit_packs, writing, save) if save else partial(commit_files, writing)
        ranks.run_on_first(commit)
        counts = len(plan.arrays), len(plan.objects), plan.nbytes
        return ConvertReport(*counts, time.monotonic() - started, chosen.missing)

    def _target(self, opened: OpenedCheckpoint, target: str | Path, to: Format) -> Location:
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

    def _choose(self, opened: OpenedCheckpoint, to: Format) -> _Chosen:
        """The arrays and objects that were asked for; with ``skip_damaged`` the described ones."""
        pattern, is_model = self.keys or "*", to is Format.SAFETENSORS
        wanted = [key for key in opened if fnmatchcase(key, pattern)]
        objects = [one for one in opened.object_ids if fnmatchcase(one.key, pattern)]
        if is_model:
            wanted, objects = [key for key in wanted if not _OPTIMIZER.match(key)], []
        lost = undescribed(opened, pattern)
        for key, why in lost.items() if not self.skip_damaged else ():
            raise IncompleteCheckpointError(why, key=key)
        if not wanted and (is_model or (self.keys is not None and not objects)):
            matching = "" if self.keys is None else f" whose key matches {self.keys!r}"
            kind = "array of a model" if is_model else "array or object"
            raise ArrayNotFoundError(
                f"{opened.root}: expected an {kind}{matching}, found none; it has {len(opened)} "
                "arrays"
            )
        if self.skip_damaged:
            arrays, damaged = find_readable(opened, wanted)
            return _Chosen(arrays, objects, missing=(*starmap(Missing, (damaged | lost).items()),))
        common = b"" if is_model or self.ranks.rank else opened.common_content()
        return _Chosen(opened.find(wanted), objects, self._common(opened, common))

    def _without_damage(self, opened: OpenedCheckpoint, chosen: _Chosen, to: Format) -> _Chosen:
        """The chosen arrays and objects that are undamaged; reads all of them. Collective."""
        bounds = self.options.threads, self.options.block_nbytes
        damage = read_all(self.ranks, opened, chosen.arrays, chosen.objects, bounds, self.watch)
        is_model = to is Format.SAFETENSORS
        common, why = self.ranks.run(lambda: (b"", []) if is_model else rescued_common(opened))
        missing = {*chosen.missing, *starmap(Missing, (*damage, *why))}
        gone = {one.key for one in missing}
        return _Chosen(
            [array for array in chosen.arrays if array.key not in gone],
            [one for one in chosen.objects if one.unique_key not in gone],
            self._common(opened, common),
            tuple(sorted(missing, key=lambda one: (one.key, one.why))),
        )

    def _common(self, opened: OpenedCheckpoint, content: bytes) -> bytes:
        if not self.is_upgrade or self.ranks.rank:
            return content
        return upgraded_common(content, f"{opened.root}/{COMMON_NAME}", opened.allowed)

    def _plan(
        self, chosen: _Chosen, root: Location, to: Format, features: Sequence[str]
    ) -> ConvertPlan:
        options, max_block_nbytes = self.options, sys.maxsize
        if to is Format.ZARR3:
            max_block_nbytes = options.chunk_nbytes
        elif isinstance(root, Bucket):
            max_block_nbytes = options.block_nbytes
        return build_convert_plan(
            chosen.arrays,
            to,
            upgraded_keys([array.key for array in chosen.arrays]) if self.is_upgrade else {},
            chosen.objects,
            file_nbytes=options.max_file_bytes or _FILE_NBYTES.get(to, 512 * MIB),
            max_block_nbytes=max_block_nbytes,
            features=features,
        )

    def _writing_to(
        self, opened: OpenedCheckpoint, root: Location, save_id: str, plan: ConvertPlan
    ) -> tuple[Target, Write, Finish]:
        digests: Mapping[tuple[str, Region], Digests] = {}
        if plan.target is Format.PACK and UNVERIFIED not in plan.features:
            keys = {item.source.key for task in plan.tasks for item in task.items}
            digests = opened.stored.digests(sorted(keys))
        block_nbytes = self.options.block_nbytes
        target = Target(plan, root, save_id, block_nbytes, opened.allowed, digests)
        return target, *_functions(plan.target)

    def _write(
        self, opened: OpenedCheckpoint, target: Target, functions: Sequence[Any], common: bytes
    ) -> NewSave | None:
        """Write all of it, durably; the save to commit, of packs, on the first rank. Collective."""
        plan, (write, finish) = target.plan, functions

        def write_task(task: FileTask, count: Count) -> Any:
            def read(*reads: ArrayRead) -> None:
                opened.read_into(*reads)
                count(sum(read.target.nbytes for read in reads))

            return opened.unchanged(lambda: write(target, task, read))

        records = self.ranks.share(
            plan.tasks,
            lambda task: task.nbytes,
            write_task,
            num_threads=self.options.threads,
            watch=self.watch,
        )
        gathered = self.ranks.gather(lambda: list(records.items()))
        objects = ((one, opened.object_content(one)) for one in plan.objects)

        def finish_all() -> Any:
            of_tasks = dict(chain.from_iterable(gathered))
            return opened.unchanged(lambda: finish(target, of_tasks, objects, common))

        return self.ranks.run(lambda: finish_all() if self.ranks.rank == 0 else None)


_FILE_NBYTES = {Format.SAFETENSORS: 5 * 10**9}


def _functions(target: Format) -> tuple[Write, Finish]:
    """The functions that write a format."""
    match target:
        case Format.PACK:
            return write_packs, finish_packs
        case Format.ZARR1:
            return write_zarr1, finish_zarr1
        case Format.ZARR3:
            return write_zarr3, finish_zarr3
        case Format.SAFETENSORS:
            return write_safetensors, finish_safetensors
    from dist_ckpt_strategies.tools import torch_dist  # noqa: PLC0415 - torch

    return torch_dist.write_torch_dist, torch_dist.finish_torch_dist


def _require_free(root: Location, to: Format, source: Location | str) -> None:
    """Raise unless there is nothing, or what an unfinished conversion left."""
    stale: tuple[str, ...] = (PARTIAL_PREFIX, REMOVED_PREFIX, LOCK_NAME)
    if isinstance(root, Bucket):
        root.require_bucket()
    if to is Format.PACK:
        stale = (*stale, FOLDER, SAVES)
    if not all(name.startswith(stale) for name in place_of(root).names()):
        hint = f"; `dist-ckpt diff` compares it with {source}" if source else ""
        content = f"a finished checkpoint{hint}" if is_finished(root) else "files of something else"
        raise CheckpointExistsError(
            f"{root} holds {content}; name a new or empty directory", path=str(root)
        )
