"""Packs as a storage of ``torch.distributed.checkpoint`` (DCP): its writer and its reader.

They talk to no peer: what ranks have to tell each other travels in DCP's own plans and results.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from dist_ckpt_strategies.comm.process_group import global_rank
from dist_ckpt_strategies.config import Options, Verify, options_from_environment
from dist_ckpt_strategies.core.array import ArraySpec, DType, ObjectId, Region, ShardId, ShardSpec
from dist_ckpt_strategies.device import require_plain, torch_dtype
from dist_ckpt_strategies.errors import (
    CheckpointChangedError,
    CheckpointError,
    PlanError,
    StrategyError,
)
from dist_ckpt_strategies.formats.base import BASE, NamedBase, base_to_name
from dist_ckpt_strategies.formats.commit import require_unfinished
from dist_ckpt_strategies.formats.index import NewSave, PackSummary
from dist_ckpt_strategies.formats.locations import PACKS, Location, located, place_of
from dist_ckpt_strategies.formats.objects import (
    Allowed,
    allowing,
    default_allowed,
    dump_object,
    load_content,
)
from dist_ckpt_strategies.formats.pack import lay_out
from dist_ckpt_strategies.formats.pack_checkpoint import PackCheckpoint
from dist_ckpt_strategies.formats.pack_commit import commit, new_save_id
from dist_ckpt_strategies.formats.pack_write import delete_files, file_of
from dist_ckpt_strategies.sharded.ledger import Ledger, described, proved
from dist_ckpt_strategies.sharded.read import TensorRead, run_reads
from dist_ckpt_strategies.sharded.save import Contents, limits_of, pack_writer, write_contents
from dist_ckpt_strategies.storage.io_pool import (
    ENDING,
    OPENING,
    WORK,
    Deadline,
    Job,
    Transfer,
    run_within,
)
from dist_ckpt_strategies.tools.opened import OpenedCheckpoint, open_at

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NUM_READERS = 16
"""Objects that are read at the same time: a request each where the checkpoint is in a bucket."""

_PATHS = "dcp_paths"
"""In the index: where in nested containers each value stood whose key does not say so."""


class _Placed:
    """What DCP asks of writers and readers about their place."""

    checkpoint_id: Any = None
    _options: Options

    def reset(self, checkpoint_id: Any = None) -> None:
        """Go to another place from now on, if there is one. DCP calls it."""
        if checkpoint_id is not None:
            root = located(checkpoint_id, self._options, what="path")
            self.checkpoint_id = root if isinstance(root, Path) else checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether it is the address of a checkpoint. DCP calls it."""
        try:
            located(checkpoint_id, options_from_environment(), what="path")
        except CheckpointError:
            return False
        return True

    @property
    def _root(self) -> Location:
        return located(self.checkpoint_id, self._options, what="path")


