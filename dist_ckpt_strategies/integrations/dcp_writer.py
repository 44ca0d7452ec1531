"""Packs as a storage that ``torch.distributed.checkpoint`` (DCP) writes; see ``dcp_storage``.

Nothing here talks to a peer: what ranks have to tell each other travels in DCP's own results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from torch.utils._pytree import tree_map_only

from dist_ckpt_strategies.comm.process_group import global_rank
from dist_ckpt_strategies.config import Options, options_from_environment
from dist_ckpt_strategies.core.array import DType, ObjectId, Region, ShardId, ShardSpec
from dist_ckpt_strategies.device import require_plain
from dist_ckpt_strategies.errors import CheckpointError, PlanError, StrategyError
from dist_ckpt_strategies.formats.base import BASE, NamedBase, base_to_name
from dist_ckpt_strategies.formats.commit import require_unfinished
from dist_ckpt_strategies.formats.index import NewSave, PackSummary
from dist_ckpt_strategies.formats.locations import PACKS, place_of
from dist_ckpt_strategies.formats.objects import Allowed, default_allowed, dump_object
from dist_ckpt_strategies.formats.pack import Digests, Layout, lay_out
from dist_ckpt_strategies.formats.pack_commit import commit, new_save_id
from dist_ckpt_strategies.formats.pack_write import delete_files, file_of
from dist_ckpt_strategies.integrations.dcp_storage import (
    PATHS,
    Placed,
    done,
    naming,
    require_allowed,
)
from dist_ckpt_strategies.sharded.ledger import Ledger, described, proved
from dist_ckpt_strategies.sharded.save import Contents, limits_of, pack_writer, write_contents
from dist_ckpt_strategies.sharded.unchanged import LastSave, compared, described_save, judged
from dist_ckpt_strategies.storage.io_pool import OPENING, WORK, Deadline, run_within

logger = logging.getLogger(__name__)


class PackStorageWriter(Placed, staging.BlockingAsyncStager, StorageWriter):
    """Saves as ("safetensors", 1): each rank writes packs, the coordinator makes them visible.

    For ``torch.distributed.checkpoint.save`` and ``async_save``, also in a process of its own: it
    can be pickled. What was there before stays whole until the new index replaces its own.

    One writer for several saves, each after ``reset(path)``, compares each with the one before; see
    the option ``on_unchanged``.

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
        self._last: tuple[str, LastSave] | None = None  # this rank's, and a pack of it
        self._committed: frozenset[str] = frozenset()  # all packs of the last save, if it is
        self.reset(path)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state in host memory. DCP's ``async_save`` calls it."""
        # The copy that DCP makes by itself has the memory, without the conjugate and negative bits.
        plain = tree_map_only(torch.Tensor, lambda t: t.resolve_conj().resolve_neg(), state_dict)
        if not hasattr(staging, "DefaultStager"):  # an earlier torch
            return staging.BlockingAsyncStager().stage(plain)
        stager: Any = staging.DefaultStager(staging.StagingOptions(*[False] * 4))
        try:
            return dict(stager.stage(plain))
        finally:
            stager.close()

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
            place = place_of(root)
            self._base = run_within(deadline, root, lambda: base_to_name(self._options, place))

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
        records, tables = [record for record, _ in packs], [digests for _, digests in packs]
        self._written = tuple(file_of(record.name) for record in records)
        summary = PackSummary(tuple(records), layout.objects, layout.common)
        stored = rank, summary, described(layout, (), ()), self._repeats(layout, summary, tables)
        nbytes = sum(record.nbytes for record in records)
        return done([WriteResult(MetadataIndex(""), nbytes, stored)])

    def _repeats(self, layout: Layout, summary: PackSummary, tables: Sequence[Digests]) -> Any:
        """A pack of the save before, and how this one compares with it; None: there is none."""
        before, self._last = self._last, None
        if not tables:
            return None
        ends = described_save(self.checkpoint_id, layout, tables)
        self._last = summary.packs[0].name, ends
        name, last = before or ("", None)
        return name, compared(last, ends, self._options.on_unchanged)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make what all ranks have written the content of the place. DCP calls it on one rank.

        Raises:
            CoverageError, PlanError: the shards do not make up the tensors; or the save repeats the
                last one, and ``on_unchanged`` says so.
            StorageError: it cannot be made visible.
        """
        stored = [result.storage_data for of_rank in results for result in of_rank]
        ranks, summaries, descriptions, repeats = zip(*stored, strict=True)
        told = tuple((num_packs, main, digest) for num_packs, main, _, digest in descriptions)
        ledger = proved(Ledger("", told, {}), ranks)
        facts: dict[str, Any] = {"ranks": len(ranks), "created": time.time()}
        facts |= {PATHS: paths} if (paths := _paths(metadata.planner_data)) else {}
        facts |= {BASE: self._base} if self._base else {}

        before, self._committed = self._committed, frozenset()
        compared_all = [how if name in before else None for name, how in filter(None, repeats)]
        has_trained = judged(compared_all, is_first=True)

        def make_visible() -> CheckpointError | None:
            place = place_of(self._root)
            common, marker, save_id = _no_common_state(), PACKS.to_json(), new_save_id(place)
            save = NewSave(save_id, ledger.segments or (), summaries, facts, common, marker)
            return commit(place, save)

        deadline = Deadline.after(WORK * self._options.timeout_s)
        if failure := run_within(deadline, self._root, make_visible):
            logger.warning("%s: Megatron-Core's own load does not find it: %s", self._root, failure)
        self._committed = frozenset(pack.name for one in summaries for pack in one.packs)
        if self._last is not None:
            name, ends = self._last
            self._last = name, replace(ends, has_trained=has_trained)

    def discard(self) -> None:
        """Delete what the last save of this rank has written, when it has failed on all ranks."""
        delete_files(place_of(self._root), self._written)
        self._written = ()


def _no_common_state() -> bytes:
    """A common state for Megatron-Core, which asks for one."""
    return dump_object({}, name="common state")


def _contents(
    plan: SavePlan, planner: SavePlanner, allow: Allowed, *, has_common: bool
) -> Contents:
    """This rank's shards and objects in a plan."""
    shards: list[ShardSpec] = []
    tensors: list[torch.Tensor] = []
    objects: list[tuple[ObjectId, bytes]] = []
    for item in plan.items:
        key = item.index.fqn
        with naming(f"{key}: pickling it", key):
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
        allowed = [*default_allowed(), *allow]
        require_allowed(pickled, "what is saved", allowed, is_whole=True)
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
    paths = planner_data.items() if are_paths else ()
    return {key: list(path) for key, path in paths if path != (key,)}