class PackStorageWriter(_Placed, StorageWriter):
    """Saves as ("safetensors", 1): each rank writes packs, the coordinator makes them visible.

    For ``torch.distributed.checkpoint.save`` and ``async_save``, also in a process of its own: it
    can be pickled. What was there before stays whole until the new index replaces its own.

    Args:
        path: directory of the checkpoint, which is made where it is missing, or a URL such as
            ``s3://bucket/run/step_10``.
        options: timeouts of storage, and memory bounds; by default from the environment.
        allow: further classes that bytes may be unpickled to; the reader has to allow them too.
        overwrite: False: a save raises where there is a finished checkpoint.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        options: Options | None = None,
        allow: Allowed = (),
        overwrite: bool = True,
    ) -> None:
        self._options, self._allow = options or options_from_environment(), tuple(allow)
        self._overwrite, self._is_coordinator = overwrite, False
        self._written: tuple[str, ...] = ()
        self._base: NamedBase | None = None
        self.reset(path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001 - DCP's
        """Begin a save. DCP calls it.

        Raises:
            StrategyError: the ranks do not tell each other what they save.
            CheckpointExistsError: there is a finished checkpoint, and it is to stay.
        """
        if not kwargs.get("use_collectives", True):
            raise StrategyError(
                "use_collectives=False: each rank would make a checkpoint of its own of what it "
                "holds; leave it out, or save with no_dist=True to a place of each rank's own"
            )
        self._is_coordinator, self._written = is_coordinator, ()
        root, deadline = self._root, Deadline.after(OPENING * self._options.timeout_s)
        if is_coordinator and not self._overwrite:
            run_within(deadline, root, lambda: require_unfinished(root))
        if is_coordinator:
            self._base = run_within(deadline, root, lambda: base_to_name(self._options))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is: what it held would be lost where DCP caches plans."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    @torch.no_grad()  # a DTensor then gives its shard at once
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's packs, durably; one result that says what is where. DCP calls it.

        Raises:
            PlanError: a tensor is none that can be stored, or two overlap.
            UnsafeObjectError: bytes need a class that the reader would refuse.
            StorageError: a pack cannot be written; nothing stays.
        """
        options, place, rank = self._options, place_of(self._root), global_rank()
        kept = replace(plan, items=[one for one in plan.items if options.saves(one.index.fqn)])
        contents = _contents(kept, planner, self._allow, has_common=self._is_coordinator)
        sizes = [(name, len(content)) for name, content in contents.objects]
        common = None if contents.common is None else len(contents.common)
        limits = limits_of(place, options)
        layout = lay_out(contents.shards, sizes, common, rank=rank, limits=limits)
        write = pack_writer(place, layout.packs, options, rank=rank)
        packs = write_contents(write, layout, contents, options)
        self._written = tuple(file_of(pack.name) for pack in packs)
        summary = PackSummary(tuple(packs), layout.objects, layout.common)
        stored = rank, summary, described(layout, (), ())
        nbytes = sum(pack.nbytes for pack in packs)
        return _done([WriteResult(MetadataIndex(""), nbytes, stored)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make what all ranks have written the content of the place. DCP calls it on one rank.

        Raises:
            CoverageError, PlanError: the shards do not make up the tensors.
            StorageError: it cannot be made visible.
        """
        stored = [result.storage_data for of_rank in results for result in of_rank]
        ranks, summaries, descriptions = zip(*stored, strict=True)
        told = tuple((num_packs, main, digest) for num_packs, main, _, digest in descriptions)
        ledger = proved(Ledger("", told, {}), ranks)
        facts: dict[str, Any] = {"ranks": len(ranks), "created": time.time()}
        facts |= {_PATHS: paths} if (paths := _paths(metadata.planner_data)) else {}
        facts |= {BASE: self._base} if self._base else {}

        def make_visible() -> CheckpointError | None:
            place = place_of(self._root)
            common, marker, save_id = _no_common_state(), PACKS.to_json(), new_save_id(place)
            save = NewSave(save_id, ledger.segments or (), summaries, facts, common, marker)
            return commit(place, save)

        deadline = Deadline.after(WORK * self._options.timeout_s)
        if failure := run_within(deadline, self._root, make_visible):
            logger.warning("%s: Megatron-Core's own load does not find it: %s", self._root, failure)

    def discard(self) -> None:
        """Delete what the last save of this rank has written, when it has failed on all ranks."""
        delete_files(place_of(self._root), self._written)
        self._written = ()


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


def _no_common_state() -> bytes:
    """A common state for Megatron-Core, which asks for one."""
    return dump_object({}, name="common state")


def _contents(
    plan: SavePlan, planner: SavePlanner, allow: Allowed, *, has_common: bool
) -> Contents:
    """What a plan has this rank write."""
    shards: list[ShardSpec] = []
    tensors: list[torch.Tensor] = []
    objects: list[tuple[ObjectId, bytes]] = []
    for item in plan.items:
        key = item.index.fqn
        data: Any = planner.resolve_data(item)
        if item.type is WriteItemType.BYTE_IO:
            content = bytes(data.getbuffer())
            objects.append((ObjectId(key, (0,), (1,)), content))
            continue
        stored: Any = item.tensor_data
        tensor = data.detach()
        require_plain(tensor, key=key)
        region = Region(tuple(stored.chunk.offsets), tuple(stored.chunk.sizes))
        if tuple(tensor.shape) != region.shape:
            raise PlanError(
                f"{key}: a tensor of shape {tuple(tensor.shape)} to be saved, its plan has "
                f"{region.shape}; the planner has to give what it has announced",
                key=key,
            )
        dtype = DType.named(str(tensor.dtype), key=key)
        shards.append(ShardSpec(ShardId(key, region), tuple(stored.size), dtype))
        tensors.append(tensor)
    if objects:
        pickled = [(name.key, content) for name, content in objects]
        _require_allowed(pickled, "what is saved", [*default_allowed(), *allow])
    common = _no_common_state() if has_common else None
    return Contents(tuple(shards), tuple(tensors), objects=tuple(objects), common=common)


def _paths(planner_data: Any) -> dict[str, list[str | int]]:
    """Of the mappings of DCP's own planners, those that the key alone does not give."""
    if not isinstance(planner_data, Mapping):
        return {}
    are_paths = all(
        isinstance(path, tuple) and all(isinstance(step, str | int) for step in path)
        for path in planner_data.values()
    )
    found = planner_data.items() if are_paths else ()
    return {key: list(path) for key, path in found if path != (key,)}


class PackStorageReader(_Placed, StorageReader):
    """Loads checkpoints of every format that ``dist_ckpt_strategies.open`` reads.

    For ``torch.distributed.checkpoint.load``. Each rank reads what it needs, and compares it with
    its digests. DCP is told of whole arrays: which blocks hold them is found by columns.

    Args:
        path: directory or URL of the checkpoint.
        options: timeouts of storage, and memory bounds; by default from the environment.
        allow: further classes that bytes may be unpickled to.
        verify: ``"read"`` or ``"off"``, of packs; by default as the options say.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        options: Options | None = None,
        allow: Allowed = (),
        verify: Verify | str | None = None,
    ) -> None:
        chosen = options or options_from_environment()
        self._options, self._allow = chosen.with_changes(verify=verify), tuple(allow)
        self._opened: OpenedCheckpoint | None = None
        self._metadata: Metadata | None = None  # of what is open, until DCP has asked for it
        self.reset(path)

    def open(self) -> OpenedCheckpoint:
        """Open the checkpoint that the next load reads; errors as ``dist_ckpt_strategies.open``."""
        root, deadline = self._root, Deadline.after(OPENING * self._options.timeout_s)
        open_ = partial(open_at, root, self._options, self._allow)
        self._opened = opened = run_within(deadline, root, open_)
        self._metadata = run_within(
            deadline, root, lambda: opened.unchanged(partial(_metadata, opened))
        )
        return opened

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """What the checkpoint holds, each array as one chunk. DCP calls it.

        (It hands on metadata of each rank's own where a parameter is named ``kwargs``.)
        """
        metadata, self._metadata = self._metadata, None
        if metadata is None or self._checkpoint.root != self._root:
            self.open()
            return self.read_metadata()
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001 - DCP's
        *args: Any,
        **_: Any,
    ) -> None:
        """Nothing is left to be done. DCP calls it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with what tells this save from others."""
        return replace(plan, storage_data=self._checkpoint.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are; CheckpointChangedError if ranks have opened different saves."""
        if len({plan.storage_data for plan in plans} - {None}) > 1:
            raise CheckpointChangedError(
                f"{self.checkpoint_id}: ranks have opened different checkpoints there; it was "
                "replaced meanwhile, or a node sees an old copy: load again",
                path=str(self.checkpoint_id),
            )
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify what this rank needs; bytes are given to DCP last. DCP calls it.

        Raises:
            UnsafeObjectError: bytes need a class that is not allowed.
            PlanError: a tensor cannot be filled.
            StorageError: an array or object is missing or damaged.
        """
        opened, options = self._checkpoint, self._options
        deadline = Deadline.after(WORK * options.timeout_s)
        of_tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
        of_objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        contents = _read_objects(opened, of_objects, options, deadline)
        targets = [planner.resolve_tensor(item) for item in of_tensors]
        stored = opened.stored

        def fill() -> None:
            specs = stored.find({item.storage_index.fqn for item in of_tensors})
            pairs = zip(of_tensors, targets, strict=True)
            reads = [_read(specs, item, target, options) for item, target in pairs]
            run_reads(stored.begin_reads, [r for r in reads if r[1].numel], options, deadline)

        stored.save.read(fill, ENDING * options.timeout_s)
        for item, target in zip(of_tensors, targets, strict=True):
            planner.commit_tensor(item, target)
        for item in of_objects:
            planner.load_bytes(item, io.BytesIO(contents[item.storage_index.fqn]))
        return _done(None)

    @property
    def _checkpoint(self) -> OpenedCheckpoint:
        return self.open() if self._opened is None else self._opened  # it may have no keys


def _metadata(opened: OpenedCheckpoint) -> Metadata:
    content: dict[str, Any] = {key: BytesStorageMetadata() for key in _objects(opened)}
    stored, known = opened.stored, {}
    for key, spec in stored.find(stored.keys()).items():
        size = torch.Size(spec.shape)
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        properties = TensorProperties(torch_dtype(spec.dtype))
        content[key] = TensorStorageMetadata(properties, size, [chunk])
    if isinstance(stored, PackCheckpoint):
        known = stored.index.facts.get(_PATHS, {})
    return Metadata(content, {key: tuple(known.get(key, (key,))) for key in content})


def _objects(opened: OpenedCheckpoint) -> dict[str, ObjectId]:
    """The objects by the keys that DCP knows them by: a grid of one by that of the object."""
    return {
        name.key if all(size == 1 for size in name.shape) else name.unique_key: name
        for name in opened.object_ids
    }


def _read_objects(
    opened: OpenedCheckpoint, items: Sequence[ReadItem], options: Options, deadline: Deadline
) -> dict[str, bytes]:
    """What is stored of objects, by key; it can be unpickled to what is allowed."""
    keys = {item.storage_index.fqn for item in items}
    stored, limit_s = opened.stored, ENDING * options.timeout_s
    contents = dict.fromkeys(sorted(keys), b"")
    names = stored.save.read(partial(_objects, opened), limit_s) if keys else {}

    def read(key: str) -> None:
        contents[key] = stored.object_content(names[key])

    jobs = [Job(key, names[key].unique_key, partial(read, key)) for key in contents]
    wait = partial(Transfer(jobs, _NUM_READERS).wait, deadline.left_s)
    stored.save.read(wait, limit_s)
    _require_allowed(contents.items(), opened.root, opened.allowed)
    return contents


def _require_allowed(contents: Iterable[tuple[str, bytes]], place: object, allow: Allowed) -> None:
    """Unpickle bytes once, to what is allowed: DCP does it freely. Equal ones are tried once.

    Raises:
        UnsafeObjectError: bytes need a class that is not allowed.
    """
    tried: set[bytes] = set()
    with allowing(allow):  # once, since the list is long
        for key, content in contents:
            if content not in tried:
                load_content(content, str(place), key, ())
                tried.add(content)


def _read(
    specs: Mapping[str, ArraySpec], item: ReadItem, target: torch.Tensor, options: Options
) -> TensorRead:
    """The read that an item of a plan asks for."""
    key, shape = item.storage_index.fqn, tuple(item.lengths)
    spec, tensor = specs[key], target.detach()
    require_plain(tensor, key=key, is_filled=True)
    if tuple(tensor.shape) != shape:
        raise PlanError(
            f"{key}: a tensor of shape {tuple(tensor.shape)} to fill, its plan has {shape}", key=key
        )
    if options.strict_dtype and tensor.dtype != torch_dtype(spec.dtype):
        raise PlanError(
            f"{key}: dtype {spec.dtype.value} in the checkpoint, {tensor.dtype} requested; load it "
            "as it is stored, or without strict_dtype, which converts it",
            key=key,
        )
    origin = item.storage_index.offset or (0,) * len(shape)
    start = tuple(map(sum, zip(origin, item.storage_offsets, strict=True)))
    return spec, Region(start, shape), tensor
